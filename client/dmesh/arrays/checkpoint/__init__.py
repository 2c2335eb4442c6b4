"""Checkpoints of sharded arrays: each client writes its blocks, and any mesh can read them.

```python
import tempfile

import numpy as np
import dmesh

directory = tempfile.mkdtemp()
mesh = dmesh.create_mesh([("x", 1)])
weights = dmesh.ones((4, 3), layout=dmesh.Layout(["x", "unsharded"], mesh))
dmesh.checkpoint.save(directory, {"weights": weights, "rate": 0.1}, step=10)
tree = dmesh.checkpoint.load(directory, mesh=mesh)
```

The format is Zarr v3, which needs the extra `checkpoint`: `pip install 'dmesh[checkpoint]'`.
docs/checkpoints.md describes it.

- `manifest`: description of the saved tree. `zarr`: arrays and their chunks in files.
- `write`, `read`: saving and loading. `agreement`: the clients' exchange of each step's outcome.
- `safetensors`: files of that format, read by slices.
"""

from __future__ import annotations

from dmesh.arrays.checkpoint.read import load, steps
from dmesh.arrays.checkpoint.safetensors import load_safetensors
from dmesh.arrays.checkpoint.write import save

__all__ = ["load", "load_safetensors", "save", "steps"]
