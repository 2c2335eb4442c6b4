"""From one placement of an array to another.

- `mapping`: which elements go where, as pure plans.
- `plan`: the steps from placement to placement, with their cost in bytes.
- `execute`: plans carried out on a client's blocks.
- `functions`: `copy_to_mesh`, `relayout` and the others of TensorFlow's.
"""
