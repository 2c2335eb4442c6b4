"""Saving of a checkpoint: each client writes its own blocks, and one commits them by a rename."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.checkpoint import manifest, zarr
from dmesh.arrays.checkpoint.agreement import Participants
from dmesh.arrays.checkpoint.manifest import Saved
from dmesh.arrays.checkpoint.read import PATH, directory_of, steps
from dmesh.arrays.dtensor import DTensor, move
from dmesh.errors import ArgumentTypeError, CheckpointError

_WRITES = 4
"""Number of blocks that a client writes at once; each needs memory for a copy."""
_SYNCS = 16
"""Number of files that it waits for at once."""
_DRAFT = ".saving-"
"""Beginning of the names of directories that are being written, or have been left behind."""


def save(directory: PATH, tree: Any, step: int | None = None) -> int:
    """Write a checkpoint of sharded arrays and other values; all clients call it together.

    Each client writes its own blocks; of what several devices have alike, one of them writes it. The step
    is there once all of it is on disk, and not at all before. Unreduced contributions are
    reduced first. The directory must be one that all clients see. Only one program may save to it at a time:
    what an interrupted save has left there is removed.

    ```python
    dmesh.checkpoint.save("checkpoints", {"weights": weights, "epoch": 3}, step=3)
    ```

    Args:
        directory: Where the steps are; it is made if it is not there.
        tree: Dicts, lists and tuples of sharded arrays, NumPy arrays, numbers, strings and None. All clients
            must have the same; of NumPy arrays, one client's counts.
        step: Number of the step; None for the one after the latest, from 1 on.

    Returns:
        The number of the step.

    Raises:
        ArgumentTypeError: Something in the tree cannot be saved; nothing was written.
        CheckpointError: There is such a step already, the clients have different trees, or one of them, which
            the message names, cannot write. The steps that are there stay as they are.
        MissingExtraError: zarr is not installed.
        PeerLostError: A client has died. The steps that are there stay as they are.
    """
    root = Path(directory)
    sharded = [leaf for _, leaf in manifest.walk(tree) if isinstance(leaf, DTensor)]
    name = "dmesh.checkpoint.save" if step is None else f"dmesh.checkpoint.save of step {step!r:.40}"
    clients = Participants((x.spec.grid for x in sharded), name)
    content: dict[str, Any] = {}
    arrays: list[tuple[Saved, Any]] = []

    def describe() -> str:
        nonlocal content, arrays
        zarr.require()
        if step is not None and (type(step) is not int or not 0 <= step < 10**18):
            raise ArgumentTypeError(f"step must be an integer from 0 on, got {step!r:.80}")
        content, arrays = manifest.encode(tree)
        return hashlib.sha256(json.dumps([content, step]).encode()).hexdigest()

    clients.same(clients.step(describe), "step and tree, also in the order of keys,")
    leads = clients.index == 0

    def prepare() -> str:
        return "/".join(_prepared(root, step, content, [saved for saved, _ in arrays])) if leads else ""

    number, draft_name = clients.step(prepare)[0].split("/")
    draft = root / draft_name

    def write() -> str:
        # Communication comes first: a client that cannot write would miss it.
        whole = [move(x, x.spec.complete()) if isinstance(x, DTensor) else x for _, x in arrays]
        blocks = [
            (saved, index, block)
            for at, (saved, _) in enumerate(arrays)
            for index, block in _own_blocks(whole[at], at, clients)
        ]
        with ThreadPoolExecutor(_WRITES) as pool:
            files = list(pool.map(lambda block: zarr.write_chunk(draft, *block), blocks))
        _to_disk(files, draft)
        return ""

    try:
        clients.step(write)
    except CheckpointError:
        if leads:  # all clients have stopped writing
            shutil.rmtree(draft, ignore_errors=True)
        raise

    def commit() -> str:
        if leads:
            os.rename(draft, directory_of(root, int(number)))
            _sync(root)
        return ""

    clients.step(commit)
    return int(number)


def _prepared(
    root: Path, step: int | None, content: dict[str, Any], arrays: Iterable[Saved]
) -> tuple[str, str]:
    """Make the directory of a new step, with all but the chunks; return the step and the directory's name."""
    root.mkdir(parents=True, exist_ok=True)
    there = steps(root)
    number = (there[-1] + 1 if there else 1) if step is None else step
    target = directory_of(root, number)
    if target.exists():
        raise CheckpointError(f"there is a step {number} already: remove {target}, or choose another number")
    for left in root.glob(f"{_DRAFT}*"):
        shutil.rmtree(left)
    draft = root / f"{_DRAFT}{number}-{secrets.token_hex(4)}"
    draft.mkdir()
    _to_disk(zarr.write_metadata(draft, arrays, content), draft)
    return str(number), draft.name


def _own_blocks(value: Any, at: int, clients: Participants) -> Iterator[tuple[zarr.Index, NDArray[Any]]]:
    """Yield the blocks of a complete array that this client writes, with their positions.

    Of the devices that have a block alike, another one writes it for each next array.
    """
    if not isinstance(value, DTensor):
        if value.size and at % len(clients.ranks) == clients.index:
            yield (0,) * value.ndim, value
        return
    spec = value.spec
    for index, holders in spec.holders.items():
        position = holders[at % len(holders)]
        if position in spec.grid.positions:
            slot = spec.slot_of[spec.grid.positions.index(position)]
            block = value.blocks[slot]
            if block.size:
                yield index, np.asarray(block)


def _to_disk(files: Iterable[Path], root: Path) -> None:
    """Wait until files, and the directories that lead to them from `root` on, are on disk."""
    paths: dict[Path, None] = {}
    for file in files:
        paths.update(dict.fromkeys((file, *file.parents[: len(file.relative_to(root).parts)])))
    with ThreadPoolExecutor(_SYNCS) as pool:  # a file system commits them together
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
