"""Makers of local checkpoints, so that nothing here needs a model hub.

Two kinds: `smollm2`, a small model with real answers, and `random_weights`, real architectures with
weights drawn from a seed, for size and for tests. Both write the files that a hub's folder has.
"""

from coldsnap.engines.transformers.checkpoints.random_weights import SIZES, make_random
from coldsnap.engines.transformers.checkpoints.smollm2 import make_smollm2

__all__ = ["SIZES", "make_random", "make_smollm2"]
