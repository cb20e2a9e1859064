"""Everything the GPU part of coldsnap claims, shown on a machine with an NVIDIA GPU, in steps that resume.

    ./run gpu-proof [--kit DIR] [--only STEP,...] [--out DIR] [--resume] [--smoke] [--fake] [--budget-s S]      as root

probes         what this machine's driver can do, feature by feature
model          a random checkpoint with the shape of a Qwen3-8B (16.4 GB of bf16), in memory if there is room
n610, n580     capture with a CUDA graph alive, kill, restore: the tokens of a separate cold process on four prompts it
               never saw, 32 each; a restore without hydration must be caught; no piece of the pack in the image
hydrate        files to the GPU by every path, beside the link, the disk and other loaders (``benchmarks.hydrate_gpu``)
capture-speed  the pack written and hashed, how often its bytes were read; from the run of ``hydrate`` if there was one
first-use      its first verification, likewise
criu           a process tree with 4.5 GiB of memory, stock CRIU beside ours (``benchmarks.restore_process``)
failures       a failed dump, a failed CUDA checkpoint, a lock time-out and a killed helper leave a service that
               answers; a failed restore leaves the GPU empty (with a tiny model)

The result is ``gpu-proof.json`` below ``--out``, rewritten after every step, with raw samples, machine, boot and
driver; ``--resume`` leaves out what stands there for this commit. A step that fails is recorded and the next one runs.
``--smoke`` takes a tiny model and small files: does everything run. ``--fake`` needs no GPU: the fake engine on fake
GPUs, real processes and CRIU; its figures mean nothing. What either can say nothing about is waived, and told as that.
Exit status 0 when every step met its other aims.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._failures import FAULTS, prove_failures
from benchmarks._proof import FILE, Found, Record, Step, run_steps
from benchmarks._proof_tools import Subject, fake_subject, real_subject
from benchmarks.drivers import library_path, story_of, tell
from benchmarks.harness import ROOT, timed
from benchmarks.restore import MODES

from coldsnap.capsule.memoryfs import LinuxMemoryFs
from coldsnap.core.drivers import DRIVERS, DriverId
from coldsnap.ops.capture import capture
from coldsnap.ops.demo import DemoResult
from coldsnap.ops.demo_parts import ACCEPTANCE, new_id
from coldsnap.ops.planning import plan_capture
from coldsnap.ops.recipe import Recipe, RecipeValidation
from coldsnap.ops.tidy import plan_delete, run_delete

GIB = 1 << 30
_MODEL_BYTES = 18 * GIB
_MODEL_ROOM_BYTES = 64 * GIB  # beside it a copy of the pack, and process memory
_SUBPROCESS_S = 540.0
HYDRATE_PARTS = "link,capture,first_use,pagecache,staged,disk,loaders"


@dataclass(kw_only=True)
class Proof:
    """The steps, and what they pass on to each other."""

    options: argparse.Namespace
    folder: Path
    subject: Subject
    stories: dict[DriverId, DemoResult] = field(default_factory=dict)
    hydrated: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> Mapping[str, Step]:
        """In the order in which they are run."""
        return {
            "probes": self.probes,
            "model": self.model,
            "n610": lambda: self.driver(DriverId.N610),
            "n580": lambda: self.driver(DriverId.N580),
            "hydrate": self.hydrate,
            "capture-speed": self.capture_speed,
            "first-use": self.first_use,
            "criu": self.criu,
            "failures": self.failures,
        }

    # -- what this machine is ---------------------------------------------------------------------

    def probes(self) -> Found:
        """Every feature of every driver."""
        tools = self.subject.tools
        results = {driver.value: tools.probe(DRIVERS[driver].base_features) for driver in DriverId}
        inventory = tools.accelerator.inventory()
        features = {one.feature: one for found in results.values() for one in found}
        return Found(
            document={
                "gpus": [gpu.model_dump() for gpu in inventory.gpus],
                "cuda_userspace": inventory.cuda_userspace,
                "why_not": inventory.why_not,
                "features": {
                    driver: {one.feature: [one.state.value, one.reason] for one in found}
                    for driver, found in results.items()
                },
            },
            rows=[
                *((f"GPU {gpu.index}", f"{gpu.name}, {gpu.uuid}") for gpu in inventory.gpus),
                *((name, f"{one.state}: {one.reason}"[:110]) for name, one in features.items()),
            ],
            aims={
                f"{driver} is usable": all(one.state.value == "passed" for one in results[driver])
                for driver in ("n610", "n580")
            },
        )

    # -- process trees ----------------------------------------------------------------------------

    def model(self) -> Found:
        """Make the checkpoint, or find it."""
        made: list[Path] = []
        seconds = timed(lambda: made.append(self.subject.model()))
        size = sum(path.stat().st_size for path in made[0].glob("*.safetensors"))
        return Found(
            document={"path": str(made[0]), "bytes": size, "seconds_to_make": seconds},
            rows=[("checkpoint", f"{size / 1e9:.2f} GB in {seconds:.1f} s at {made[0]}")],
        )

    def driver(self, driver: DriverId) -> Found:
        """Tell the whole story with one driver, and time its restores."""
        subject, rounds = self.subject, dict.fromkeys(MODES, 1)
        if not self.options.smoke:
            rounds |= {"ahead": 3, "cached": 3}  # the others wait for a disk
        earlier = next(iter(self.stories.values()), None)
        story = story_of(driver, subject.serve, num_cold_starts=1 if self.options.smoke else 2)
        cold = earlier.cold_starts if earlier is not None else None
        folder = self.folder / driver.value
        folder.mkdir(exist_ok=True)
        result, document = tell(subject.tools, subject.plugin, subject.model(), folder, story, cold=cold, rounds=rounds)
        self.stories[driver] = result
        restores = document["restores"]
        seen = {mode: one["first_token_s"] for mode, one in restores.items()}
        phases = restores["ahead"]["phases_s"]
        return Found(
            document={"serve": subject.serve, **document},
            rows=[
                ("cold start to first token", f"{result.cold_s:.2f} s"),
                *((f"restore to first token, packs {mode}", _spread(one)) for mode, one in seen.items()),
                *((f"  {name}", f"{one['median']:.3f} s") for name, one in phases.items()),
                *((f"capture: {name}", f"{value:.2f} s") for name, value in result.capture.seconds.items()),
                ("image", f"{result.capture.image_bytes / 1e9:.3f} GB"),
                ("capsule", f"{result.capture.capsule_bytes / 1e9:.3f} GB"),
                ("pack", f"{result.capture.pack_bytes / 1e9:.3f} GB"),
                ("residual", f"{result.capture.residual_bytes / 1e9:.3f} GB"),
                *((f"way of {number}", how) for number, how in enumerate(restores["ahead"]["transfers"])),
            ],
            aims=document["claims"],
        )

    def failures(self) -> Found:
        """Spoil freezes and a restore of a tiny model's service."""
        subject = self.subject
        recipe = Recipe(
            name="coldsnap-failures",
            engine=subject.plugin.name,
            model=str(subject.small_model()),
            serve=dict(subject.serve),
            environment=library_path(os.environ),
            validation=RecipeValidation(prompts=ACCEPTANCE),
        )
        output = self.folder / "failures.json"
        output.unlink(missing_ok=True)
        planned = plan_capture(
            recipe, subject.plugin, operation_id=new_id("failures"), output=output, driver=DriverId.N610
        )
        capture(subject.tools, planned.request, planned.model)
        found = prove_failures(subject.tools, output)
        aims = {f"{name}: the source serves on": found[name]["serves_the_same"] for name in FAULTS}
        aims["a failed restore leaves the GPU empty"] = found["failed restore"]["leaves_nothing"]
        rows = [(name, found[name]["raised"][:100]) for name in (*FAULTS, "failed restore")]
        return Found(document={"faults": found}, rows=rows, aims=aims)

    # -- bytes ------------------------------------------------------------------------------------

    def hydrate(self) -> Found:
        """All parts of the GPU benchmark in one run. The captures go first: a disk may not hold two packs."""
        for result in self.stories.values():
            run_delete(self.subject.tools, plan_delete(self.subject.tools, result.capture.artifact_path))
        self.hydrated = found = self._benchmark("hydrate_gpu", "--only", HYDRATE_PARTS, "--disk", str(self.folder))
        staged, disk = found.get("staged", {}), found.get("disk", {})
        absent = found.get("loaders", {}).get("not_measured", {})
        rates = {
            f"{part}.{name}": one
            for part in ("link", "pagecache", "staged", "disk", "loaders")
            for name, one in (found.get(part, {}).get("gb_per_s") or found.get(part, {})).items()
            if isinstance(one, dict) and "median" in one and name != "ratio"
        }
        return Found(
            document=found,
            rows=[
                *((name, f"{_spread(one)} GB/s") for name, one in rates.items()),
                *((f"not measured: {name}", why) for name, why in absent.items()),
                *((f"failed: {name}", why) for name, why in found.get("errors", {}).items()),
            ],
            **self._unless_small(
                {
                    "staged, registered ahead: 49 GB/s": staged.get("aim_met", {}).get("ahead", False),
                    "staged, everything inside the clock: 45 GB/s": staged.get("aim_met", {}).get("rule", False),
                    "disk: 95 % of plain O_DIRECT": disk.get("aim_met", False),
                },
                always={
                    "device memory digests equal": all(staged.get("verified", {"": False}).values()),
                    "every part ran": not found.get("errors"),
                },
            ),
        )

    def capture_speed(self) -> Found:
        """How fast the pack is written, and how often its bytes are read for it."""
        found = self._part("capture")
        story = next(iter(self.stories.values()), None)
        export_s = story.capture.seconds.get("export") if story is not None else None
        plain = found["plain_write_gb_per_s"]
        return Found(
            document={**found, "export_of_a_real_capture_s": export_s},
            rows=[
                ("hash, then write", f"{found['hash_s']:.2f} s, {found['write_s']:.2f} s"),
                ("rate, beside the disk's plain write", f"{found['gb_per_s']:.2f}, {plain:.2f} GB/s"),
                ("reads of every byte", f"{found['passes']:.2f}"),
                ("export of a real capture", f"{export_s:.2f} s" if export_s is not None else "none in this run"),
            ],
            aims={"no more than one extra pass": found["passes"] <= 2.0},
        )

    def first_use(self) -> Found:
        """How long the first verification takes."""
        found = self._part("first_use")
        return Found(
            document=found,
            rows=[("verification, page cache warm", _spread(found["seconds"]) + " s")],
            **self._unless_small({"at most 2.5 s": found["seconds"]["median"] <= found["aim_s"]}),
        )

    def criu(self) -> Found:
        """Process memory, stock beside ours."""
        size = ["--quick"] if self._small else ["--gib", "4.5", "--rounds", "5"]
        found = self._benchmark("restore_process", *size, quick=False)
        ours, stock = found["memory_seconds"]["ours"], found["memory_seconds"]["stock"]
        return Found(
            document=found,
            rows=[
                ("ours, CRIU until the tree runs", _spread(ours) + " s"),
                ("stock", _spread(stock) + " s"),
                ("times as fast", _spread(found["times_stock"]["memory"])),
            ],
            **self._unless_small({"at most 0.8 s": ours["median"] <= 0.8}),
        )

    # -- what steps share -------------------------------------------------------------------------

    @property
    def _small(self) -> bool:
        return bool(self.options.smoke or self.options.fake)

    def _unless_small(self, aims: dict[str, bool], *, always: dict[str, bool] | None = None) -> dict[str, Any]:
        """The aims of a ``Found``: those that small files say nothing about are waived for them, the others never."""
        if self._small:
            return {"aims": always or {}, "waived": dict.fromkeys(aims, "fake" if self.options.fake else "smoke")}
        return {"aims": {**aims, **(always or {})}}

    def _part(self, name: str) -> dict[str, Any]:
        """One part of the GPU benchmark, of its earlier run or measured now."""
        if name not in self.hydrated:
            parts = "link,capture" if name == "capture" else f"capture,{name}"
            self.hydrated |= self._benchmark("hydrate_gpu", "--only", parts, "--disk", str(self.folder))
        if name not in self.hydrated:
            raise RuntimeError(f"{name} failed: {self.hydrated.get('errors', {}).get(name, 'no reason given')}")
        part: dict[str, Any] = self.hydrated[name]
        return part

    def _benchmark(self, module: str, *words: str, quick: bool = True) -> dict[str, Any]:
        """A benchmark of its own process, and the JSON that it wrote."""
        out = self.folder / f"{module}.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{module}", "--out", str(out), *words]
        if quick and self._small:
            command += ["--quick", "--rounds", "2"]
        if module == "hydrate_gpu" and self.options.fake:
            command.append("--fake")
        if self.options.commit:
            command += ["--commit", self.options.commit]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=_SUBPROCESS_S, check=False)
        if not out.exists():
            raise RuntimeError(f"{module} ended with {done.returncode} and wrote nothing; its words are above")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def _spread(one: Mapping[str, Any]) -> str:
    return f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f}, n={one['n']})"


@contextmanager
def _models(work: Path) -> Iterator[Path]:
    """A folder for checkpoints: in memory if there is room, else on the disk; a cold start reads memory either way.

    Not below ``/dev/shm``, of which every unit has its own.
    """
    folder, fs = work / "models", LinuxMemoryFs()
    folder.mkdir(mode=0o700)
    in_memory = fs.memory().available_bytes >= _MODEL_ROOM_BYTES
    if in_memory:
        fs.mount(folder, num_bytes=_MODEL_BYTES)
    try:
        yield folder
    finally:
        if in_memory:
            shutil.rmtree(folder, ignore_errors=True)
            fs.unmount(folder)


def result_folder(*, fake: bool) -> Path:
    """Where a result goes unless told: what means nothing never in the place of what was measured."""
    return ROOT / (".cache/results" if fake else "benchmarks/results")


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(
        prog="gpu-proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the result: benchmarks/results, with --fake .cache/results instead"
    )
    parser.add_argument("--commit", help="the commit that is shown, where the checkout has lost its history")
    parser.add_argument("--only", default="", help="some of the steps, by comma")
    parser.add_argument("--resume", action="store_true", help="leave out steps that the result has already")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and small files")
    parser.add_argument("--fake", action="store_true", help="fake engine and GPUs; the figures mean nothing")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin no step after so many seconds")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="a disk: state, packs, images")  # noqa: S108
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=VALUE", help="more engine options")
    options = parser.parse_args(words)
    options.out = options.out or result_folder(fake=options.fake)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended and unmounted
    with (
        tempfile.TemporaryDirectory(prefix="coldsnap-proof-", dir=options.work) as work,
        _models(Path(work)) as models,
    ):
        make = fake_subject if options.fake else real_subject
        subject = make(Path(work), models, size="tiny" if options.smoke else "8b", serve=options.serve)
        proof = Proof(options=options, folder=Path(work), subject=subject)
        steps, only = proof.steps(), [word for word in options.only.split(",") if word]
        if unknown := [word for word in only if word not in steps]:
            parser.error(f"--only: no step is called {', '.join(unknown)}; there are {', '.join(steps)}")
        kind = "fake" if options.fake else "smoke" if options.smoke else "full"
        record = Record(options.out / FILE, commit=options.commit, kind=kind, resume=options.resume)
        try:
            good = run_steps(steps, record, only=only, budget_s=options.budget_s)
        finally:
            subject.close()
    print(f"{options.out / FILE}: " + ", ".join(f"{n} {e['state']}" for n, e in record.document["steps"].items()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
