"""The house's rules that a linter does not know: sizes, names, generated code, the public surface."""

import ast
import importlib
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.repo import import_cycles, protos

import dmesh

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("client", "server")
    for path in (ROOT / folder).rglob("*.py")
    if "_pb2" not in path.name
)
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def test_generated_code_is_current(tmp_path):
    if not protos.COMPILER.exists():
        pytest.skip("the compiler is not installed: `make protos` installs it, and so does `make test`")
    protos.generate(tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "dmesh" / "v1").iterdir()}
    committed = {
        path.name: path.read_text() for path in (ROOT / "client" / "dmesh" / "v1").glob("*_pb2*")
        if path.is_file()
    }  # fmt: skip
    assert fresh.keys() == committed.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make protos` and commit the result: {stale}"


def test_generated_code_asks_for_no_version_of_its_runtime():
    """Newer compilers write checks into it that keep dmesh out of environments with other frameworks."""
    checks = re.compile(r"runtime_version|GRPC_GENERATED_VERSION|_registered_method")
    for path in (ROOT / "client" / "dmesh" / "v1").glob("*_pb2*.py"):
        assert not checks.search(path.read_text()), path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_small_and_named_for_what_they_are(path):
    assert len(path.read_text().splitlines()) <= 600, "split it: no module is over 600 lines"
    assert path.stem not in FORBIDDEN_NAMES


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_programs_hide_no_module_of_pythons_own(folder):
    """The folder of a program comes first among the paths of imports, in every process that it starts so."""
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert not names & sys.stdlib_module_names


def test_the_core_names_no_environment_variable():
    """It speaks the protocol's terms; a client knows the settings that a refused field comes from."""
    for path in (ROOT / "server" / "dmesh_server" / "core").glob("*.py"):
        assert not re.search(r"(DMESH|DTENSOR)_[A-Z]", path.read_text()), path


def test_nothing_unpickles_or_evaluates():
    """Data from a wire or a file is never executed."""
    # A process of `dmesh.launch` and its parent exchange a call by descriptors that only they have, and a
    # notebook's clients get its code over an inherited pipe.
    pickles = {path for path in SOURCES if path.match("client/dmesh/engines/serialization.py")}
    evaluates = {path for path in SOURCES if path.match("client/dmesh/notebook/client.py")}
    assert len(pickles) == len(evaluates) == 1
    for path in set(SOURCES) - pickles:
        forbidden_calls = set() if path in evaluates else {"eval", "exec"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name):
                    assert node.func.id not in forbidden_calls, f"{path}:{node.lineno}"
                for keyword in node.keywords:
                    value = keyword.value
                    assert not (keyword.arg in ("shell", "allow_pickle") and getattr(value, "value", None)), (
                        path
                    )
                continue
            else:
                continue
            assert not names & {"pickle", "marshal", "shelve"}, f"{path}:{node.lineno}"


PUBLIC_MODULES = [
    "dmesh",
    "dmesh.collectives",
    "dmesh.collectives.backends",
    "dmesh.coordination",
    "dmesh.data",
    "dmesh.data.experimental",
    "dmesh.distribute",
    "dmesh.distribute.cluster_resolver",
    "dmesh.distribute.coordinator",
    "dmesh.distribute.experimental",
    "dmesh.distribute.experimental.partitioners",
    "dmesh.errors",
    "dmesh.testing",
    "dmesh.testing.backends",
    "dmesh.testing.cloud",
    "dmesh.tpu",
    "dmesh.tpu.experimental",
    "dmesh.train",
]


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_public_names_are_exported_typed_and_documented(module_name):
    module = importlib.import_module(module_name)
    exported = list(module.__all__)
    assert exported == sorted(exported, key=str.lower), "__all__ is sorted"
    for name in exported:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module_name}.{name} has a docstring"
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
            assert not untyped, f"{module_name}.{name}: parameters {untyped} have types"
            assert signature.return_annotation is not signature.empty, (
                f"{module_name}.{name} has a return type"
            )


@pytest.mark.parametrize("name", [name for name in dmesh.collectives.__all__ if name.islower()])
def test_docstrings_of_collectives_describe_every_argument(name):
    function = getattr(dmesh.collectives, name)
    said = inspect.getdoc(function)
    missing = [a for a in inspect.signature(function).parameters if not re.search(rf"\n    {a}: \S", said)]
    assert not missing
    assert said.count("\nArgs:\n") == bool(inspect.signature(function).parameters)
    assert said.count("\nRaises:\n") == 1
    assert "\n    Raises:\n" in pydoc.render_doc(function, renderer=pydoc.plaintext), "`help` shows it"


def test_type_checkers_see_what_is_there():
    """The imports that only they see, and the names that are imported when they are used, are the same."""
    tree = ast.parse(Path(dmesh.__file__).read_text())
    [seen] = [node for node in tree.body if isinstance(node, ast.If)]
    names = {alias.name for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.targets[0].id for node in seen.body if isinstance(node, ast.Assign)}
    assert names | {"__version__"} == set(dmesh.__all__)
    assert set(dmesh.__all__) <= set(dir(dmesh))
    with pytest.raises(AttributeError, match="'nothing'"):
        dmesh.nothing  # noqa: B018


def test_the_server_and_the_command_line_start_without_numpy():
    for module in ("dmesh.cli", "dmesh_server.main"):
        script = f"import sys, {module}; assert not sys.modules.keys() & {{'numpy', 'fastapi', 'jinja2'}}"
        subprocess.run([sys.executable, "-c", script], check=True)


def test_every_error_derives_from_a_builtin_and_is_documented():
    for name, value in vars(dmesh.errors).items():
        if inspect.isclass(value) and issubclass(value, Exception) and value is not dmesh.errors.DMeshError:
            assert issubclass(value, dmesh.errors.DMeshError), name
            bases = {base for base in value.__mro__ if base.__module__ == "builtins"} - {
                Exception, BaseException, object,
            }  # fmt: skip
            assert bases, f"{name} also derives from what a user would catch"
            assert inspect.getdoc(value), name


def test_importing_the_sdk_needs_only_its_four_dependencies():
    script = (
        "import sys; import dmesh; print('\\n'.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    third_party = {
        name for name in output.split()
        if name not in {*sys.stdlib_module_names, "sitecustomize"}
        and not name.startswith(("_", "cython_runtime"))
    }  # fmt: skip
    offered_by_grpc = {
        "grpc_health",
        "grpc_reflection",
        "grpc_status",
    }  # it imports them if installed
    assert third_party - offered_by_grpc <= {
        "dmesh",
        "numpy",
        "ml_dtypes",
        "grpc",
        "google",
        "typing_extensions",
    }


def test_every_module_can_be_imported_by_itself():
    for package in ("dmesh", "dmesh_server"):
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def test_few_modules_lie_outside_of_the_rooms():
    loose = [path.stem for path in (ROOT / "client" / "dmesh").glob("*.py") if path.stem != "__init__"]
    assert len(loose) <= 12, f"what has a room belongs into it: {sorted(loose)}"


def test_no_module_is_in_an_import_cycle(capsys):
    assert import_cycles.main() == 0, capsys.readouterr().out


def test_no_document_installs_from_an_index():
    """The name is not ours there."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    for page in pages:
        blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
        assert not re.search(r"pip install [^\n#]*(?<![\w./])'?dmesh\b", "".join(blocks)), page
        if page.name not in ("install.md", "CHANGELOG.md"):
            assert "pip install 'dmesh[" not in page.read_text(), page


def test_changelog_names_the_version():
    assert re.search(
        r"^## \[?Unreleased|^## \[?" + re.escape(dmesh.__version__), (ROOT / "CHANGELOG.md").read_text(), re.M
    )
