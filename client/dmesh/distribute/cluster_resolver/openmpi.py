"""The processes of one `mpirun` of Open MPI."""

from __future__ import annotations

from dmesh.distribute.cluster_resolver.launched import LaunchedClusterResolver
from dmesh.distribute.cluster_resolver.variables import integer, required_integer, text

PLACE = "an mpirun of Open MPI"


class OpenMPIClusterResolver(LaunchedClusterResolver):
    """Reads the `OMPI_COMM_WORLD_*` variables at every call; MPI itself is neither needed nor started.

    Open MPI tells a process its rank, how many there are, and how many of them are on its host, but not where
    the others are. On one host that does not matter: all are at 127.0.0.1. For several hosts there are three
    ways: say which hosts there are (`hosts`); say where rank 0 is (`coordinator`, or `DMESH_COORDINATOR` for
    a server apart), and let `initialize_accelerator_system` introduce all to each other there; or neither,
    and rank 0 is taken to be on the host of `mpirun`, unless another host is named.

    Args:
        port_base: Port of the first process on each host; the next ones follow. Default: `DMESH_PORT_BASE`,
            or one that follows from the launch.
        hosts: Processes of each host, in order of ranks; None if not known.
        coordinator: HOST, or HOST:PORT, of rank 0.
        job_name: Job of all processes.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: Open MPI has not started this process.
        ConfigurationError: An argument or a variable is malformed.
    """

    def _rank(self) -> int:
        return required_integer("OMPI_COMM_WORLD_RANK", PLACE)

    def _size(self) -> int:
        return required_integer("OMPI_COMM_WORLD_SIZE", PLACE)

    def _local(self) -> tuple[int, int]:
        return (
            required_integer("OMPI_COMM_WORLD_LOCAL_RANK", PLACE),
            required_integer("OMPI_COMM_WORLD_LOCAL_SIZE", PLACE),
        )

    def _identity(self) -> str:
        return f"openmpi {text('PMIX_NAMESPACE') or text('OMPI_MCA_ess_base_jobid')}"

    def _leader(self) -> str | None:
        if text("DMESH_COORDINATOR") is not None:
            return None  # all meet there, and that rank 0 is on the host of mpirun is only likely
        # 293273600.0;tcp://192.0.2.2,198.51.100.2:56943;tcp6://[fd00::2]:56763
        for part in (text("OMPI_MCA_orte_hnp_uri") or "").split(";"):
            scheme, _, rest = part.partition("://")
            if scheme in ("tcp", "tcp4"):
                return rest.rpartition(":")[0].split(",")[0] or None
        return None


def detected() -> OpenMPIClusterResolver | None:
    """Returns a resolver for the launch that this process belongs to; None if it is none of several.

    Raises:
        ConfigurationError: A variable of the launch is malformed.
        ResolverError: A variable of the launch is missing.
    """
    return OpenMPIClusterResolver() if (integer("OMPI_COMM_WORLD_SIZE") or 0) > 1 else None
