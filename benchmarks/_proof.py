"""Steps that run one after another, each recorded at once: what proofs have beside their steps.

One JSON file is the result and the memory: a step that stands in it is not run again with ``--resume``. A step that
raises is recorded with its error, and the next one runs. Every step names the machine, boot and driver it ran on, as a
resumed proof may have run on several.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._gpu import driver_version
from benchmarks.harness import commit_facts, machine_facts, rounded

FILE = "gpu-proof.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a step found: everything for the file, rows for people, and the aims, each met or not.

    ``waived``: aims that this run can say nothing about, each with why.
    """

    document: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[tuple[str, str]] = ()
    aims: Mapping[str, bool] = field(default_factory=dict)
    waived: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """``met``, ``missed``, or ``waived`` when every aim was."""
        if not self.aims and self.waived:
            return "waived"
        return "met" if all(self.aims.values()) else "missed"


Step = Callable[[], Found]


class Record:
    """The file of a proof, rewritten after every step."""

    def __init__(
        self,
        path: Path,
        *,
        commit: str | None,
        kind: str,
        resume: bool,
        benchmark: str = "gpu-proof",
        anew: Sequence[str] = (),
    ) -> None:
        """``kind``: what it was run on; with ``resume``, steps of the same commit and kind are taken over.

        ``anew``: these steps alone are run, and all others of the file stay, each with the commit and kind it had.
        """
        self._path = path
        self.document: dict[str, Any] = {
            "benchmark": benchmark,
            **(commit_facts(("src", "benchmarks")) if commit is None else {"commit": commit, "dirty": False}),
            "kind": kind,
            "steps": {},
        }
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if (before.get("commit"), before.get("kind")) == (self.document["commit"], kind):
                self.document["steps"] = before["steps"]
        elif anew and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            its = {key: before[key] for key in ("commit", "dirty", "kind")}
            kept = {name: {**its, **entry} for name, entry in before["steps"].items() if name not in anew}
            self.document["steps"] = kept

    def has(self, name: str) -> bool:
        """Whether a step was run to its end."""
        return self.document["steps"].get(name, {}).get("state") in ("met", "missed", "waived")

    def put(self, name: str, entry: Mapping[str, Any]) -> None:
        """Keep a step's entry, on disk before the next step begins."""
        self.document["steps"][name] = rounded(entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_name(f".{self._path.name}.new")
        aside.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        aside.replace(self._path)

    def succeeded(self, only: Sequence[str] = ()) -> bool:
        """Whether every step (``only`` some) that was run met every aim that was not waived."""
        steps = self.document["steps"].items()
        return all(entry["state"] in ("met", "waived") for name, entry in steps if not only or name in only)


def run_steps(
    steps: Mapping[str, Step],
    record: Record,
    *,
    only: Sequence[str] = (),
    budget_s: float,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> bool:
    """Run the steps (``only`` some), those of the record left out; begin none after ``budget_s`` seconds.

    Returns whether every step that is recorded (``only`` some) met its aims and none was left.
    """
    began = time.monotonic()
    left = []
    for name, step in steps.items():
        if (only and name not in only) or record.has(name):
            continue
        if time.monotonic() - began > budget_s:
            left.append(name)
            continue
        say(f"== {name}")
        step_began = time.monotonic()
        try:
            found = step()
            entry: dict[str, Any] = {"state": found.state, "aims": dict(found.aims), **found.document}
            if found.waived:
                entry["waived"] = dict(found.waived)
        except Exception as error:  # noqa: BLE001 - one step's failure must not cost the others
            traceback.print_exc()
            found = Found(rows=[("failed", f"{type(error).__name__}: {error}"[:300])])
            notes = list(getattr(error, "__notes__", ()))
            entry = {"state": "failed", "error": f"{type(error).__name__}: {error}", "notes": notes}
            entry["facts"] = facts = _plain(getattr(error, "facts", {}))
            for line in (*notes, *facts.get("log", ())):
                say(f"    {line}")
        seconds = time.monotonic() - step_began
        where = {"machine": machine_facts(), "nvidia_driver": driver_version(), "seconds": seconds}
        record.put(name, {**entry, **where, "ended_unix_s": int(time.time())})
        for what, value in found.rows:
            say(f"  {what:44} {value}")
        for aim, met in found.aims.items():
            say(f"  {'met   ' if met else 'MISSED'} {aim}")
        for aim, why in found.waived.items():
            say(f"  waived: {why}: {aim}")
        say(f"== {name}: {entry['state']} in {seconds:.1f} s")
    if left:
        say(f"not begun, the time was up: {', '.join(left)}; --resume goes on")
    return record.succeeded(only) and not left


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
