"""Collectives of arrays on GPUs: `cupy.ndarray` in, `cupy.ndarray` out, through NCCL; see docs/gpu.md."""
