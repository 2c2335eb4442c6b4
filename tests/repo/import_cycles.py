"""Check of `make lint` for import cycles between modules; imports under TYPE_CHECKING count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator

import grimp


def cycles(graph: grimp.ImportGraph) -> Iterator[list[str]]:
    """Yield a shortest cycle of each strongly connected component."""
    for component in _components(graph.modules, graph.find_modules_directly_imported_by):
        yield min((_shortest(graph, name, component) for name in sorted(component)), key=len)


def describe(graph: grimp.ImportGraph, cycle: list[str]) -> str:
    """Return the cycle's imports for people, one line each."""
    lines = [f"import cycle of {len(cycle)} modules:"]
    for importer, imported in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        details = graph.get_import_details(importer=importer, imported=imported)
        where = f"line {details[0]['line_number']}: {details[0]['line_contents']}" if details else ""
        lines.append(f"  {importer} -> {imported}  ({where})")
    return "\n".join(lines)


def _components(
    modules: Iterable[str], imported_by: Callable[[str], Collection[str]]
) -> Iterator[frozenset[str]]:
    """Yield the strongly connected components of two modules and more (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for root in sorted(modules):
        if root in index:
            continue
        path = [(root, iter(sorted(imported_by(root))))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while path:
            module, rest = path[-1]
            for found in rest:
                if found not in index:
                    index[found] = low[found] = len(index)
                    stack.append(found)
                    path.append((found, iter(sorted(imported_by(found)))))
                    break
                if found in stack:
                    low[module] = min(low[module], index[found])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[module])
                if low[module] == index[module]:
                    at = stack.index(module)
                    component = frozenset(stack[at:])
                    del stack[at:]
                    if len(component) > 1:
                        yield component


def _shortest(graph: grimp.ImportGraph, start: str, component: Collection[str]) -> list[str]:
    """Return a shortest cycle through `start` within its component."""
    paths = [[start]]
    seen = {start}
    while True:
        longer = []
        for path in paths:
            for found in sorted(graph.find_modules_directly_imported_by(path[-1])):
                if found == start:
                    return path
                if found in component and found not in seen:
                    seen.add(found)
                    longer.append([*path, found])
        paths = longer


def main() -> int:
    """Print the cycles of both packages; return 1 if there are any."""
    graph = grimp.build_graph("dmesh", "dmesh_server", cache_dir=None)
    found = [describe(graph, cycle) for cycle in cycles(graph)]
    for text in found:
        print(text)
    if found:
        print("Move what both need into the lower module, pass it in, or put a Protocol into the lower one.")
    else:
        print(f"no import cycles in {len(graph.modules)} modules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
