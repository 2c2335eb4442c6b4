"""Dispatch of NumPy's functions: `protocol` for ufuncs, `registry` for the other functions.

- `registry`: the handler of each function.
- `operands`: checks of operands, and their placements.
- `ufunc`: calls of ufuncs, with a cache of plans. `reduction`: their reductions and accumulations.
- `protocol`: `__array_ufunc__`. `threads`: kernels on several large blocks at once.
"""
