"""Moving an array from one placement to another.

- `mapping`: mappings of elements, and plans of their exchange. No IO.
- `plan`: the steps from one placement to another, with their cost in bytes.
- `execute`: execution of plans on a client's blocks.
- `functions`: `copy_to_mesh`, `relayout` and others of TensorFlow's names.
"""
