"""Makes pages of the notebooks among the documents: text as it is, cells and what they showed as blocks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each notebook, beside the notebook itself."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=rendered(Path(str(file.abs_src_path)))))
    return files


def rendered(notebook: Path) -> str:
    """Returns a notebook as Markdown."""
    parts: list[str] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = _joined(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_block("python", source))
        parts += [_shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _block("text", _joined(output["text"]))
    if output["output_type"] == "error":
        return _block("text", _COLOR.sub("", "\n".join(output["traceback"])))
    data = output["data"]
    return _joined(data["text/html"]) if "text/html" in data else _block("text", _joined(data["text/plain"]))


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
