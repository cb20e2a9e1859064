"""Does rebuilding a lost pack cost the first token anything, and how fast is a recovery beside a native wake.

    python -m benchmarks.readthrough [--quick] [--rounds N] [--model FOLDER] [--out FILE]     as root, with CRIU

first_token    From the call of ``restore``, everything prepared, to the first token that a client outside sees.
               ``off``, ``async`` and ``required`` are recoveries without a pack; ``native`` has it. Rounds turn.
               The claim is that ``async`` is within 5 % of ``off``: ``async_over_off``, by round. On a busy machine
               look at ``engine_cpu_s`` as well: the processor time that the restored tree took until then.
next_tokens    The first token of each of the next requests, one after the other, in the same service: with ``async``
               the pack is being written meanwhile, whenever none of them is in flight.
pack           Seconds from the first answer until the pack is in the store, beside those requests, then alone.
wake           The same checkpoint in the fake engine, in this process: remap and fill, page cache warm. A recovery
               reads the same bytes and hashes each extent while they arrive; a native wake trusts its validation
               record. Beside them stands the recovery's floor: hashing the memory, one thread a core (``hash_only``).

``--model`` is a checkpoint for the Transformers engine; without one, and with ``--quick``, the fake engine is used with
a checkpoint of random bytes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, emit, interleave, summary, timed

from coldsnap.core.messages import MaterializationState, PackSource, WorkerStatus
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.engines.settings import model_source_from
from coldsnap.hydrate import hash_ranges
from coldsnap.ops.live import service_status, stop_service
from coldsnap.ops.outside import OutsideClient
from coldsnap.store.admission import record_path
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN as FAKE
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import driven
from coldsnap.testing.stand import HOST, Stand

MODES = ("off", "async", "required", "native")
NEXT_REQUESTS = 6
PATIENCE_S = 300.0
AIM = 1.05
MIB = 1 << 20


class Restores:
    """One captured service, restored again and again."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.count = 0
        self.next_tokens: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.pack_s: list[float] = []
        self.hydrate: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.engine_cpu: dict[str, list[float]] = {mode: [] for mode in MODES}

    def forget(self) -> None:
        """Drop what was measured so far."""
        for kept in (self.next_tokens, self.hydrate, self.engine_cpu):
            for samples in kept.values():
                samples.clear()

    def case(self, mode: str) -> Callable[[], float]:
        """One restore in this mode; the seconds to its first token."""

        def sample() -> float:
            stand, client = self.stand, OutsideClient(host=HOST, port=self.stand.port)
            self.count += 1
            if mode != "native":
                self._lose_pack()
            begun = time.monotonic()
            name = f"{mode}-{self.count}"
            result = stand.restore(name, materialize=None if mode == "native" else mode)
            client.first_token("Hello", timeout_s=PATIENCE_S)
            seconds = time.monotonic() - begun
            self.engine_cpu[mode].append(_cpu_s(service_status(stand.tools, "svc").pids))
            assert result.source == ("native" if mode == "native" else "recovery"), result.source
            self.hydrate[mode].append(result.seconds["hydrate"])
            answered = time.monotonic()
            for _ in range(NEXT_REQUESTS):
                self.next_tokens[mode].append(timed(lambda: client.first_token("Hello", timeout_s=PATIENCE_S)))
            if mode == "async":
                self._wait_for_pack()
                self.pack_s.append(time.monotonic() - answered)
            stop_service(stand.tools, "svc")
            self._have_pack(mode)
            return seconds

        return sample

    def _path(self) -> Path:
        return self.stand.tools.store.path(self.stand.result.pack_digests[0])

    def _lose_pack(self) -> None:
        path = self._path()
        self.away = path.with_name("away")
        if path.exists():
            path.rename(self.away)
            record_path(path).rename(self.away.with_name("away-record"))

    def _have_pack(self, mode: str) -> None:
        """The pack of the capture, at its name again, whether this mode rebuilt it or not."""
        path = self._path()
        if mode in ("async", "required"):
            assert path.stat().st_size == self.stand.result.pack_bytes
        if mode != "native":
            self.away.replace(path)
            self.away.with_name("away-record").replace(record_path(path))

    def _wait_for_pack(self) -> None:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            worker = service_status(self.stand.tools, "svc").workers["w0"]
            assert isinstance(worker, WorkerStatus)
            assert worker.materialization is not None
            if worker.materialization.state is MaterializationState.DONE:
                return
            assert worker.materialization.state is not MaterializationState.FAILED, worker.materialization.reason
            time.sleep(0.02)
        raise RuntimeError("the pack was not written in time")


def wakes(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Native and recovery wakes of one process, by turns, and hashing alone."""
    pinned = FAKE.resolve_model(str(model))
    engine = FakeEngine(pinned.path, model_source_from(FAKE.settings_options(pinned, {})))
    with driven(engine, folder, base=0x5300_0000_0000) as live:
        exported = live.export()
        ranges = [(one.ptr, one.size) for one in live.memory.allocations]
        chunks = [(ptr + at, min(4 * MIB, size - at)) for ptr, size in ranges for at in range(0, size, 4 * MIB)]
        threads = len(os.sched_getaffinity(0))
        paths: dict[str, dict[str, str]] = {}

        def wake(source: PackSource) -> Callable[[], float]:
            def sample() -> float:
                live.sleep()
                begun = time.monotonic()
                report = live.wake(exported, source)
                paths[source.value] = dict(report.transfer_path)
                return time.monotonic() - begun

            return sample

        def hash_only() -> float:
            return timed(lambda: hash_ranges(live.memory, chunks, num_threads=threads))

        for file in model.glob("*.safetensors"):
            file.read_bytes()
        cases = {"native": wake(PackSource.NATIVE), "recovery": wake(PackSource.RECOVERY), "hash_only": hash_only}
        samples = interleave(cases, rounds=rounds)
    return {
        "model_bytes": exported.model_bytes,
        "num_extents": exported.num_model_extents,
        "seconds": {name: summary(values) for name, values in samples.items()},
        "gb_per_s": {name: exported.model_bytes / statistics.median(values) / 1e9 for name, values in samples.items()},
        "recovery_over_hash_only": summary(
            [ours / floor for ours, floor in zip(samples["recovery"], samples["hash_only"], strict=True)]
        ),
        "paths": paths,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", type=Path, help="checkpoint folder for the Transformers engine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldsnap-bench-") as scratch:
        folder = Path(scratch)
        model = given.model
        plugin: EnginePlugin = FAKE
        if model is None or given.quick:
            size = 4 * MIB if given.quick else 64 * MIB
            model = write_checkpoint(folder / "model", tensors={"a": size, "b": size // 4, "c": size // 4, "d": 300})
        else:
            from coldsnap.engines.transformers.plugin import PLUGIN as plugin  # noqa: N811
        rounds = given.rounds or (3 if given.quick else 10)
        stand = Stand(folder=folder / "stand", model=model, plugin=plugin)
        try:
            prompts = [{"text": "The opposite of cold is", "max_tokens": 2}]
            stand.capture(validation={"prompts": prompts})
            stand.prepare("prepare-1")
            restores = Restores(stand)
            restores.case("native")()  # not counted: the page cache is warm from here on
            restores.case("off")()
            restores.forget()
            samples = interleave({mode: restores.case(mode) for mode in MODES}, rounds=rounds)
            ratios = [ours / theirs for ours, theirs in zip(samples["async"], samples["off"], strict=True)]
            result = {
                "engine": plugin.name,
                "model": model.name,
                "pack_bytes": stand.result.pack_bytes,
                "first_token_s": {mode: summary(values) for mode, values in samples.items()},
                "async_over_off": {
                    **summary(ratios),
                    "aim": AIM,
                    "of_medians": _medians(samples),
                    "engine_cpu_of_medians": _medians(restores.engine_cpu),
                },
                "engine_cpu_s": {mode: summary(values) for mode, values in restores.engine_cpu.items()},
                "hydrate_s": {mode: summary(values) for mode, values in restores.hydrate.items()},
                "next_tokens_s": {mode: summary(values) for mode, values in restores.next_tokens.items()},
                "pack_s": summary(restores.pack_s),
                "wake": wakes(model, folder / "wakes", rounds if given.quick else max(rounds, 15)),
            }
        finally:
            stand.stop_all()
            stand.tools.host.close()
    emit("readthrough", result, given.out)


def _cpu_s(pids: Sequence[int]) -> float:
    """User and system time of these processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _medians(samples: dict[str, list[float]]) -> float:
    return statistics.median(samples["async"]) / statistics.median(samples["off"])


if __name__ == "__main__":
    main()
