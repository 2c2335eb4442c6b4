"""Draws the Mermaid diagrams of the pages as SVG files, for light and for dark pages, without a browser.

In the repository, the code host draws a block of Mermaid. `accTitle` and `accDescr` in it are the text of the
image for readers who cannot see it; kinds of diagrams that know neither have them in comments.
"""

from __future__ import annotations

import hashlib
import html
import posixpath
import re
from pathlib import Path

import mermaidx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
_TEXT = re.compile(r"^\s*(?:%% )?acc(?:Title|Descr): (.*)$", re.M)
_THEMES = {"light": "neutral", "dark": "dark"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the drawings of all pages."""
    for page in list(files.documentation_pages()):
        for source in _BLOCK.findall(Path(str(page.abs_src_path)).read_text() if page.abs_src_path else ""):
            for scheme in _THEMES:
                files.append(File.generated(config, _path(source, scheme), content=drawn(source, scheme)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts the drawings in the place of their sources."""
    here = posixpath.dirname(page.file.src_uri) or "."

    def images(block: re.Match[str]) -> str:
        text = html.escape(". ".join(_TEXT.findall(block[1])))
        return "\n".join(
            f"![{text}]({posixpath.relpath(_path(block[1], scheme), here)}#only-{scheme})"
            for scheme in _THEMES
        )

    return _BLOCK.sub(images, markdown)


def drawn(source: str, scheme: str) -> str:
    """Returns a diagram as SVG of its natural size."""
    svg = mermaidx.render(source, theme=_THEMES[scheme]).svg()
    size = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg)
    if size is None:
        raise ValueError(f"this diagram was not drawn:\n{source}\n{svg[:200]}")
    return svg.replace('width="100%"', f'width="{size[1]}" height="{size[2]}"', 1)


def _path(source: str, scheme: str) -> str:
    return f"images/diagrams/{hashlib.sha256(source.encode()).hexdigest()[:12]}-{scheme}.svg"
