"""The steps of a proof of vLLM with one model. Each is a call that says what it found and leaves files for others."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._gpu import plain_read
from benchmarks._proof import Found, Record, Step
from benchmarks._vllm_cold import cold_starts
from benchmarks._vllm_command import Budget, Coldsnap
from benchmarks._vllm_restores import Capture, Seen
from benchmarks._vllm_subject import Subject
from benchmarks.harness import timed

from coldsnap.core.drivers import DriverId
from coldsnap.store.admission import record_path

MIB = 1 << 20
# Seconds to the first token that the same tree needs by level-2 sleep, CUDA checkpoint, CRIU and vLLM's own reload of
# the weights, called by hand on this kind of machine (one H200, driver 580.159.04, vLLM 0.26.0; single runs).
BY_HAND_S = {"0.6b": 4.33, "8b": 6.66}
AIM_S = {"0.6b": 1.5, "8b": 2.0}
TIMES_COLD = 3.0  # how much sooner n580 is there than vLLM's own warm start
FP8_SHARE, FP8_AIM = 0.80, 0.95


@dataclass(kw_only=True)
class Steps:
    """The steps of one model; ``size`` names it, and everything of it that is kept."""

    subject: Subject
    coldsnap: Coldsnap
    record: Record
    size: str
    rounds: int
    num_cold: int
    captures: dict[str, Capture] = field(default_factory=dict)

    @property
    def budget(self) -> Budget:
        """What is left of this call."""
        return self.coldsnap.budget

    def all(self) -> Mapping[str, Step]:
        """In the order in which they are run."""
        main, *others = self.subject.drivers
        steps: dict[str, Step] = {"model": self.model, "cold": self.cold, main.value: partial(self.driver, main)}
        steps["disk"] = self.disk
        steps |= {driver.value: partial(self.driver, driver) for driver in others}
        steps |= {"one-digest": self.one_digest, "recovery": self.recovery}
        if self.subject.kind == "gpu":
            steps["fp8"] = self.fp8
        return steps

    # -- what the others need ---------------------------------------------------------------------

    def model(self) -> Found:
        """Make the checkpoint, or find it."""
        made: list[Path] = []
        seconds = timed(lambda: made.append(self.subject.model(self.size)))
        size = sum(path.stat().st_size for path in made[0].glob("*.safetensors"))
        return Found(
            document={"path": str(made[0]), "bytes": size, "seconds_to_make": seconds},
            rows=[("checkpoint", f"{size / 1e9:.2f} GB in {seconds:.1f} s at {made[0]}")],
        )

    def cold(self) -> Found:
        """Start the server without coldsnap: expected tokens, and the time that a start takes."""
        found = cold_starts(
            self.subject, self.subject.model(self.size), num_timed=self.num_cold, share=0.45, budget=self.budget
        )
        timed_starts = found["first_token_s"]
        return Found(
            document=found,
            rows=[
                ("first start", f"{found['first_start']['first_token_s']:.2f} s"),
                ("start with warm caches", _spread(timed_starts) if timed_starts else "none was timed"),
            ],
            aims={"every cold start answers the same": found["all_starts_agree"]},
        )

    # -- captures and restores --------------------------------------------------------------------

    def driver(self, driver: DriverId) -> Found:
        """Capture with one driver, restore with the pack in memory and in the page cache, ask everything.

        What was seen before something failed is among the facts of the failure.
        """
        so_far: dict[str, Any] = {}
        try:
            return self._driver(driver, so_far)
        except Exception as error:
            seen = {mode: one.document() for mode, one in so_far.pop("seen", {}).items() if one.rounds}
            facts = {**getattr(error, "facts", {}), "so_far": {**so_far, "restores": seen}}
            error.facts = facts  # type: ignore[attr-defined] # whatever it is: the record reads facts of any error
            raise

    def _driver(self, driver: DriverId, so_far: dict[str, Any]) -> Found:
        capture = self._capture(driver.value, driver)
        captured = so_far["capture"] = capture.take()
        left = capture.processes_left()
        searched, in_image = capture.windows()
        seen: dict[str, Seen] = {"ahead": Seen(), "cached": Seen()}
        so_far["seen"] = seen
        with self._caches_away(driver) as words:
            for (mode, one), share in zip(seen.items(), (0.75, 0.85), strict=True):
                capture.restores(mode, rounds=self.rounds, words=words, share=share, seen=one)
        detected = capture.negative_control()
        rounds = [one for mode in seen.values() for one in mode.equal]
        aims = {
            "tokens equal to a separate cold server's, every restore": bool(rounds) and all(rounds),
            "at least 8 prompts that the capture never saw": len(capture.expected["prompts"]) >= 8,
            "streaming works": all(one for mode in seen.values() for one in mode.streams),
            "a restore without hydration is caught": detected,
            "the captured processes are gone": left == 0,
            "no piece of the pack in the image": searched > 0 and in_image == 0,
        }
        speed, waived = self._speed(driver, seen)
        sizes = {name: captured[f"{name}_bytes"] for name in ("image", "capsule", "pack", "residual")}
        return Found(
            document={
                "capture": captured,
                "restores": {mode: one.document() for mode, one in seen.items()},
                "windows_searched": searched,
                "windows_in_image": in_image,
                "by_hand_s": BY_HAND_S.get(self.size),
                "cold_start_s": self._cold_s(),
            },
            rows=[
                *((f"restore to first token, pack {mode}", _spread(_times(one))) for mode, one in seen.items()),
                *(
                    (f"  {name}", f"{one['median']:.3f} s")
                    for name, one in seen["ahead"].document()["phases_s"].items()
                ),
                *(
                    (f"  wake: {name}", f"{one['median']:.3f} s")
                    for name, one in seen["ahead"].document()["wake_s"].items()
                ),
                *((f"capture: {name}", f"{value:.2f} s") for name, value in captured["seconds"].items()),
                *((name, f"{value / 1e6:.1f} MB") for name, value in sizes.items()),
                *((f"residual: {why}"[:44], f"{size} B") for why, size in captured["residual_reasons"].items()),
            ],
            aims={**aims, **speed},
            waived=waived,
        )

    def disk(self) -> Found:
        """Restores with pack and process images on the disk alone, and what the disk needs for as many bytes."""
        capture = self._found(self.subject.drivers[0])
        seen = capture.restores("disk", rounds=min(3, self.rounds))
        files = capture.files()
        total = sum(path.stat().st_size for path in files)
        limit_s = sum(_read_plainly(path) for path in files)
        return Found(
            document={"restores": {"disk": seen.document()}, "bytes": total, "disk_limit_s": limit_s},
            rows=[
                ("restore to first token, all on the disk", _spread(_times(seen))),
                ("plain reading of pack and images", f"{limit_s:.2f} s, {total / limit_s / 1e9:.2f} GB/s"),
            ],
            aims={"tokens equal to a separate cold server's, every restore": all(seen.equal)},
        )

    def one_digest(self) -> Found:
        """Captures by every driver, and one with other options, have one pack."""
        digests = {driver.value: self._found(driver).digests() for driver in self.subject.drivers}
        other = self._capture("order", self.subject.drivers[0], serve=dict(self.subject.another_order))
        other.take()
        digests["other options, captured again"] = other.digests()
        return Found(
            document={"packs": {name: [str(one) for one in packs] for name, packs in digests.items()}},
            rows=[(name, ", ".join(str(one)[:23] for one in packs)) for name, packs in digests.items()],
            aims={"one pack for all of them": len(set(digests.values())) == 1 and all(digests.values())},
        )

    def recovery(self) -> Found:
        """Restore without the pack, have it written again, restore with it."""
        capture = self._found(self.subject.drivers[0])
        store, packs = self.subject.tools.store, capture.digests()
        for digest in packs:
            record_path(store.path(digest)).unlink(missing_ok=True)
            store.path(digest).unlink()
        without = self._recovered(capture)
        rebuilt = {digest.hex: _sha256(store.path(digest)) for digest in packs}
        again = capture.restores("cached", rounds=1)
        return Found(
            document={"without_the_pack": without.document(), "with_it": again.document(), "packs": rebuilt},
            rows=[
                ("restore to first token, from the checkpoint", _spread(_times(without))),
                ("and then with the pack again", _spread(_times(again))),
            ],
            aims={
                "tokens equal without the pack": all(without.equal),
                "the rebuilt pack has its digest": all(name == found for name, found in rebuilt.items()),
                "tokens equal with it": all(again.equal) and again.document()["sources"] == ["native"],
            },
        )

    def fp8(self) -> Found:
        """A small model in FP8: the same tokens, and how many of its bytes are the checkpoint's."""
        size = f"{self.size}-fp8"
        model = self.subject.model(size)
        cold = cold_starts(self.subject, model, num_timed=1, share=0.5, budget=self.budget)
        capture = Capture(
            subject=self.subject,
            coldsnap=self.coldsnap,
            name=size,
            model=model,
            driver=self.subject.drivers[0],
            expected=cold,
        )
        captured = capture.take()
        seen = capture.restores("ahead", rounds=min(3, self.rounds))
        share = captured["pack_bytes"] / (captured["pack_bytes"] + captured["residual_bytes"])
        return Found(
            document={"cold": cold, "capture": captured, "restores": {"ahead": seen.document()}, "share": share},
            rows=[
                ("share of the weights that is the checkpoint's", f"{share:.4f}, aimed at {FP8_AIM}"),
                ("restore to first token", _spread(_times(seen))),
                *((f"residual: {why}"[:44], f"{size} B") for why, size in captured["residual_reasons"].items()),
            ],
            aims={
                "tokens equal to a separate cold server's, every restore": all(seen.equal),
                f"at least {FP8_SHARE:.0%} of the weights are the checkpoint's": share >= FP8_SHARE,
            },
        )

    # -- what steps share -------------------------------------------------------------------------

    @contextmanager
    def _caches_away(self, driver: DriverId) -> Iterator[Sequence[str]]:
        """Words for restores of a driver that starts the engine anew: its compiled files come out of the capsule."""
        caches = self.subject.caches
        if driver is not DriverId.N580 or not caches.exists():
            yield ()
            return
        away = caches.with_name("caches-away")
        caches.rename(away)
        caches.mkdir()
        try:
            yield ("--cache-path", str(caches))
        finally:
            shutil.rmtree(caches)
            away.rename(caches)

    def _capture(self, name: str, driver: DriverId, **recipe: Any) -> Capture:
        seeded = driver is DriverId.N580 and self.subject.caches.exists()
        seeds = {"cache_seeds": [str(self.subject.caches)]} if seeded else {}
        return Capture(
            subject=self.subject,
            coldsnap=self.coldsnap,
            name=f"{self.size}-{name}",
            model=self.subject.model(self.size),
            driver=driver,
            expected=self._cold(),
            recipe={**seeds, **recipe},
        )

    def _found(self, driver: DriverId) -> Capture:
        """An earlier step's artifact."""
        capture = self._capture(driver.value, driver)
        if not capture.artifact.exists():
            raise RuntimeError(f"there is no {capture.artifact}: run the step {driver.value} on this machine first")
        return capture

    def _cold(self) -> Mapping[str, Any]:
        entry = self.record.document["steps"].get(f"{self.size}-cold", {})
        if "expected" not in entry:
            raise RuntimeError(f"nobody knows what {self.size} must answer: run the step cold first")
        found: Mapping[str, Any] = entry
        return found

    def _cold_s(self) -> float | None:
        timed_starts = self._cold()["first_token_s"]
        return float(timed_starts["median"]) if timed_starts else None

    def _speed(self, driver: DriverId, seen: Mapping[str, Seen]) -> tuple[dict[str, bool], dict[str, str]]:
        """What is asked of the seconds; waived where they mean nothing."""
        median, cold_s = seen["ahead"].median_s, self._cold_s()
        if driver is DriverId.N580:
            aim = f"ready at least {TIMES_COLD:g} times as fast as a start with warm caches"
            met = cold_s is not None and median * TIMES_COLD <= cold_s
        elif self.size in AIM_S:
            aim = f"first token within {AIM_S[self.size]:g} s, median of 5 or more"
            met = median <= AIM_S[self.size] and len(seen["ahead"].rounds) >= 5
        else:
            return {}, {}
        return ({aim: met}, {}) if self.subject.kind == "gpu" else ({}, {aim: self.subject.kind})

    def _recovered(self, capture: Capture) -> Seen:
        """One restore without the pack, which is written again before the service counts as restored."""
        return capture.restores("cached", rounds=1, words=("--materialize", "required"))


def _times(seen: Seen) -> Mapping[str, Any]:
    found: Mapping[str, Any] = seen.document()["first_token_s"]
    return found


def _spread(one: Mapping[str, Any]) -> str:
    return f"{one['median']:.2f} s ({one['min']:.2f} to {one['max']:.2f}, n={one['n']})"


def _sha256(path: Path) -> str:
    """By the standard library alone; of nothing, when there is no file."""
    if not path.is_file():
        return "no file"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_plainly(path: Path) -> float:
    """Seconds that plain reading takes without the page cache, with 8 threads."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        plain_read(fd, path.stat().st_size, 8)
        return time.perf_counter() - began
    finally:
        os.close(fd)
