"""`%%dmesh` in a Jupyter kernel: its interrupt reaches all ranks, and its end, by `kill -9`, ends them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tests.processes import running_after

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PATIENCE = 120.0


class Kernel:
    """A kernel of its own, whose cells are run one after the other."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, source: str, *, interrupt_after: int = 0) -> tuple[str, str]:
        """Run a cell; return what it printed, and its error's name. Interrupt it after so many lines."""
        request = self.client.execute(source)
        text = error = ""
        interrupted = False
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    text += content["text"]
                case "error":
                    error = content["ename"]
                case "status" if content["execution_state"] == "idle":
                    return text, error
            if interrupt_after and not interrupted and text.count("here") >= interrupt_after:
                interrupted = True
                self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.client.context.destroy(linger=0)
        self.manager.context.destroy(linger=0)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.close()


def test_interrupt_and_kill(kernel: Kernel) -> None:
    text, error = kernel.run("%load_ext dmesh")
    assert (text, error) == ("", "")
    _, error = kernel.run("%%dmesh -n 2\nimport os, time\nprint('here')\ntime.sleep(600)", interrupt_after=2)
    assert error == "KeyboardInterrupt"
    text, error = kernel.run("%%dmesh\nos.getpid()")
    assert error == ""
    pids = [int(line.rpartition(" ")[2]) for line in text.splitlines()]
    clients = [psutil.Process(pid) for pid in pids]
    assert len(clients) == 2
    text, error = kernel.run("import json, os; print(json.dumps(os.getpid()))")
    os.kill(json.loads(text), signal.SIGKILL)
    assert not running_after(clients, timeout=PATIENCE)
