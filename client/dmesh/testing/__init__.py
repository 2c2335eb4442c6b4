"""Tools for testing programs that use dmesh."""
