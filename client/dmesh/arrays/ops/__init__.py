"""NumPy's functions for sharded arrays, one module a family; each enters its functions into the registry."""
