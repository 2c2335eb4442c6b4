"""Hypothesis strategies for meshes and layouts, and short ways to write them."""

import math

import numpy as np
from hypothesis import strategies as st

from dmesh.devices.device import DeviceSpec
from dmesh.layout import MATCH, UNSHARDED, Layout
from dmesh.mesh import Mesh
from dmesh.mesh.fields import RESERVED_NAMES


def devices(count, task=0, kind="CPU", job="worker"):
    return [DeviceSpec(job, 0, task, kind, index) for index in range(count)]


def grid(dims, clients=1, client=0, name="", kind="CPU"):
    """A client's view of a mesh over equal shares of devices; `dims` is a dict."""
    size = math.prod(dims.values())
    share = size // clients
    ids = list(range(client * share, (client + 1) * share))
    shape = list(dims.values())
    return Mesh(list(dims), np.arange(size).reshape(shape), ids, devices(share, client, kind), name)


dim_names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Z", "C"], exclude_characters="|,="),
    min_size=1,
    max_size=6,
).filter(lambda name: name.isprintable() and name not in RESERVED_NAMES)
mesh_names = st.text(st.characters(codec="utf-8", exclude_characters="|").filter(str.isprintable), max_size=8)


@st.composite
def meshes(draw, max_size=48):
    """Meshes of any kind: of one or several clients, remote, with all devices listed, from any first id."""
    names = draw(st.lists(dim_names, min_size=1, max_size=4, unique=True))
    sizes = []
    for _ in names:
        sizes.append(draw(st.integers(1, max(1, min(5, max_size // math.prod(sizes))))))
    size = math.prod(sizes)
    clients = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    share = size // clients
    client = draw(st.integers(0, clients - 1))
    kind = draw(st.sampled_from(["CPU", "GPU", "TPU"]))
    first = draw(st.sampled_from([0, 0, 4, 1000]))
    everybody = [spec for c in range(clients) for spec in devices(share, c, kind)]
    listed = draw(st.booleans())
    remote = listed and draw(st.booleans())
    own = range(0) if remote else range(client * share, (client + 1) * share)
    return Mesh(
        names,
        np.arange(first, first + size).reshape(sizes),
        [first + i for i in own],
        [everybody[i] for i in own],
        draw(mesh_names),
        everybody if listed else None,
        use_xla_spmd=kind == "TPU" and draw(st.booleans()),
    )


@st.composite
def layouts(draw, match=True):
    """Layouts of any rank over any mesh."""
    mesh = draw(meshes())
    axes = draw(st.permutations(mesh.dim_names))
    axes = axes[: draw(st.integers(0, len(axes)))]
    words = [UNSHARDED, MATCH] if match else [UNSHARDED]
    others = draw(st.lists(st.sampled_from(words), max_size=3))
    layout = Layout(draw(st.permutations([*axes, *others])), mesh)
    return layout.to_parted() if draw(st.booleans()) else layout
