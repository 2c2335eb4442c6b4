"""First program: devices, a mesh over all of them, a sum over all clients, and a sum along one axis."""

import numpy as np

import dmesh

with dmesh.session("CPU") as me:  # joins the other clients, and leaves with them
    print(f"client {me.rank} of {me.size} has", *dmesh.local_devices("CPU"))

    # A grid of all devices. If the number of clients is even, each row has half of them.
    rows = 2 if me.size % 2 == 0 else 1
    mesh = dmesh.create_distributed_mesh(
        [("batch", rows), ("model", dmesh.num_global_devices("CPU") // rows)], device_type="CPU"
    )

    total = dmesh.collectives.all_reduce(np.array([1.0, me.rank]))
    row = dmesh.collectives.all_reduce(np.array([1.0, me.rank]), group=mesh.group("model"))
    print(f"sum over the world {total}, over my row of the {mesh.shape()} mesh {row}")
