"""The documentation's notebook: its cells, what they show, and how it is run.

`python -m tests.engines.notebooks` runs it anew and writes down what it shows.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "how-to" / "notebook.ipynb"
_TIMEOUT = 120
_VARIES = ((r"\(pid \d+\)", "(pid 4711)"), (r"pid \d+", "pid 4711"), (r"after \d+\.\d s", "after 0.1 s"))
"""Parts of what is shown that change from run to run, and what is written down in their place."""


def execute() -> Any:
    """Run the notebook in a kernel of its own; return it with what its cells have shown."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    return notebook


def shown(cell: Any) -> list[str]:
    """Return the lines of a cell's outputs, without what changes from run to run, and in one order.

    Ranks run side by side: the order of their lines is another one in each run.
    """
    text = ""
    for output in cell["outputs"]:
        match output["output_type"]:
            case "stream":
                text += _joined(output["text"])
            case "error":
                text += "\n".join(output["traceback"]) + "\n"
            case _:
                data = output["data"]
                text += _joined(data.get("text/html", data["text/plain"])) + "\n"
    for pattern, instead in _VARIES:
        text = re.sub(pattern, instead, text)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return sorted(line.rstrip() for line in text.splitlines())


def cells(notebook: Any) -> list[Any]:
    """Return the cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored() -> Any:
    """Return the notebook as it is written down."""
    return json.loads(NOTEBOOK.read_text())


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _by_rank(lines: list[str]) -> list[str]:
    """Return the lines with those of ranks in one order, what they printed before their results."""

    def order(line: str) -> tuple[bool, int]:
        rank, _, rest = line[1:].partition("] ")
        return rest.startswith(("Out: ", "     ")), int(rank)

    runs = itertools.groupby(lines, lambda line: re.match(r"\[\d+\] ", line) is not None)
    return [line for ranked, run in runs for line in (sorted(run, key=order) if ranked else run)]


def _write(notebook: Any) -> None:
    for cell in cells(notebook):
        cell["metadata"].pop("execution", None)
        merged: list[Any] = []
        for output in cell["outputs"]:
            if output["output_type"] == "stream" and merged and merged[-1].get("name") == output["name"]:
                merged[-1]["text"] += output["text"]
            else:
                merged.append(output)
            if output["output_type"] == "stream":
                merged[-1]["text"] = "".join(_by_rank(merged[-1]["text"].splitlines(keepends=True)))
        cell["outputs"] = merged
    for index, cell in enumerate(notebook["cells"]):
        cell["id"] = f"cell-{index}"
    notebook["metadata"] = {"language_info": {"name": "python"}}
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    for pattern, instead in _VARIES:
        text = re.sub(pattern, instead, text)
    NOTEBOOK.write_text(text + "\n")


if __name__ == "__main__":
    _write(execute())
