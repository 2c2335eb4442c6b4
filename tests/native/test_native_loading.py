"""`dmesh.native`: the module that was built is used, unless nobody wants it or it cannot be; it says why."""

import ast
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from dmesh import native
from dmesh.errors import ConfigurationError, NativeCoreError

ROOT = Path(__file__).resolve().parents[2]
# What make was asked for; tests themselves do not see these variables.
ASKED_FOR = os.environ.get("DMESH_BUILD_SANITIZE", "")
NOT_WANTED = os.environ.get("DMESH_BUILD_NATIVE") == "0"
COMPILER = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"


@pytest.fixture
def core(monkeypatch):
    monkeypatch.delenv("DMESH_NATIVE", raising=False)
    if native.core() is None and (NOT_WANTED or shutil.which(COMPILER.split()[0]) is None):
        pytest.skip(f"no native core is wanted, or there is no compiler: {native.reason()}")
    assert native.reason() is None, "a checkout with a compiler has its native core; `make native` builds it"
    return native.core()


def run(script, **environ):
    """Runs a script in a process of its own and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_built_module_is_used(core):
    assert core is sys.modules["dmesh._native"]
    assert core.abi == native.ABI
    assert core is native.core()


def test_it_says_how_it_was_built(core):
    assert core.build.keys() == native.BuildInfo.__annotations__.keys()
    assert core.build["compiler"].split()[0] in ("gcc", "clang")
    assert core.build["simd"]
    assert ",".join(core.build["sanitizers"]) == ASKED_FOR


def test_the_stub_has_what_the_module_offers(core):
    tree = ast.parse((ROOT / "client" / "dmesh" / "_native.pyi").read_text())
    declared = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            declared[node.target.id] = None
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args
            declared[node.name] = [
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
        elif isinstance(node, ast.ClassDef):
            declared[node.name] = None
    offered = {name: value for name, value in vars(core).items() if not name.startswith("__")}
    assert declared.keys() == offered.keys()
    for name, parameters in declared.items():
        if parameters is not None:
            assert offered[name].__text_signature__, f"{name}'s docstring begins with its signature"
            assert parameters == list(inspect.signature(offered[name]).parameters), name


def test_importing_dmesh_does_not_load_it():
    assert run("import dmesh, sys; print('dmesh._native' in sys.modules)") == "False"


def test_it_is_not_loaded_where_it_is_turned_off():
    script = """
        import sys
        import dmesh
        from dmesh import native
        dmesh.initialize_accelerator_system("CPU")
        assert native.core() is None
        assert "dmesh._native" not in sys.modules
        print(native.reason())
    """
    assert run(script, DMESH_NATIVE="0") == "DMESH_NATIVE turns it off"


@pytest.mark.parametrize("value", ["2", "maybe", "require"])
def test_a_value_that_means_nothing_is_refused(monkeypatch, value):
    monkeypatch.setenv("DMESH_NATIVE", value)
    for ask in (native.core, native.reason):
        with pytest.raises(ConfigurationError, match=f"DMESH_NATIVE is '{value}'; expected 1 .* 0 .* auto"):
            ask()


def test_it_may_be_insisted_on(core, monkeypatch):
    monkeypatch.setenv("DMESH_NATIVE", "1")
    assert native.core() is core


BROKEN = {
    "of another version": ("_native.py", "abi = 0", "another version of dmesh: its abi is 0, expected"),
    "too new for NumPy": (
        "_native.py",
        "raise RuntimeError('NumPy is too old')",
        "cannot be loaded: NumPy is too old",
    ),
    "half a file": (f"_native{sysconfig.get_config_var('EXT_SUFFIX')}", "\x7fELF", "cannot be loaded: "),
    "without what it needs": (
        "_native.py",
        "import no_such_module",
        "cannot be loaded: No module named 'no_such",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_module_that_cannot_be_used_is_done_without_or_an_error(tmp_path, kind):
    file, content, problem = BROKEN[kind]
    (tmp_path / file).write_text(content)
    assert problem in refusals(f"dmesh.__path__.insert(0, {str(tmp_path)!r})")


def test_an_installation_without_it_says_how_to_get_it():
    said = refusals("sys.modules['dmesh._native'] = None")
    assert "this installation was built without it" in said
    assert "DMESH_BUILD_NATIVE=require" in said
    assert "unset DMESH_NATIVE" in said


def refusals(setup):
    """Returns the error of DMESH_NATIVE=1 in a process where `setup` broke the module; checks all else."""
    return run(
        f"""
        import os, sys
        import dmesh
        {setup}
        from dmesh import native
        from dmesh.errors import NativeCoreError

        assert native.core() is None
        reason = native.reason()
        os.environ["DMESH_NATIVE"] = "1"
        for ask in (native.core, dmesh.initialize_accelerator_system):
            try:
                ask()
            except NativeCoreError as error:
                assert reason in str(error), (reason, error)
            else:
                raise AssertionError(f"{{ask}} did not refuse")
        try:
            native.core()
        except ImportError as error:
            print(error)
        """
    )


def test_the_error_is_in_the_tree():
    assert issubclass(NativeCoreError, ImportError)
