"""Two hosts with an sshd each: network namespaces, own keys, own configuration, an unprivileged port."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engines.packages import find
from tests.faults.network import Network

_PORT = 2222
_SSHD = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PidFile none
"""
_SSH = """\
Host *
  Port {port}
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  ConnectTimeout 2
"""


class TwoHosts:
    """The two, and what ssh needs to get there.

    Args:
        folder: Where keys and configuration go.
        network: Has two hosts.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.addresses = [host.address for host in network.hosts]
        self._servers: list[subprocess.Popen[bytes]] = []

    def ssh(self, key: str = "user_key") -> str:
        """Returns the command that `--ssh` gets, with one of the keys."""
        config = self.folder / f"config_{key}"
        config.write_text(_SSH.format(port=_PORT, folder=self.folder, key=self.folder / key))
        return f"ssh -F {config}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """Returns a command that runs another one on the first host."""
        return [*self.network.hosts[0].prefix, *command]

    @contextlib.contextmanager
    def serving(self) -> Iterator[TwoHosts]:
        """Runs sshd on both."""
        for name in ("host_key", "user_key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        (self.folder / "sshd_config").write_text(_SSHD.format(port=_PORT, folder=self.folder))
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known = (f"[{address}]:{_PORT} {key}\n" for address in self.addresses)
        (self.folder / "known_hosts").write_text("".join(known))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own demand
        try:
            for host in self.network.hosts:
                self._serve(host.prefix)
            yield self
        finally:
            for server in self._servers:
                server.terminate()
                server.wait(10)
                server.stderr.close()

    def _serve(self, prefix: Sequence[str]) -> None:
        server = subprocess.Popen(
            [*prefix, find("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        self._servers.append(server)
        said = []
        for line in server.stderr:
            said.append(line)
            if b"Server listening" in line:
                return
        raise RuntimeError(f"sshd has not started: {said}")
