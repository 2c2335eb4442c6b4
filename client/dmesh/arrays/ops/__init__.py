"""NumPy's functions for sharded arrays, one module per family; each registers its functions."""
