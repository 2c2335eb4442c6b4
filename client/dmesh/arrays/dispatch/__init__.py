"""From NumPy's protocols to rules: `protocol` for ufuncs, `registry` for the other functions.

- `registry`: which function has which handler.
- `operands`: what may meet in an operation, and where its operands have to be.
- `ufunc`: calls of ufuncs, with a cache of plans. `reduction`: their reductions and accumulations.
- `protocol`: NumPy's protocol for ufuncs.
"""
