"""What every benchmark here needs: who measured, how often, how much it scattered.

A figure without its machine, its count and its spread is an anecdote. So a benchmark gives named
functions that each return seconds; ``interleave`` calls them round by round in a turning order, so that
a busy neighbour disturbs all of them alike; and what is printed is one JSON object with the machine,
the commit, every raw sample and, for comparisons, the ratio *within* each round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "arguments",
    "commit_facts",
    "emit",
    "engine_option",
    "interleave",
    "machine_facts",
    "ratio",
    "rounded",
    "summary",
    "timed",
]

ROOT = Path(__file__).resolve().parent.parent


def arguments(description: str) -> argparse.ArgumentParser:
    """The options all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run at all")
    parser.add_argument("--rounds", type=int, default=0, help="samples of each case (default: the benchmark's own)")
    parser.add_argument("--commit", help="the commit that is measured, where the checkout has lost its history")
    parser.add_argument("--out", type=Path, help="write the JSON to this file as well")
    return parser


def engine_option(word: str) -> tuple[str, Any]:
    """``NAME=VALUE``, the value as a recipe's YAML would read it."""
    import yaml

    name, _, value = word.partition("=")
    return name, yaml.safe_load(value)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def interleave(
    cases: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    budget_s: float = math.inf,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[str, list[float]]:
    """Call every case once a round, each round beginning with the next one; the seconds they return.

    After ``budget_s`` and three rounds no other round is begun: a busy machine gives fewer samples.
    """
    begun = time.monotonic()
    names = list(cases)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number >= 3 and time.monotonic() - begun > budget_s:
            break
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            samples[name].append(cases[name]())
        say(f"round {number + 1}/{rounds}: " + ", ".join(f"{name} {samples[name][-1]:.3f}" for name in names))
    return samples


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Count, median, spread (least, greatest, distance of the quartiles) and the samples themselves."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return {
        "n": len(samples),
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "iqr": quartiles[2] - quartiles[0],
        "samples": list(samples),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """How fast ours is beside theirs, by round: above 1 is faster."""
    return summary([their / our for our, their in zip(ours, theirs, strict=True)])


def machine_facts() -> dict[str, Any]:
    """The machine and the boot a figure belongs to."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "boot_id": _text(Path("/proc/sys/kernel/random/boot_id")),
        "huge_pages": _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def commit_facts(code: Sequence[str]) -> dict[str, Any]:
    """The commit that is checked out, and whether the tracked files of ``code`` differ from it."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
        except OSError:  # no git here
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    return {
        "commit": git("rev-parse", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain", "-uno", "--", *code)),
    }


def emit(
    name: str,
    result: Mapping[str, Any],
    out: Path | None,
    *,
    code: Sequence[str] = ("src", "benchmarks"),
    commit: str | None = None,
) -> None:
    """Print the one JSON object of a benchmark, and write it to ``out``. ``code`` is what was measured.

    ``commit``: whoever started it vouches that it is this one, unchanged; otherwise git is asked.
    """
    document = {
        "benchmark": name,
        "measured_unix_s": int(time.time()),
        **(commit_facts(code) if commit is None else {"commit": commit, "dirty": False}),
        "machine": machine_facts(),
        **result,
    }
    text = json.dumps(rounded(document), indent=2)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """The value with floats of five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _field(path: Path, name: str) -> str | None:
    for line in (_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
