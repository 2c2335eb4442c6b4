"""Functions that tests launch; ranks import them from here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import dmesh
from dmesh.errors import BarrierError, DMeshError, PeerLostError


def sums(scale: int, offset: int = 0) -> tuple[int, int, list[int]]:
    """Returns the rank, its process id, and a sum over all ranks."""
    rank = dmesh.client_id()
    total = dmesh.collectives.all_reduce(np.array([scale * rank + offset, 1]))
    return rank, os.getpid(), total.tolist()


def raises(culprit: int) -> None:
    """One rank raises an exception, the others wait for it."""
    if dmesh.client_id() == culprit:
        raise ValueError("the learning rate is negative")
    dmesh.collectives.all_reduce(np.ones(2))


def dies(culprit: int) -> None:
    """One rank is killed, the others wait for it."""
    dmesh.collectives.barrier()
    if dmesh.client_id() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dmesh.collectives.all_reduce(np.ones(2))


def recovers(culprit: int) -> tuple[bool, int, int]:
    """One rank is killed in step 2; another process takes its place, and all go on from there."""
    rejoined = recover = dmesh.coordination.rejoined()
    step = 0
    while step < 5:
        try:
            if recover:
                dmesh.coordination.barrier("recover")
                step = int(dmesh.collectives.all_reduce(np.array(step), "max"))
                recover = False
            if step == 2 and dmesh.client_id() == culprit and not rejoined:
                os.kill(os.getpid(), signal.SIGKILL)
            total = int(dmesh.collectives.all_reduce(np.array(1)))
            step += 1
        except (PeerLostError, BarrierError):
            recover = True
    return rejoined, os.getpid(), total


def computes_on(culprit: int, directory: str) -> None:
    """One rank raises an exception while another one computes, and does not call dmesh."""
    rank = dmesh.client_id()
    if rank == culprit:
        raise ValueError("the learning rate is negative")
    while rank == 0 and not os.path.exists(f"{directory}/go"):
        time.sleep(0.01)
    try:
        dmesh.collectives.all_reduce(np.ones(2))
    except DMeshError as error:
        with open(f"{directory}/{rank}", "w") as file:
            file.write(type(error).__name__)


def meets() -> tuple[str, int]:
    """Returns where the coordination server is, and a sum over all ranks."""
    return os.environ["DMESH_COORDINATOR"], int(dmesh.collectives.all_reduce(np.array(1)))


def exits(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def returns_a_lock() -> object:
    return threading.Lock()


class Unreadable:
    """Something that only the process that has pickled it can unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return _reads_in, (os.getpid(),)


def _reads_in(pid: int) -> None:
    if pid != os.getpid():
        raise ValueError("written elsewhere")


def returns_something_unreadable() -> object:
    return Unreadable()


def leaves_early() -> int:
    """Rank 0 returns at once; the others have something to do without it."""
    rank, others = dmesh.client_id(), [1, 2]
    group = dmesh.collectives.new_group(others) if rank else None
    if group is None:
        return 0
    while dmesh.coordination.member(0).state.name != "LEFT":
        dmesh.coordination.wait_for_epoch(dmesh.coordination.epoch(), timeout=0.1)
    return int(dmesh.collectives.all_reduce(np.array(1), group=group))


def initializes(variable: str) -> tuple[int, str | None]:
    dmesh.initialize_accelerator_system("CPU", num_logical_cpu_devices=3)
    devices = dmesh.num_global_devices("CPU")
    dmesh.shutdown_accelerator_system()
    return devices, os.environ.get(variable)


def says_hello() -> None:
    print("hello from", dmesh.client_id())


def fails_once(culprit: str, directory: str) -> str:
    """One rank raises an exception at its first start; the other ones go on until it is there again."""
    if os.environ["RANK"] == culprit:
        if os.environ["DMESH_RESTART_COUNT"] == "0":
            raise ValueError("the learning rate is negative")
        open(f"{directory}/again", "w").close()
    while not os.path.exists(f"{directory}/again"):
        time.sleep(0.01)
    return os.environ["DMESH_RESTART_COUNT"]


class Holder:
    """An actor that only takes room."""

    def hold(self) -> int:
        return os.getpid()


def starts_a_daemon() -> int:
    """Leaves a process in a session of its own; returns its id."""
    dmesh.collectives.barrier()
    return subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL).pid


def signals_its_launcher(number: int) -> bool:
    """Sends a signal to the process that has launched this rank; returns whether it came back."""
    came = threading.Event()
    signal.signal(number, lambda *_: came.set())
    os.kill(os.getppid(), number)
    return came.wait(60.0 if number == signal.SIGUSR2 else 0.5)
