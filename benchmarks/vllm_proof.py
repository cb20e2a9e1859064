"""Everything coldsnap claims about vLLM, shown by its command line on a machine with a GPU, in steps that resume.

    ./run vllm-proof [--size 0.6b] [--only STEP,...] [--resume] [--budget-s S] [--out DIR] [--cpu | --fake]      as root

model       a checkpoint of random weights with the dimensions of Qwen3-0.6B or 8B
cold        vLLM's own server without coldsnap: the expected tokens on 8 prompts, and starts with warm compile caches
n610        capture a served tree with its CUDA state, restores with the pack in memory and in the page cache: tokens,
            streaming, a restore without hydration that must be caught, pieces of the pack in the image, the timeline
disk        the same with everything on the disk alone, and what the disk needs for as many bytes
n580        capture before CUDA is touched, restores that build the model anew
one-digest  the packs of both drivers and of a capture with other options are one
recovery    restore from the checkpoint's own files, the pack written again, restore from that
fp8         a model of that size in FP8

The clock is that of docs/benchmarks.md: the call of the verb to the first token that a client outside sees; seconds
from the start of the command stand beside it. The result is ``vllm-proof.json`` below ``--out``, rewritten after every
step. Steps carry the size in their name, such as ``0.6b-n610``; those that are not run stay, each with its commit. What
steps make for each other (checkpoint, compile caches, artifacts, state root) stays below ``--work`` until ``--clean``.

``--cpu``: vLLM's build for processors with SmolLM2 and driver ``host``, into ``vllm-proof-cpu.json``. ``--fake``: the
fake engine on fake GPUs; its figures mean nothing. Exit status 0 when every step met its aims.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._proof import Record, Step, run_steps
from benchmarks._vllm_command import Budget, Coldsnap
from benchmarks._vllm_steps import Steps
from benchmarks._vllm_subject import CPU_MODEL, FAKE_MODEL, Subject, cpu_subject, fake_subject, gpu_subject
from benchmarks.harness import ROOT, commit_facts, engine_option

FILES = {"gpu": "vllm-proof.json", "cpu": "vllm-proof-cpu.json", "fake": "vllm-proof.json"}
WORK = Path("/var/tmp/coldsnap-vllm-proof")  # noqa: S108 - a disk, and only root proves
ROUNDS = {"gpu": 7, "cpu": 5, "fake": 2}


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps."""
    parser = _parser()
    options = parser.parse_args(words)
    kind = "cpu" if options.cpu else "fake" if options.fake else "gpu"
    options.out = options.out or ROOT / (".cache/results" if kind == "fake" else "benchmarks/results")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    budget = Budget(seconds=options.budget_s)
    with ExitStack() as stack:
        folder = _folder(options, kind, stack)
        subject = _subject(options, kind, folder)
        stack.callback(subject.close)
        subject.tidy()
        path = options.out / FILES[kind]
        sizes = [CPU_MODEL] if kind == "cpu" else [FAKE_MODEL] if kind == "fake" else options.size.split(",")
        wanted = _wanted(parser, subject, sizes, options)
        if options.resume:
            done = finished(path, options.commit or commit_facts(("src", "benchmarks"))["commit"])
            wanted = [name for name in wanted if name not in done]
        record = Record(
            path, commit=options.commit, kind=kind, resume=False, benchmark="vllm-proof", anew=wanted or ["none"]
        )
        coldsnap = Coldsnap(program=subject.program, state=subject.tools.state.path, budget=budget)
        steps: dict[str, Step] = {}
        for size in sizes:
            own = Steps(
                subject=subject,
                coldsnap=coldsnap,
                record=record,
                size=size,
                rounds=options.rounds or ROUNDS[kind],
                num_cold=options.cold_starts,
            )
            steps |= {f"{size}-{name}": step for name, step in own.all().items()}
        good = not wanted or run_steps(steps, record, only=wanted, budget_s=options.budget_s)
    print(f"{path}: " + ", ".join(f"{name} {entry['state']}" for name, entry in record.document["steps"].items()))
    if kind != "fake" and not options.clean:
        print(f"kept for the next call: {options.work} (--clean removes it)")
    return 0 if good else 1


def finished(path: Path, commit: str | None) -> set[str]:
    """The steps of a result that were run to their end at this commit."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    entries: Mapping[str, Mapping[str, Any]] = document["steps"]
    return {
        name
        for name, entry in entries.items()
        if entry["state"] in ("met", "missed", "waived") and entry.get("commit", document["commit"]) == commit
    }


def _wanted(
    parser: argparse.ArgumentParser, subject: Subject, sizes: Sequence[str], options: argparse.Namespace
) -> list[str]:
    """The full names of the steps that are asked for."""
    nothing: Any = None
    known = list(Steps(subject=subject, coldsnap=nothing, record=nothing, size="", rounds=0, num_cold=0).all())
    only = [word for word in options.only.split(",") if word] or known
    if unknown := [word for word in only if word not in known]:
        parser.error(f"--only: no step is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [f"{size}-{name}" for size in sizes for name in known if name in only]


def _folder(options: argparse.Namespace, kind: str, stack: ExitStack) -> Path:
    """Where everything of this proof is; a fake one leaves nothing."""
    if kind == "fake":
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coldsnap-proof-", dir="/var/tmp")))
    options.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    if options.clean:
        stack.callback(shutil.rmtree, options.work, ignore_errors=True)
    folder: Path = options.work
    return folder


def _subject(options: argparse.Namespace, kind: str, folder: Path) -> Subject:
    serve = dict(map(engine_option, options.serve))
    environment = dict(word.partition("=")[::2] for word in options.environment)
    if kind == "gpu":
        return gpu_subject(folder, serve, environment)
    if kind == "cpu":
        return cpu_subject(folder, options.model, serve, environment, python=options.python)
    return fake_subject(folder, serve, environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="0.6b", help="0.6b, 8b, or both with a comma; tiny for a first try")
    parser.add_argument("--only", default="", help="some of the steps, by comma; the others of the result stay")
    parser.add_argument("--resume", action="store_true", help="leave out steps that this commit has run to their end")
    parser.add_argument("--out", type=Path, help="folder of the result; with --fake .cache/results")
    parser.add_argument("--work", type=Path, default=WORK, help="a disk: models, caches, state root, artifacts")
    parser.add_argument("--clean", action="store_true", help="remove --work at the end")
    parser.add_argument("--commit", help="the commit that is shown, where the checkout has lost its history")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin nothing that ends after so many seconds")
    parser.add_argument("--rounds", type=int, default=0, help="restores of each mode: 7, on the processor 5")
    parser.add_argument("--cold-starts", type=int, default=3, help="timed ones, after the one that compiles")
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=VALUE", help="more options of vLLM")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="of the engine")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--cpu", action="store_true", help="vLLM for processors, SmolLM2, driver host")
    kinds.add_argument("--fake", action="store_true", help="fake engine and GPUs; the figures mean nothing")
    parser.add_argument("--model", type=Path, help="with --cpu: the checkpoint; ./run vllm-proof names it")
    parser.add_argument("--python", type=Path, help="with --cpu: the Python that has vLLM; ./run vllm-proof names it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
