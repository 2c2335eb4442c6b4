"""Saving of a checkpoint: each client writes its own blocks, and one client commits them with a rename."""

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
"""Number of blocks that a client writes concurrently; each needs memory for a copy."""
_SYNCS = 16
"""Number of files that a client syncs concurrently."""
_DRAFT = ".saving-"
"""Prefix of the names of unfinished directories."""


def save(directory: PATH, tree: Any, step: int | None = None) -> int:
    """Write a checkpoint of sharded arrays and other values; all clients call it together.

    Each client writes its own blocks; a block that several devices have is written once. The step becomes
    visible when all of it is on disk. Unreduced contributions are reduced first. All clients must see the
    same directory. Only one program may save to it at a time, because a save removes the remains of
    interrupted ones.

    ```python
    dmesh.checkpoint.save("checkpoints", {"weights": weights, "epoch": 3}, step=3)
    ```

    Args:
        directory: Directory of the steps; it is created if it does not exist.
        tree: Dicts, lists and tuples of sharded arrays, NumPy arrays, numbers, strings and None. All clients
            must pass the same tree; a NumPy array is written by one client.
        step: Number of the step; None for the latest one plus 1, from 1 on.

    Returns:
        The number of the step.

    Raises:
        ArgumentTypeError: A part of the tree cannot be saved; nothing was written.
        CheckpointError: The step exists, the clients' trees differ, or a client, which the message names,
            cannot write. Existing steps are unchanged.
        MissingExtraError: zarr is not installed.
        PeerLostError: A client died. Existing steps are unchanged.
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
            raise ArgumentTypeError(f"step must be an integer of at least 0, got {step!r:.80}")
        content, arrays = manifest.encode(tree)
        return hashlib.sha256(json.dumps([content, step]).encode()).hexdigest()

    clients.same(clients.step(describe), "step and tree, also in the order of keys,")
    leads = clients.index == 0

    def prepare() -> str:
        return "/".join(_prepared(root, step, content, [saved for saved, _ in arrays])) if leads else ""

    number, draft_name = clients.step(prepare)[0].split("/")
    draft = root / draft_name

    def write() -> str:
        # Communicate before writing: a client that fails to write would miss a collective call.
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
    """Create the directory of a new step, without chunks; return the step and the directory's name."""
    root.mkdir(parents=True, exist_ok=True)
    there = steps(root)
    number = (there[-1] + 1 if there else 1) if step is None else step
    target = directory_of(root, number)
    if target.exists():
        raise CheckpointError(f"step {number} exists already: remove {target}, or choose another number")
    for left in root.glob(f"{_DRAFT}*"):
        shutil.rmtree(left)
    draft = root / f"{_DRAFT}{number}-{secrets.token_hex(4)}"
    draft.mkdir()
    _to_disk(zarr.write_metadata(draft, arrays, content), draft)
    return str(number), draft.name


def _own_blocks(value: Any, at: int, clients: Participants) -> Iterator[tuple[zarr.Index, NDArray[Any]]]:
    """Yield the blocks of a complete array that this client writes, with their positions.

    If several devices have a block, they take turns from array to array.
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
    """Sync files and their parent directories up to `root` to disk."""
    paths: dict[Path, None] = {}
    for file in files:
        paths.update(dict.fromkeys((file, *file.parents[: len(file.relative_to(root).parts)])))
    with ThreadPoolExecutor(_SYNCS) as pool:  # file systems commit concurrent syncs together
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
