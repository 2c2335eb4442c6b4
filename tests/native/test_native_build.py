"""What hatch_build.py makes: a wheel for this platform, or, where nothing can be compiled, one for all."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]


def make(kind, into, **environ):
    """Builds a `wheel` or an `sdist` as pip does, without an environment of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DMESH_")}
    return subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(into), str(ROOT)],
        env={**clean, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )


def made(into):
    (path,) = into.iterdir()
    return path


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def natives(names):
    return [name for name in names if "native" in Path(name).name and name.endswith((".so", ".c", ".h"))]


def assert_is_pure(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert natives(contents(wheel)) == []
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in archive.read(metadata).decode()


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}")
def test_a_wheel_with_the_core_is_for_this_platform(tmp_path):
    done = make("wheel", tmp_path, DMESH_BUILD_NATIVE="require", DMESH_BUILD_WERROR="1")
    assert done.returncode == 0, done.stdout
    wheel = made(tmp_path)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.split("-")[2] == python
    platform = wheel.stem.split("-")[4]
    assert platform.startswith(("linux_", "macosx_"))
    assert natives(contents(wheel)) == [f"dmesh/_native{SUFFIX}"]
    assert "dmesh/_native.pyi" in contents(wheel)
    # It is that of this build, not a copy of what an editable installation left in the tree.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    said = subprocess.run(
        [sys.executable, "-c", "from dmesh import native as n; print(n.core().build, n.core().__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "DMESH_NATIVE": "1"},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert str(tmp_path) in said


def test_without_a_compiler_there_is_a_pure_wheel_and_a_warning(tmp_path):
    done = make("wheel", tmp_path, CC="/nonexistent/cc")
    assert done.returncode == 0, done.stdout
    assert "WARNING: dmesh is installed WITHOUT its native core: it does not compile" in done.stdout
    assert "/nonexistent/cc" in done.stdout
    assert_is_pure(made(tmp_path))


def test_who_requires_the_core_gets_no_wheel_without_it(tmp_path):
    done = make("wheel", tmp_path, CC="/nonexistent/cc", DMESH_BUILD_NATIVE="require")
    assert done.returncode != 0
    assert "the native core of dmesh was not built: it does not compile" in done.stdout
    assert "DMESH_BUILD_NATIVE=require asks for it" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_who_wants_no_core_gets_a_pure_wheel_without_a_word(tmp_path):
    done = make("wheel", tmp_path, DMESH_BUILD_NATIVE="0", CC="/nonexistent/cc")
    assert done.returncode == 0, done.stdout
    assert "native" not in done.stdout
    assert_is_pure(made(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DMESH_BUILD_NATIVE", "yes"),
        ("DMESH_BUILD_SANITIZE", "adress"),
        ("DMESH_BUILD_SANITIZE", "address,thread"),
        ("DMESH_BUILD_WERROR", "on"),
    ],
)
def test_a_value_that_means_nothing_is_refused(variable, value):
    done = subprocess.run(
        [sys.executable, str(ROOT / "hatch_build.py")],
        env={**os.environ, variable: value}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{variable} is '{value}'; expected" in done.stderr


def test_an_sdist_has_the_sources_and_nothing_compiled(tmp_path):
    done = make("sdist", tmp_path)
    assert done.returncode == 0, done.stdout
    with tarfile.open(made(tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "client" / "native").glob("*/*.[ch]")}
    assert sources
    assert sources | {"hatch_build.py", "client/dmesh/_native.pyi"} <= names
    assert [name for name in names if name.endswith((".so", ".o"))] == []


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}")
def test_in_place_it_is_built_when_the_sources_changed_and_gone_when_they_do_not_compile(tmp_path):
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    native = shutil.copytree(ROOT / "client" / "native", tmp_path / "client" / "native")
    header = native / "core" / "reduce.h"  # of all that takes long to optimize
    header.write_text('#pragma GCC optimize ("O0")\n' + header.read_text())
    module = tmp_path / "client" / "dmesh" / f"_native{SUFFIX}"

    def build(mode="auto"):
        return subprocess.run(
            [sys.executable, "hatch_build.py"],
            cwd=tmp_path, env={**os.environ, "DMESH_BUILD_NATIVE": mode}, capture_output=True, text=True,
        )  # fmt: skip

    assert build().returncode == 0
    first = module.stat()
    assert build().returncode == 0
    assert module.stat() == first, "nothing has changed, nothing is built"

    source = tmp_path / "client" / "native" / "python" / "module.c"
    source.write_text(source.read_text() + "\nthis is no C\n")
    later = first.st_mtime + 10
    os.utime(source, (later, later))
    failed = build("require")
    assert (failed.returncode, module.exists()) == (1, True)
    assert "does not compile" in failed.stderr
    warned = build()
    assert (warned.returncode, module.exists()) == (0, False)
    assert "WARNING" in warned.stderr
    assert [path.name for path in module.parent.iterdir()] == [], "no half of a module is left"
