"""The dmesh coordination server: membership, sessions, barriers and key-values for clusters of clients."""
