"""Division of a dataset among workers and replicas, by the rules of the reference. Pure functions.

With a global batch of G rows and N replicas, `batch_sizes` gives each replica ceil(G / N) or floor(G / N)
rows. Every worker begins at its own replicas in the list of sizes, so that one step of all workers takes G
rows. This is for workers that read different rows: files, or shards of their own (FILE, HINT), or all of
them (OFF).

With DATA, all workers have the same batches: each is cut into N parts, and worker w of W takes the parts w,
w + W, w + 2 W and so on. So it is with batches whose size is not known before. Where the
source has random access, a worker reads the rows of its parts only.
"""

from __future__ import annotations

import dataclasses

from dmesh._log import logger
from dmesh.data.files import FileSource
from dmesh.data.options import SHARD_HINT, AutoShardPolicy
from dmesh.data.pipeline import Node, static_batch_size, transform, walk
from dmesh.data.prefetching import Prefetch
from dmesh.data.rebatching import Rebatch, Split
from dmesh.data.shuffling import Shuffle
from dmesh.data.transforms import Shard, WithOptions
from dmesh.errors import ShardHintError, ShardingError, UnshardableSourceError

__all__ = ["batch_sizes", "divide", "effective_policy", "with_entropy"]


def batch_sizes(global_batch_size: int, num_workers: int, replicas: int, worker: int) -> tuple[int, ...]:
    """Returns the numbers of rows of one worker's elements, which repeat.

    Args:
        global_batch_size: Rows of a batch of all replicas together.
        num_workers: Number of workers.
        replicas: Number of replicas of each.
        worker: Index of the worker.

    Returns:
        As many numbers as there are replicas of all workers.
    """
    total = num_workers * replicas
    rows, more = divmod(global_batch_size, total)
    sizes = (rows + 1,) * more + (rows,) * (total - more)
    start = worker * replicas
    return sizes[start:] + sizes[:start]


def effective_policy(node: Node, policy: AutoShardPolicy, num_workers: int) -> AutoShardPolicy:
    """Returns the policy by which a dataset is divided: AUTO becomes FILE or DATA. Raises if impossible.

    Raises:
        ShardHintError: The dataset has a `SHARD_HINT`, but the policy is not HINT.
        UnshardableSourceError: FILE, but the dataset does not come from files.
        ShardingError: There are fewer files than workers.
    """
    hinted = any(isinstance(step, Shard) and step.num_shards == SHARD_HINT for step in walk(node))
    if policy is AutoShardPolicy.HINT:
        if not hinted:
            logger.warning(
                "AutoShardPolicy.HINT has no effect on a dataset without shard(SHARD_HINT, SHARD_HINT): "
                "every worker reads all of it"
            )
        return policy
    if hinted:
        raise ShardHintError(
            f"the dataset has a shard(SHARD_HINT, SHARD_HINT), but its policy is {policy.name}; set "
            "options.experimental_distribute.auto_shard_policy to AutoShardPolicy.HINT"
        )
    if policy in (AutoShardPolicy.OFF, AutoShardPolicy.DATA):
        return policy
    others = [leaf.name for leaf in walk(node) if not leaf.inputs and not isinstance(leaf, FileSource)]
    if not others:
        _check_files(node, num_workers)
        return AutoShardPolicy.FILE
    reason = f"the dataset comes from {', '.join(sorted(set(others)))}, not from files only"
    if policy is AutoShardPolicy.FILE:
        if num_workers > 1:
            raise UnshardableSourceError(
                f"AutoShardPolicy.FILE cannot be followed: {reason}. Use AutoShardPolicy.DATA"
            )
        return policy
    if num_workers > 1:
        logger.warning(
            "AutoShardPolicy.AUTO becomes DATA: %s. Every worker keeps its share of each batch",
            reason,
        )
    return AutoShardPolicy.DATA


def _check_files(node: Node, num_workers: int) -> None:
    for source in walk(node):
        if isinstance(source, FileSource) and len(source.files) < num_workers:
            raise ShardingError(
                f"the dataset has only {len(source.files)} file(s), which is not enough for a file of its "
                f"own for each of {num_workers} workers. Use AutoShardPolicy.DATA, or OFF"
            )


def divide(node: Node, policy: AutoShardPolicy, num_workers: int, replicas: int, worker: int) -> Node:
    """Returns the pipeline of one worker, whose elements go to its replicas in turn.

    Args:
        node: The dataset, whose elements are global batches.
        policy: Result of `effective_policy`.
        num_workers: Number of workers.
        replicas: Number of replicas of each.
        worker: Index of the worker.
    """
    total = num_workers * replicas
    if isinstance(node, Prefetch | WithOptions):
        # Below it, so that a worker reads its share only.
        share = divide(node.source, policy, num_workers, replicas, worker)
        return dataclasses.replace(node, source=share)
    if policy is AutoShardPolicy.DATA:
        parts = Split(node, total) if total > 1 else node
        return Shard(parts, num_workers, worker) if num_workers > 1 else parts

    def own(step: Node) -> Node:
        if policy is AutoShardPolicy.FILE and isinstance(step, FileSource):
            return step.with_files(step.files[worker::num_workers])
        if isinstance(step, Shard) and step.num_shards == SHARD_HINT:
            return dataclasses.replace(step, num_shards=num_workers, index=worker)
        return step

    mine = transform(node, own)
    if total == 1:
        return mine
    size = static_batch_size(node)
    if not size:
        return Split(mine, total)
    return Rebatch(mine, batch_sizes(size, num_workers, replicas, worker))


def with_entropy(node: Node, entropy: int) -> Node:
    """Returns a pipeline in which `entropy` is the seed of shuffles without a seed."""

    def seeded(step: Node) -> Node:
        if isinstance(step, Shuffle) and step.seed is None:
            return dataclasses.replace(step, entropy=entropy)
        return step

    return transform(node, seeded)
