"""Takes into the site what its pages link to beside `docs/`: documents as pages, other files as they are.

In the repository such links (`../SECURITY.md`) work as they are. In the site the README is the first page,
the other documents of the top directory are in `project/`, and files in `source/`, at their paths there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "SECURITY.md": "project/SECURITY.md",
}
"""Where the site has the documents of the top directory."""

_SOURCES = {page: source for source, page in DOCUMENTS.items()}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents of the top directory, and the files that pages link to."""
    for source, page in DOCUMENTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    linked: set[str] = set()
    for file in files.documentation_pages():
        for target in _LINK.findall((ROOT / _source(file.src_uri)).read_text()):
            path = _target(file.src_uri, target)
            if not path.startswith("docs/") and path not in DOCUMENTS and (ROOT / path).is_file():
                linked.add(path)
    for path in sorted(linked):
        files.append(
            File.generated(
                config,
                f"source/{path}",
                abs_src_path=str(ROOT / path),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to where the site has their targets."""
    here = page.file.src_uri

    def redirected(link: re.Match[str]) -> str:
        path = _target(here, link[1])
        target = path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"
        if path.startswith("docs/") and path.endswith(".ipynb"):
            target = target.removesuffix(".ipynb") + ".md"  # `notebooks.py` makes a page of it
        return posixpath.relpath(DOCUMENTS.get(path, target), posixpath.dirname(here) or ".")

    return _LINK.sub(redirected, markdown)


def _source(page: str) -> str:
    """Returns the path in the repository of a page of the site."""
    notebook = f"docs/{page.removesuffix('.md')}.ipynb"
    if (ROOT / notebook).is_file():
        return notebook
    return _SOURCES.get(page, page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}")


def _target(page: str, link: str) -> str:
    """Returns the path in the repository that a page's link stands for."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_source(page)), link))
