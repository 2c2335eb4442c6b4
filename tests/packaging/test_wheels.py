"""What `make wheels` accepts as a wheel, and how it builds for other platforms."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tests.packaging.wheels import TARGETS, check_contents, main

X86, ARM = 62, 183


def wheel(
    folder: Path, platform: str, machine: int = X86, extra: str = "", magic: bytes = b"\x7fELF"
) -> Path:
    path = folder / f"dmesh-0.1.0-cp311-cp311-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "dmesh/_native.some.so", magic + bytes(14) + machine.to_bytes(2, "little") + bytes(40)
        )
        if extra:
            archive.writestr(extra, b"")
    return path


@pytest.mark.parametrize(
    ("target", "platform", "machine"),
    [
        (None, "manylinux_2_17_x86_64.manylinux2014_x86_64", X86),
        ("manylinux_x86_64", "manylinux_2_17_x86_64", X86),
        ("manylinux_aarch64", "manylinux_2_17_aarch64", ARM),
        ("musllinux_x86_64", "musllinux_1_2_x86_64", X86),
        ("musllinux_aarch64", "musllinux_1_2_aarch64", ARM),
    ],
)
def test_a_good_wheel(tmp_path: Path, target: str | None, platform: str, machine: int) -> None:
    check_contents(wheel(tmp_path, platform, machine), TARGETS.get(target or ""))


@pytest.mark.parametrize(
    ("target", "made", "said"),
    [
        (None, {"platform": "linux_x86_64"}, "no index takes the tag"),
        (None, {"platform": "manylinux_2_17_x86_64", "extra": "dmesh.libs/libgomp.so"}, "libgomp"),
        (None, {"platform": "manylinux_2_17_x86_64", "magic": b"\xcf\xfa\xed\xfe"}, "is not of Linux"),
        ("manylinux_aarch64", {"platform": "manylinux_2_17_aarch64"}, "is of machine 62"),
        ("manylinux_aarch64", {"platform": "manylinux_2_17_x86_64", "machine": ARM}, "x86_64"),
        ("musllinux_x86_64", {"platform": "manylinux_2_17_x86_64"}, "manylinux"),
    ],
)
def test_a_bad_wheel_is_refused(tmp_path: Path, target: str | None, made: dict, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_contents(wheel(tmp_path, **made), TARGETS.get(target or ""))


def test_other_platforms_are_built_by_zig() -> None:
    environment = TARGETS["musllinux_aarch64"].environment
    assert environment["CC"].endswith(" -m ziglang cc -target aarch64-linux-musl")
    assert environment["SETUPTOOLS_EXT_SUFFIX"].endswith("-aarch64-linux-musl.so")
    assert environment["_PYTHON_HOST_PLATFORM"] == "linux-aarch64"


def test_an_unknown_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["manylinux_sparc"])
    assert "there is no target manylinux_sparc" in capsys.readouterr().err
