"""HTTP for operators: health probes and the state of clusters as JSON. Read-only."""
