"""What a file of a capsule is for, as artifact and capsule index spell it. Other roles belong to the rooms above."""

from __future__ import annotations

__all__ = ["CACHE_SEED", "PROCESS_IMAGE", "RESIDUAL"]

PROCESS_IMAGE = "process-image"
RESIDUAL = "residual"
CACHE_SEED = "cache-seed"
