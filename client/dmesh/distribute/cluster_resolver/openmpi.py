"""The processes of one `mpirun` of Open MPI."""

from __future__ import annotations

from dmesh.distribute.cluster_resolver.launched import LaunchedClusterResolver
from dmesh.distribute.cluster_resolver.variables import integer, required_integer, text

PLACE = "an mpirun of Open MPI"


class OpenMPIClusterResolver(LaunchedClusterResolver):
    """Reads the `OMPI_COMM_WORLD_*` variables at every call; MPI itself is neither needed nor started.

    Open MPI tells a process its rank, the number of processes, and the number on its host, but not the
    addresses of the others. On one host all are at 127.0.0.1. On several hosts, pass their names (`hosts`);
    or pass the address of rank 0 (`coordinator`, or `DMESH_COORDINATOR` for a standalone server), through
    which `initialize_accelerator_system` connects the processes. By default, rank 0 is assumed to be on the
    host of `mpirun`.

    Args:
        port_base: Port of the first process on each host; the other processes have the following ports.
            Default: `DMESH_PORT_BASE`, or a port derived from the launch.
        hosts: Number of processes of each host, in order of ranks; None if unknown.
        coordinator: HOST, or HOST:PORT, of rank 0.
        job_name: Job of all processes.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: Open MPI did not start this process.
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
            return None  # rendezvous at the coordinator, because rank 0 may be on another host than mpirun
        # 293273600.0;tcp://192.0.2.2,198.51.100.2:56943;tcp6://[fd00::2]:56763
        for part in (text("OMPI_MCA_orte_hnp_uri") or "").split(";"):
            scheme, _, rest = part.partition("://")
            if scheme in ("tcp", "tcp4"):
                return rest.rpartition(":")[0].split(",")[0] or None
        return None


def detected() -> OpenMPIClusterResolver | None:
    """Return a resolver for this process's launch; None if the launch has no other process.

    Raises:
        ConfigurationError: A variable of the launch is malformed.
        ResolverError: A variable of the launch is missing.
    """
    return OpenMPIClusterResolver() if (integer("OMPI_COMM_WORLD_SIZE") or 0) > 1 else None
