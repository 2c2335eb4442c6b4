"""From NumPy's protocols to rules: `ufunc` for ufuncs, `registry` for the other functions.

- `registry`: which function has which handler.
- `operands`: what may meet in an operation, and where its operands have to be.
- `ufunc`: ufuncs, their reductions and accumulations, with a cache of plans.
"""
