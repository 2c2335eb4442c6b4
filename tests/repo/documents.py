"""Reads the code blocks of the documents, and makes programs of them that can be run.

A block is run as it is, unless the comment above it, which readers do not see, says otherwise. All Python
blocks of a page are one program, in their order.

`<!-- not run: REASON -->`: why this block cannot run here.

`<!-- run: OPTIONS -->`: how the program that this block belongs to is run.

- `new` begins another program.
- `clients=N`: by that many clients. `NAME=VALUE`: with this environment variable. `pytest`: its tests.
- `slow` keeps it out of the default run, where programs of several clients and commands are not, either.
- `file=NAME`: the page's commands find this block under that name; `only`: and it is no program by itself.
- `engines`: likewise; `make engines` runs it.
- `needs=MODULE`: skipped where there is no such module.
- Of commands, `about`: numbers in the output change from run to run; `background`: goes on running for the
  blocks that follow; `repository`: in the repository, not in a new directory; `fails=CODE`: they
  end with that exit code.

`<!-- hidden`, lines of Python, `-->`: part of the program that readers need not see.

`<!-- file NAME`, lines, `-->`: a file that the page's commands find.

In Python, `expression  # -> value` and `print(...)  # -> text` are checked.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

SHOWN = ("mermaid", "text")
"""Languages of what is only shown: drawings, output, files of no particular format."""

_OPENING = re.compile(r"^( *)(`{3,})\s*([\w+-]*)(.*)$")
_PRELUDE = "from tests.repo.documented_values import prints as __prints__, says as __says__"


@dataclass(frozen=True)
class Block:
    """One block of a page, or a hidden part of a program."""

    page: Path
    line: int
    """Number of its first line of code, from 1."""
    language: str
    """As it stands behind the fence; "hidden" for hidden Python."""
    code: str
    options: tuple[str, ...] = ()
    """What the comment above it asks for."""
    not_run: str | None = None
    """Why it is not run, if the comment above it says so."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass
class Program:
    """Blocks that are run together."""

    blocks: list[Block] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return next((block for block in self.blocks if block.language != "hidden"), self.blocks[0]).place

    def option(self, name: str, default: str = "") -> str:
        """Returns the value of `name=value`."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")), default)

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that its options set."""
        return dict(o.split("=", 1) for o in self.options if re.match(r"[A-Z_]+=", o))

    def source(self) -> str:
        """Returns Python with each line where it stands in the page, so that tracebacks lead there."""
        lines = [_PRELUDE]
        for block in self.blocks:
            lines += [""] * (block.line - 1 - len(lines)) + _with_checks(block.code)
        return "\n".join(lines) + "\n"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page in their order."""
    lines = page.read_text().splitlines()
    options: tuple[str, ...] = ()
    not_run: str | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if opening := _OPENING.match(line):
            indent, fence, language, rest = opening.groups()
            assert not rest.strip(), f"{page}:{number}: only a language stands behind a fence"
            start = number
            while lines[number].strip() != fence:
                number += 1
            code = "\n".join(text.removeprefix(indent) for text in lines[start:number]) + "\n"
            number += 1
            yield Block(page, start + 1, language, code, options, not_run)
            options, not_run = (), None
        elif line.startswith("<!-- file "):
            start = number
            while lines[number] != "-->":
                number += 1
            name = line.removeprefix("<!-- file ")
            yield Block(page, start + 1, "hidden", "\n".join(lines[start:number]), (f"file={name}", "only"))
            number += 1
        elif line == "<!-- hidden":
            start = number
            while lines[number] != "-->":
                number += 1
            yield Block(page, start + 1, "hidden", "\n".join(lines[start:number]) + "\n", options)
            options = tuple(o for o in options if o != "new")
            number += 1
        elif line.startswith(("<!-- run:", "<!-- not run:")):
            kind, _, words = line.removeprefix("<!-- ").removesuffix("-->").partition(":")
            while not line.endswith("-->"):
                line = lines[number]
                words += " " + line.removesuffix("-->")
                number += 1
            if kind == "run":
                options = tuple(words.split())
            else:
                not_run = words.strip()


def programs_of(page: Path) -> list[Program]:
    """Returns the Python programs of a page."""
    programs: list[Program] = []
    for block in blocks_of(page):
        if block.language not in ("hidden", "python") or block.not_run is not None or "only" in block.options:
            continue
        if not programs or "new" in block.options:
            programs.append(Program())
        programs[-1].blocks.append(block)
        programs[-1].options += block.options
    return programs


def _with_checks(code: str) -> list[str]:
    """Turns the comments that tell a value into checks of it."""
    told = {
        token.start[0]: token.string.removeprefix("# ->").strip()
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT and token.string.startswith("# ->")
    }
    lines = [line.encode() for line in code.splitlines()]
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Expr) and node.end_lineno in told):
            continue
        text = told.pop(node.end_lineno)
        first, last, value = node.lineno - 1, node.end_lineno - 1, node.value
        begin, end = node.col_offset, node.end_col_offset
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print":
            opening = f"__prints__({text!r}, ".encode()
            lines[first] = lines[first][:begin] + opening + lines[first][begin + len("print(") :]
        else:
            lines[last] = lines[last][:end] + b")" + lines[last][end:]
            lines[first] = lines[first][:begin] + f"__says__({text!r}, ".encode() + lines[first][begin:]
    assert not told, f"a value is told behind something that is no expression: {told}"
    return [line.decode() for line in lines]
