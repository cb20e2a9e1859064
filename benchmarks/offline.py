"""The offline tools on an artifact of 64 workers with 10,000 extents each: explain, diff, and the cover proof.

    python -m benchmarks.offline [--quick] [--rounds N] [--out FILE] [--dir FOLDER] [--nice N]

The artifact is made by ``coldsnap.testing.synthetic``: real descriptors, capsules and manifests (400 MB of them), no
packs. Every sample does what the command does after its program has started: it opens the state root, reads the
descriptors and answers. ``seconds`` are those of the wall clock, ``cpu_s`` of all its processes: on a machine that
others use too, they say more. The start of the program is measured apart: ``command_s`` is the shell's view of
whole commands, beside that of ``--version``, which does nothing. ``--nice -10`` measures ahead of whoever else uses the
machine (it takes root); the result says so in ``nice``.

explain        every gate and the ladder, with 300 mapped host files a unit. ``first`` is the first one on a new state
               root, which probes the machine's features and hashes the host files; later ones believe that.
diff.equal     a capture and a copy of its descriptor: every manifest digest is equal
diff.recapture another capture of the same state: every manifest differs, in its capture's id
diff.twin      a fine-tuned twin: two tensors of two workers differ, the rest differs in the capture's id
cover          both manifests of every worker read, hashed, parsed, proved and compared, on every core

``opened`` counts, by an audit hook, the files below capsules and prepared folders that one sample of each opened, in
another run: nothing that holds a manifest may be among them for explain and diff.equal.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, emit, interleave, summary, timed

from coldsnap.cli.wiring import make_tools
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.diff import compare
from coldsnap.ops.explain import explain
from coldsnap.ops.report import Silent
from coldsnap.ops.verify import verify_covers
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.synthetic import SyntheticSpec, make_synthetic

AIMS_S = {"explain": 0.5, "diff.equal": 0.5, "cover": 10.0}
PORT = 18_999


class Opened:
    """Counts files opened below a state root's capsules and prepared folders while it is switched on."""

    def __init__(self, root: Path) -> None:
        self._folders = tuple(f"{root / name}{os.sep}" for name in ("capsules", "prepared"))
        self._counting = False
        self.paths: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if self._counting and event == "open" and isinstance(values[0], str | os.PathLike):
            path = os.fspath(values[0])
            if isinstance(path, str) and path.startswith(self._folders):
                self.paths.append(path)

    def during(self, work: Callable[[], object]) -> list[str]:
        self.paths, self._counting = [], True
        try:
            work()
        finally:
            self._counting = False
        return self.paths


class Bench:
    """Three captures in one state root, and what is measured on them."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.root = folder / "state"
        state = StateRoot.open(self.root)
        library = Path(os.__file__).parent
        base = SyntheticSpec(
            num_units=2 if quick else 8,
            workers_per_unit=4 if quick else 8,
            num_extents=500 if quick else 10_000,
            num_images=40,
            host_files=tuple(sorted(library.glob("*.py"))[:300]),
        )
        self.specs = {
            "base": base,
            "recapture": replace(base, capture_id="capture-2"),
            "twin": replace(base, capture_id="capture-3", changed={"w1": frozenset({7, 8}), "w5": frozenset({0, 499})}),
        }
        self.paths = {name: folder / f"{name}.json" for name in (*self.specs, "copy")}
        self.made_s = {
            name: timed(partial(make_synthetic, state, self.paths[name], spec)) for name, spec in self.specs.items()
        }
        self.paths["copy"].write_bytes(self.paths["base"].read_bytes())
        self.paths["copy"].chmod(0o600)

    def explain(self) -> None:
        tools = make_tools(self.root)
        loaded = load_artifact(self.paths["base"])
        request = activation_request(loaded, operation_id=f"explain-{time.time_ns()}", port=PORT)
        found = explain(tools, loaded, request)
        tools.host.close()
        if not found.gates:
            raise RuntimeError("no gate was asked")

    def diff(self, other: str, *, same: bool, changes: int = 0) -> None:
        found = compare(load_artifact(self.paths["base"]), load_artifact(self.paths[other]), state_root=self.root)
        named = [one for worker in found.workers if worker.memory for one in worker.memory.changes if one.tensors]
        if found.same is not same or len(named) != changes or any(w.state.value == "unknown" for w in found.workers):
            raise RuntimeError(f"wrong answer: same {found.same}, {len(named)} tensors named")

    def cover(self) -> None:
        proofs = verify_covers(self.root, load_artifact(self.paths["base"]), reporter=Silent())
        wrong = [proof for proof in proofs if proof.problems or proof.cover is None]
        if wrong or len(proofs) != len(self.specs["base"].workers):
            raise RuntimeError(f"not proved: {wrong[:3]}")

    def command(self, *words: str) -> float:
        """Seconds of a whole command, its program's start included."""
        return timed(
            lambda: subprocess.run(
                [sys.executable, "-m", "coldsnap.cli", *words], stdout=subprocess.DEVNULL, check=False
            )
        )


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Everything."""
    first_s = timed(bench.explain)
    works: dict[str, Callable[[], object]] = {
        "explain": bench.explain,
        "diff.equal": lambda: bench.diff("copy", same=True),
        "diff.recapture": lambda: bench.diff("recapture", same=True),
        "diff.twin": lambda: bench.diff("twin", same=False, changes=4),
        "cover": bench.cover,
    }
    opened = Opened(bench.root)
    counts = {name: opened.during(work) for name, work in works.items() if name != "cover"}
    cpu_s: dict[str, list[float]] = {name: [] for name in works}

    def sample(name: str) -> float:
        begun = cpu_seconds()
        seconds = timed(works[name])
        cpu_s[name].append(cpu_seconds() - begun)
        return seconds

    samples = interleave({name: partial(sample, name) for name in works}, rounds=rounds)
    base, copy, root = str(bench.paths["base"]), str(bench.paths["copy"]), str(bench.root)
    started = interleave(
        {
            "--version": lambda: bench.command("--version"),
            "explain": lambda: bench.command("explain", base, "--port", str(PORT), "--state-root", root, "--json"),
            "diff.equal": lambda: bench.command("diff", base, copy, "--state-root", root, "--json"),
        },
        rounds=rounds,
    )
    seconds = {name: summary(values) for name, values in samples.items()}
    return {
        "seconds": seconds,
        "cpu_s": {name: summary(values) for name, values in cpu_s.items()},
        "first_explain_s": first_s,
        "command_s": {name: summary(values) for name, values in started.items()},
        "opened": {name: len(paths) for name, paths in counts.items()},
        "manifest_files_opened": {
            name: len([p for p in paths if "blobs" in p or "/workers/" in p]) for name, paths in counts.items()
        },
        "aim_s": AIMS_S,
        "aim_met": {name: seconds[name]["median"] <= aim for name, aim in AIMS_S.items()},
    }


def main() -> int:
    parser = arguments("explain, diff and cover proof of an artifact of 64 workers with 10,000 extents each")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where 1.3 GB of artifacts go")  # noqa: S108
    parser.add_argument("--nice", type=int, default=0, help="added to the priority once the artifacts are made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldsnap-bench-", dir=options.dir) as folder:
        Path(folder).chmod(0o700)
        bench = Bench(Path(folder), quick=options.quick)
        spec = bench.specs["base"]
        manifests = [
            entry
            for entry in load_artifact(bench.paths["base"]).artifact.capsule.objects
            if entry.role in ("native-manifest", "recovery-manifest")
        ]
        nice = os.nice(options.nice)
        result = measure(bench, options.rounds or (2 if options.quick else 5))
    facts = {
        "workers": len(spec.workers),
        "units": spec.num_units,
        "extents_a_worker": spec.num_extents,
        "manifest_bytes": sum(entry.bytes for entry in manifests),
        "made_s": bench.made_s,
        "nice": nice,
    }
    emit("offline", {**facts, **result}, options.out, code=("src/coldsnap", "benchmarks"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
