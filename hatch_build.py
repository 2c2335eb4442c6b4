"""Builds the optional native core, `dmesh._native`, from the C files in `client/native/`.

As hatchling's build hook it runs with every wheel and editable installation; `python hatch_build.py` builds
in place. Where that is not possible, because there is no compiler or it fails, a warning says so, and dmesh
is installed without its native core, which it does not need.

| variable | value |
|---|---|
| `DMESH_BUILD_NATIVE` | `auto` (default); `0`: build none; `require`: fail where `auto` would warn |
| `DMESH_BUILD_SANITIZE` | what to check at run time: some of `address`, `undefined`, `thread`, with commas |
| `DMESH_BUILD_WERROR` | `1`: the compiler's warnings are errors |
| `SETUPTOOLS_EXT_SUFFIX` | end of the module's file name, for another platform (`make wheels`) |
"""

# No `from __future__ import annotations`: hatchling runs this file without making it a module that
# dataclasses could look annotations up in.
import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from dmesh import _native, native

    _the_stub_agrees: native.Core = _native  # checked here because no module of dmesh may import `dmesh`

MODULE = "dmesh._native"
SANITIZERS = ("address", "undefined", "thread")

FLAGS = (
    "-std=c11",
    "-O3",
    "-fvisibility=hidden",
    # Results are the same bits on every machine, so neither -march=native nor fused multiply-add where the
    # compiler finds some, and integers wrap around, as NumPy's do. Nobody looks at errno after a square root.
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
SANITIZER_FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")


WHAT_IT_NEEDS = (
    "a C compiler and Python's headers (Debian and Ubuntu: gcc, python3-dev; macOS: xcode-select --install)"
)


class NativeBuildError(Exception):
    """The native core cannot be built, or the variables that say how make no sense."""


@dataclass(frozen=True)
class BuildOptions:
    """What the environment says about the build."""

    mode: str = "auto"
    """`auto`, `0` or `require`."""
    sanitizers: tuple[str, ...] = ()
    """What the compiler should check at run time."""
    werror: bool = False
    """Whether the compiler's warnings are errors."""

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "BuildOptions":
        """Reads and checks the variables.

        Raises:
            NativeBuildError: One of them has a value that means nothing.
        """
        mode = environ.get("DMESH_BUILD_NATIVE", "").strip() or cls.mode
        if mode not in ("auto", "0", "require"):
            raise NativeBuildError(f"DMESH_BUILD_NATIVE is {mode!r}; expected auto, 0 or require")
        raw = environ.get("DMESH_BUILD_SANITIZE", "").strip()
        sanitizers = tuple(name.strip() for name in raw.split(",")) if raw else ()
        if not set(sanitizers) <= set(SANITIZERS) or {"address", "thread"} <= set(sanitizers):
            raise NativeBuildError(
                f"DMESH_BUILD_SANITIZE is {raw!r}; expected some of {', '.join(SANITIZERS)}, separated by "
                "commas, but not both address and thread, which exclude each other"
            )
        werror = environ.get("DMESH_BUILD_WERROR", "").strip() or "0"
        if werror not in ("0", "1"):
            raise NativeBuildError(f"DMESH_BUILD_WERROR is {werror!r}; expected 0 or 1")
        return cls(mode, sanitizers, werror == "1")

    @property
    def compiler_flags(self) -> list[str]:
        """The compiler's flags beyond those that Python itself was built with."""
        checks = [f"-fsanitize={name}" for name in self.sanitizers]
        return [*FLAGS, *(SANITIZER_FLAGS if checks else ()), *checks, *(["-Werror"] if self.werror else [])]

    @property
    def linker_flags(self) -> list[str]:
        """The linker's flags beyond Python's own."""
        return [f"-fsanitize={name}" for name in self.sanitizers]


def module_file(package: Path) -> Path:
    """Returns where the built module of this interpreter is inside of the package's directory."""
    suffix = os.environ.get("SETUPTOOLS_EXT_SUFFIX") or sysconfig.get_config_var("EXT_SUFFIX")
    return package / f"_native{suffix}"


def build(root: Path, package: Path, options: BuildOptions) -> Path:
    """Compiles the C files and puts the module into the package's directory.

    Args:
        root: The project's directory.
        package: Where the module goes, replacing one that is there in one step.
        options: How to build it.

    Returns:
        The module's file.

    Raises:
        NativeBuildError: It cannot be built. The compiler has written the details.
    """
    if sys.platform == "win32":
        raise NativeBuildError("there is none for Windows")
    if sys.implementation.name != "cpython":
        raise NativeBuildError(f"there is none for {sys.implementation.name}, only for CPython")
    try:
        import numpy
        import setuptools
        from setuptools.errors import BaseError, CompileError, LinkError
    except ImportError as error:
        raise NativeBuildError(f"its build needs NumPy and setuptools: {error}") from error
    sources = root / "client" / "native"
    extension = setuptools.Extension(
        MODULE,
        sources=[str(path) for path in sorted(sources.glob("*/*.c"))],
        include_dirs=[str(sources / "core"), numpy.get_include()],
        define_macros=[("DMESH_SANITIZERS", f'"{",".join(options.sanitizers)}"')],
        extra_compile_args=options.compiler_flags,
        extra_link_args=options.linker_flags,
    )
    with tempfile.TemporaryDirectory(prefix="dmesh-native-") as scratch:
        command = setuptools.Distribution({"name": "dmesh", "ext_modules": [extension]}).get_command_obj(
            "build_ext"
        )
        command.build_lib = command.build_temp = scratch
        try:
            command.ensure_finalized()
            command.run()
        except (BaseError, CompileError, LinkError, OSError) as error:
            raise NativeBuildError(f"it does not compile: {error}") from error
        # Compiled elsewhere and renamed: a process that has the old module in memory keeps it, and an
        # interrupted build leaves no half of a new one.
        target = module_file(package)
        partial = target.with_suffix(f".{os.getpid()}")
        try:
            package.mkdir(parents=True, exist_ok=True)
            shutil.copy(module_file(Path(scratch, "dmesh")), partial)
            partial.replace(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise NativeBuildError(f"it cannot be put into {package}: {error}") from error
    return target


def build_if_possible(
    root: Path, package: Path, options: BuildOptions, warn: Callable[[str], None]
) -> Path | None:
    """Builds the module, or says why there is none; a module of an earlier build is gone in that case.

    Returns:
        The module's file, or None.

    Raises:
        NativeBuildError: There is none, although the options require it.
    """
    problem = ""
    if options.mode != "0":
        try:
            return build(root, package, options)
        except NativeBuildError as error:
            problem = str(error)
            if options.mode == "require":
                raise NativeBuildError(
                    f"the native core of dmesh was not built: {problem}. DMESH_BUILD_NATIVE=require asks for "
                    f"it; it needs {WHAT_IT_NEEDS}"
                ) from error
    module_file(package).unlink(missing_ok=True)
    if problem:
        warn(
            f"WARNING: dmesh is installed WITHOUT its native core: {problem}. It works, but its collectives "
            f"are slower. For the native core, install {WHAT_IT_NEEDS}, and dmesh again. "
            "DMESH_BUILD_NATIVE=0 silences this warning"
        )
    return None


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the native core to a wheel, or puts it into the source tree for an editable installation."""

    _scratch: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the module. A wheel that has one is for this platform and Python; any other is for all.

        Args:
            version: `standard` or `editable`.
            build_data: What hatchling wants to know about the wheel.
        """
        options = BuildOptions.load(os.environ)
        root = Path(self.root)
        if version == "editable":
            package = root / "client" / "dmesh"
        else:
            self._scratch = tempfile.mkdtemp(prefix="dmesh-wheel-")
            package = Path(self._scratch)
        try:
            built = build_if_possible(root, package, options, self.app.display_warning)
        except NativeBuildError:
            self._clean()
            raise
        if built is None:
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            build_data["force_include"][str(built)] = f"dmesh/{built.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was built for the wheel, which has a copy of it."""
        self._clean()

    def _clean(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch)
            self._scratch = None


def main() -> None:
    """Builds in place; the ordinary module only if it is older than something that it is made of."""
    parser = argparse.ArgumentParser(description="Builds dmesh's native core into client/dmesh/.")
    parser.add_argument("--force", action="store_true", help="also if the sources have not changed")
    force = parser.parse_args().force
    root = Path(__file__).resolve().parent
    package = root / "client" / "dmesh"
    target = module_file(package)
    inputs = [Path(__file__), *(root / "client" / "native").glob("*/*.[ch]")]
    try:
        options = BuildOptions.load(os.environ)
        current = target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in inputs)
        if force or options.sanitizers or not current or options.mode == "0":
            build_if_possible(root, package, options, lambda text: print(text, file=sys.stderr))  # noqa: T201
    except NativeBuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
