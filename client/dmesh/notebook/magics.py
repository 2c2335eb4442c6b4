"""The magics `%%dmesh` and `%dmesh`, which `%load_ext dmesh` registers in IPython."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from dmesh.errors import ArgumentTypeError, KeptClientsError
from dmesh.launcher.labels import StreamOutput
from dmesh.notebook.clients import KeptClients, Result
from dmesh.notebook.command import Command, parse_cell, parse_line

_START = "start clients with `%%dmesh -n 4` at the top of a cell"


class Shell(Protocol):
    """The parts of IPython's shell that dmesh uses."""

    user_ns: dict[str, Any]
    display_pub: Any

    def register_magic_function(self, func: Callable[..., Any], magic_kind: str, magic_name: str) -> None:
        """Register a function as a magic."""


class Notebook:
    """The magics of one IPython shell, and its clients.

    Args:
        shell: The shell.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._clients: KeptClients | None = None

    def load(self) -> None:
        """Register the magics. The clients end at the latest with the shell's process."""
        self._shell.register_magic_function(self.dmesh, "line_cell", "dmesh")
        atexit.register(self.close)

    def close(self) -> None:
        """End the clients, if there are any."""
        if self._clients is not None:
            self._clients.close()

    def dmesh(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on dmesh clients that live from cell to cell.

        %%dmesh [-n N] [--cpu-devices K] [--rank RANKS]
            Run the cell on all clients, or on some ranks (0, 0,2 or 1-3). With -n, start N clients if none
            are running. Lines of output and the value of the last expression are labeled [rank].
        %dmesh status
            Show the clients.
        %dmesh stop
            End them.
        %dmesh restart [-n N] [--cpu-devices K]
            End them, and start new ones, as many unless -n is given.
        %dmesh push NAME... [--rank RANKS]
            Copy variables of the notebook to the clients.
        %dmesh pull NAME [--rank RANKS]
            Return the list of a variable's values, ordered by rank.
        """
        if cell is not None:
            return self._run(parse_cell(line), cell)
        command = parse_line(line)
        if command.verb == "status":
            self._print(*(["no clients: " + _START] if self._clients is None else self._clients.status()))
            return None
        if command.verb == "stop":
            running = self._clients is not None and not self._clients.ended
            self.close()
            self._print("the clients have ended" if running else "no clients are running")
            return None
        if command.verb == "restart":
            return self._restart(command)
        clients = self._running()
        if command.verb == "pull":
            return clients.pull(command.names[0], command.ranks)
        missing = [name for name in command.names if name not in self._shell.user_ns]
        if missing:
            raise ArgumentTypeError(f"the notebook has no variable {', '.join(missing)}. Nothing was pushed")
        clients.push({name: self._shell.user_ns[name] for name in command.names}, command.ranks)
        return None

    def _run(self, command: Command, cell: str) -> None:
        clients = self._clients
        if command.clients is not None and (clients is None or clients.ended):
            clients = self._start(command.clients, command.cpu_devices)
        clients = self._running()
        if command.clients not in (None, clients.count):
            raise KeptClientsError(
                f"{clients.count} clients are running, not {command.clients}. Omit -n, or run "
                f"`%dmesh restart -n {command.clients}` first; their variables will be lost"
            )
        if command.cpu_devices not in (None, clients.cpu_devices):
            raise KeptClientsError(
                f"the running clients were not started with --cpu-devices {command.cpu_devices}. Run "
                f"`%dmesh restart --cpu-devices {command.cpu_devices}` first"
            )
        number = (
            len(self._shell.user_ns.get("In", ())) - 1
        )  # IPython's own counter is ahead by one in some versions
        results = clients.run(cell, command.ranks, f"<In[{number}]>")
        for result in results:
            if result.html is not None:
                self._shell.display_pub.publish({"text/html": result.html, "text/plain": str(result.text)})
            elif result.text is not None:
                print(_labeled(result))  # noqa: T201 - the notebook's output

    def _restart(self, command: Command) -> None:
        before = self._clients
        count = command.clients or (before.count if before is not None else None)
        if count is None:
            raise KeptClientsError(f"no clients to restart: {_START}")
        devices = command.cpu_devices or (before.cpu_devices if before is not None else None)
        self.close()
        self._start(count, devices)

    def _start(self, count: int, cpu_devices: int | None) -> KeptClients:
        self._clients = KeptClients(
            count,
            StreamOutput(lambda: sys.stdout),
            StreamOutput(lambda: sys.stderr),
            cpu_devices=cpu_devices,
            environment=_environment(),
        )
        self._print(f"{count} client{'' if count == 1 else 's'} started; `%dmesh stop` ends them")
        return self._clients

    def _running(self) -> KeptClients:
        if self._clients is None:
            raise KeptClientsError(f"no clients are running: {_START}")
        if self._clients.ended:
            raise KeptClientsError(f"no clients are running: {self._clients.ended}. To go on, {_START}")
        return self._clients

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(f"dmesh: {line}")  # noqa: T201 - the notebook's output


def _environment() -> dict[str, str]:
    """Return this process's environment without a Matplotlib backend that draws into the notebook."""
    backend = os.environ.get("MPLBACKEND", "")
    return {k: v for k, v in os.environ.items() if k != "MPLBACKEND" or not backend.startswith("module://")}


def _labeled(result: Result) -> str:
    first, *rest = (result.text or "").split("\n")
    return "\n".join([f"[{result.rank}] Out: {first}", *(f"[{result.rank}]      {line}" for line in rest)])


_notebooks: dict[int, Notebook] = {}


def load(shell: Shell) -> None:
    """Register the magics in a shell."""
    notebook = _notebooks.setdefault(id(shell), Notebook(shell))
    notebook.load()


def unload(shell: Shell) -> None:
    """End the clients of a shell. The magics stay registered, because IPython cannot remove them."""
    notebook = _notebooks.pop(id(shell), None)
    if notebook is not None:
        notebook.close()
