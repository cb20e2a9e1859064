"""The jobs about vLLM on hosts of their own: its bundle, the bundle's use, and the proof."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from house import bundle, unbundle, vllm
from house.say import Trouble, call, say
from house.setup import CACHE, ROOT, VENV, alone, setup


def run_vllm_bundle(words: Sequence[str]) -> int:
    """Build a folder with vLLM 0.26.0 for an offline x86-64 host with a Hopper GPU, Python 3.12 and torch 2.11.

    ./run vllm-bundle OUT_DIR               wheels of scripts/vllm.lock, without what such a GPU never loads
    ./run vllm-bundle OUT_DIR --part-mib N  in parts of at most N MiB, 60 by default; each is a folder of its own
    The host needs a kit too (./run kit). Made from the lock alone; a bundle that is there already is kept.
    """
    own, size = _option(words, "--part-mib", str(bundle.PART_MIB))
    if not size.isdecimal() or not 1 <= int(size) <= 4096:
        raise Trouble(f"--part-mib is a number of MiB from 1 to 4096, not {size}")
    if len(own) != 1 or own[0].startswith("-"):
        raise Trouble(f"vllm-bundle takes one folder, got {' '.join(own) or 'nothing'}", "./run help vllm-bundle")
    setup(extras=frozenset())
    out = Path(own[0]).absolute()
    made = bundle.build(out, python=VENV / "bin/python", part_mib=int(size))
    for part in made.parts:
        say(f"{out / part.path}: {part.bytes / (1 << 20):.1f} MiB")
    say(f"{len(made.packages)} packages, {made.unpacked_bytes >> 20} MiB unpacked")
    return 0


def run_vllm_bundle_use(words: Sequence[str]) -> int:
    """Unpack a bundle of vLLM into the `.venv` that a kit made, without a network, and show that it loads.

    ./run vllm-bundle-use DIR ...   folders that hold its parts; all of them together have each part once or more
    Before it: ./run kit-use KIT_DIR. A bundle that is there already is not unpacked again, but shown to load.
    """
    if not words or any(word.startswith("-") for word in words):
        raise Trouble(
            f"vllm-bundle-use takes folders, got {' '.join(words) or 'nothing'}", "./run help vllm-bundle-use"
        )
    found = unbundle.use([Path(word).absolute() for word in words], environment=VENV)
    say(unbundle.words(found))
    sys.stdout.write(f"{VENV / 'bin/python'}\n")
    return 0


def run_vllm_proof(words: Sequence[str]) -> int:
    """Show every claim about vLLM on this machine's GPU, in steps that resume; writes vllm-proof.json. As root.

    ./run vllm-proof                     all steps with the dimensions of Qwen3-0.6B
    ./run vllm-proof --size 0.6b,8b      of both models, or of either
    ./run vllm-proof --only STEP,...     some of model, cold, n610, disk, n580, one-digest, recovery, fp8
    ./run vllm-proof --resume            those that this commit has not run to their end
    ./run vllm-proof --budget-s S        begin nothing that ends after S seconds; 540 by default
    ./run vllm-proof --cpu               vLLM's build for processors in `.venv-vllm`, SmolLM2, driver host
    ./run vllm-proof --fake              without vLLM: the fake engine on fake GPUs, in real processes
    ./run vllm-proof --help              everything else
    """
    own = list(words)
    if "--cpu" in own:
        setup(extras=frozenset({"transformers", "demo"}), with_criu=True)
        if not any(word.partition("=")[0] == "--model" for word in own):
            own += ["--model", str(_smollm2())]
        if not any(word.partition("=")[0] == "--python" for word in own):
            with alone():
                own += ["--python", str(vllm.environment())]
    else:
        setup(extras=frozenset({"transformers"} if "--fake" in own else {"transformers", "gpu"}), with_criu=True)
    os.chdir(ROOT)
    python = str(VENV / "bin/python")
    os.execv(python, [python, "-m", "benchmarks.vllm_proof", *own])  # noqa: S606 - no shell is wanted


def _smollm2() -> Path:
    out = CACHE / "models/smollm2"
    make: list[str | Path] = [VENV / "bin/python", "-m", "coldsnap.engines.transformers.checkpoints", "smollm2", out]
    if call([*make, "--cache", CACHE / "downloads"]) != 0:
        raise Trouble("the checkpoint was not made", "the reason is above")
    return out


def _option(words: Sequence[str], name: str, default: str) -> tuple[list[str], str]:
    """The words without an option, and its value."""
    own, value = [], default
    rest = iter(words)
    for word in rest:
        if word == name:
            value = next(rest, "")
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            own.append(word)
    return own, value
