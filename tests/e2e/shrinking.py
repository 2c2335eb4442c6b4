"""A client whose group loses members by SIGKILL, over and over, as `DMESH_TEST_PLAN` says.

A list of rounds. In each, all members repeat `call`, and `victims` are killed in the middle of it. The others
shrink the group, in which `in_shrink` are killed; then they agree, in which `in_agree` are killed. Prints for
each round, as JSON, what must be the same on all survivors.
"""

import json
import os
import signal
import threading
import time

import numpy as np

import dmesh
from dmesh.collectives import ANY_SOURCE, ANY_TAG, Group
from dmesh.errors import PeerLostError

SIZE = 100_000


def die(after: float) -> None:
    """Kill this process in a while, if all goes on as it should in the middle of something."""

    def work() -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=work, daemon=True).start()


def call(group: Group, name: str, x: np.ndarray, async_op: bool) -> list[object]:
    """Make a call in which all members wait for each other, or for all of their neighbors."""
    size, at = group.size, group.rank
    rows = np.broadcast_to(x, (size, *x.shape))
    match name:
        case "send":
            sent = group.send(x, (at + 1) % size, async_op=True)
            return [sent, group.recv(x, (at - 1) % size, async_op=async_op)]
        case "barrier":
            return [group.barrier(async_op=async_op)]
        case "permute":
            pairs = [(source, (source + 1) % size) for source in range(size)]
            return [group.permute(x, pairs, async_op=async_op)]
        case "reduce_scatter" | "all_to_all":
            return [getattr(group, name)(rows, async_op=async_op)]
        case "scatter":
            return [group.scatter(rows if at == 0 else x, 0, async_op=async_op)]
        case "all_gather of any lengths":
            return [group.all_gather(x[: len(x) // (at + 1)], counts="exchange", async_op=async_op)]
        case "all_to_all of any lengths":
            lengths = [len(x) + other for other in range(size)]
            return [group.all_to_all(np.ones(sum(lengths)), counts=lengths, async_op=async_op)]
        case "max_location":
            return [group.all_reduce(x, name, async_op=async_op)]
        case "all_gather_object" | "broadcast_object":
            return [getattr(group, name)({at: x.tobytes()}, async_op=async_op)]
        case "recv from any":
            sent = group.send(x, (at + 1) % size, tag=1, async_op=True)
            return [sent, group.recv(None, ANY_SOURCE, tag=ANY_TAG, async_op=async_op)]
    return [getattr(group, name)(x, async_op=async_op)]


def repeat(group: Group, name: str, count: int, asynchronous: bool) -> PeerLostError:
    """Call until a member is lost; return the error."""
    x = np.full(count, float(group.rank))
    try:
        while True:
            calls = [call(group, name, x, asynchronous) for _ in range(3 if asynchronous else 1)]
            for future in (one for made in calls for one in made):
                if hasattr(future, "result"):
                    future.result(60)
    except PeerLostError as error:
        return error


def main() -> None:
    dmesh.initialize_accelerator_system()
    rank = dmesh.client_id()
    group = dmesh.collectives.world()
    group.barrier()
    for number, now in enumerate(json.loads(os.environ["DMESH_TEST_PLAN"])):
        if rank in now["victims"]:
            die(now["delay"])
        error = repeat(group, now["call"], now["count"], now["async"])
        assert error.rank in now["victims"], error
        detected = time.monotonic()
        if rank in now["in_shrink"]:
            die(now["delay"] / 10)
        groups = []
        while True:
            group = group.shrink()
            groups.append(group.ranks)
            if rank in now["in_shrink"]:
                time.sleep(60)
            try:
                total = group.all_reduce(np.array([rank, 1])).tolist()
                break
            except PeerLostError:
                continue
        seconds = time.monotonic() - detected
        # Else one that dies soon may have sent its part of the result to some of the others only.
        dmesh.coordination.barrier(f"all have result {number}", group.ranks)
        if rank in now["in_agree"]:
            die(now["delay"] / 10)
        agreed = group.agree(rank | 1 << 40)
        if rank in now["in_agree"]:
            time.sleep(60)
        outcome = [number, groups[-1], total, agreed, group.missing, dmesh.collectives.agree(True, group)]
        if group.missing or now["in_agree"]:
            group = group.shrink()
        print(json.dumps([*outcome, group.ranks]), flush=True)
        print(f"took {seconds:.4f}", flush=True)
    dmesh.shutdown_accelerator_system()
    print("done", flush=True)


if __name__ == "__main__":
    main()
