"""Hosts of a TPU as their variables describe them."""

import pytest
from tests.e2e.clients import run_clients


@pytest.mark.slow
def test_hosts_of_a_tpu_as_they_are_set_up():
    """Each host has the variables of its own, and the clients' numbers are not those of the workers."""
    hosts = {
        client: {"TPU_WORKER_ID": str(1 - client), "TPU_WORKER_HOSTNAMES": "t1k-w-0,t1k-w-1"}
        for client in (0, 1)
    }
    program = (
        "import dmesh\nfrom dmesh.tpu.topology import Topology\n"
        "assert dmesh.initialize_accelerator_system() == 'TPU'\n"
        "print(dmesh.runtime.context.find(Topology).device_coordinates[:, 0].tolist())\n"
        "dmesh.shutdown_accelerator_system()\n"
    )
    environ = {"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_TOPOLOGY": "2x2x2", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
               "TPU_HOST_BOUNDS": "1,1,2"}  # fmt: skip
    with run_clients(2, program, environ=environ, per_client=hosts) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert client.out == "[[0, 0, 1, 0], [0, 0, 0, 0]]"
