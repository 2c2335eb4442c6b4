"""Resolver of the workers of PyTorch's `torchrun`."""

from __future__ import annotations

from dmesh.distribute.cluster_resolver.launched import LaunchedClusterResolver
from dmesh.distribute.cluster_resolver.variables import integer, required_integer, required_text, text

PLACE = "torchrun"


class TorchElasticClusterResolver(LaunchedClusterResolver):
    """Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.

    It reads them at every call; PyTorch is neither needed nor imported. torchrun tells a worker the address
    of rank 0, but not those of the others. On one host they can be derived. On several hosts, pass their
    names (`hosts`), or let `initialize_accelerator_system` connect the workers through rank 0. Other systems
    that set these variables, such as Kubeflow's PyTorchJob, work, too.

    Args:
        port_base: Port of the first worker on each host; the other workers have the following ports. Not
            `MASTER_PORT`, on which torchrun listens. Default: `DMESH_PORT_BASE`, or a port derived from the
            launch.
        hosts: Number of workers of each host, in order of ranks; None if unknown.
        coordinator: HOST, or HOST:PORT, of rank 0; the host in `MASTER_ADDR` if None.
        job_name: Job of all workers.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: A variable is not set.
        ConfigurationError: An argument or a variable is malformed.
    """

    def _rank(self) -> int:
        return required_integer("RANK", PLACE)

    def _size(self) -> int:
        return required_integer("WORLD_SIZE", PLACE)

    def _local(self) -> tuple[int, int]:
        return required_integer("LOCAL_RANK", PLACE), required_integer("LOCAL_WORLD_SIZE", PLACE)

    def _identity(self) -> str:
        return " ".join(str(text(name)) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))

    def _leader(self) -> str | None:
        return required_text("MASTER_ADDR", PLACE)


def detected() -> TorchElasticClusterResolver | None:
    """Return a resolver for this process's launch; None if the launch has no other worker.

    Raises:
        ConfigurationError: A variable is malformed.
        ResolverError: A variable is missing.
    """
    return TorchElasticClusterResolver() if (integer("WORLD_SIZE") or 0) > 1 else None
