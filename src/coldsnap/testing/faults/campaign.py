"""Running a campaign: pens that take cases until there are none, and the sums at the end.

Several pens work at a time, each with cases of one kind: a real engine (Transformers, with a tiny random model), the
fake one on GPUs that pretend, frozen by either driver for them, and the plain fake one, of which most are. When a kind
has none left, a pen of another takes the place of its own.
"""

from __future__ import annotations

import itertools
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.core.drivers import DriverId
from coldsnap.core.points import POINTS
from coldsnap.testing.faults.base import make_base
from coldsnap.testing.faults.case import Case, Row, run_case
from coldsnap.testing.faults.families import FAMILIES
from coldsnap.testing.faults.gpus import DRIVERS, list_gpu_cases
from coldsnap.testing.faults.lane import Lane
from coldsnap.testing.faults.listing import list_cases, list_real_cases
from coldsnap.testing.faults.parsers import fuzz, parsers
from coldsnap.testing.faults.pen import Lines, Pen
from coldsnap.testing.faults.plugin import StruckPlugin, real_plugin
from coldsnap.testing.faults.profile import profile

__all__ = ["Campaign", "Sums", "run_campaign"]

_TAIL_CHARACTERS = 1500
_TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What is wanted. ``choose`` takes the cases to run. ``max_s``: no case begins after that many seconds.

    ``num_inputs``: how many mutations each parser gets.
    """

    seed: int
    choose: Callable[[list[Case]], list[Case]]
    max_s: float
    num_pens: int
    num_inputs: int
    with_real_engine: bool
    say: Callable[[str], None]
    tell: Callable[[Row], None]


@dataclass(kw_only=True)
class Sums:
    """What happened. ``trouble`` are pens that died: the harness's own failures."""

    rows: list[Row] = field(default_factory=list)
    num_listed: int = 0
    seconds: float = 0.0
    parsers: Mapping[str, Any] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Row]:
        """Cases whose fault really happened."""
        return [row for row in self.rows if row.happened]

    def count(self, kind: str) -> int:
        """Violations of a kind."""
        return sum(1 for row in self.rows for found, _ in row.violations if found == kind)

    def document(self) -> dict[str, Any]:
        """As JSON; the rows come last and are short."""
        faults = self.faults
        hit = {point for row in self.rows for point in row.points} & set(POINTS)
        return {
            "faults": len(faults),
            "sigkills": sum(row.sigkills for row in faults),
            "criu_faults": sum(row.restored for row in faults),
            "wrong_answers": self.count("wrong-answer"),
            "damaged": self.count("damage"),
            "leftovers": self.count("leftover"),
            "stuck": self.count("stuck"),
            "cases_listed": self.num_listed,
            "cases_run": len(self.rows),
            "faults_that_did_not_happen": sorted(row.name for row in self.rows if not row.happened),
            "points": {"all": len(POINTS), "hit": len(hit), "missing": sorted(set(POINTS) - hit)},
            "outcomes": _tally(row.outcome for row in faults),
            "families": _tally(row.name.split()[0] for row in faults),
            "seconds": round(self.seconds, 1),
            "trouble": self.trouble,
            "parsers": self.parsers,
            "violations": [[row.name, *one] for row in self.rows for one in row.violations],
            "rows": [[row.name, row.outcome, row.reason, row.seconds] for row in sorted(self.rows, key=_by_name)],
        }


def run_campaign(wanted: Campaign) -> Sums:
    """Run it all. Raises MissingCapability without root; a pen that dies is told in the sums, and costs its case."""
    began = time.monotonic()
    sums = Sums()
    with _scratch() as root, ExitStack() as stack:
        queues: dict[str, list[Case]] = {}
        model: Path | None = None
        if wanted.with_real_engine:
            wanted.say("make a tiny checkpoint for the real engine")
            model = _tiny_checkpoint(root)
            queues["real"] = wanted.choose(list_real_cases(seed=wanted.seed))
        for kind in DRIVERS:
            queues[kind] = wanted.choose(list_gpu_cases(kind, seed=wanted.seed))
        wanted.say("see what the operations reach")
        first = stack.enter_context(_Station(root, 0, "fake", None))
        queues["fake"] = wanted.choose(list_cases(first.ask("profile"), seed=wanted.seed))
        sums.num_listed = sum(map(len, queues.values()))
        wanted.say(f"{sums.num_listed} cases in {wanted.num_pens} pens")
        if wanted.num_inputs:
            sums.parsers = first.ask(["parsers", wanted.seed, wanted.num_inputs])
        work = _Work(wanted=wanted, queues=queues, sums=sums, ends=began + wanted.max_s, root=root, model=model)
        work.run(stack, first)
    sums.seconds = time.monotonic() - began
    return sums


@dataclass(kw_only=True)
class _Work:
    """Stations that take cases of their kind until there are none, and then make room for one of another kind."""

    wanted: Campaign
    queues: Mapping[str, list[Case]]
    sums: Sums
    ends: float
    root: Path
    model: Path | None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _at_work: list[_Station] = field(default_factory=list)

    def run(self, stack: ExitStack, first: _Station) -> None:
        """Return when all is done, or the time is over."""
        with selectors.DefaultSelector() as selector:
            self._give(stack, selector, first)
            while len(self._at_work) < self.wanted.num_pens and (station := self._another(stack)) is not None:
                self._give(stack, selector, station)
            while selector.get_map():
                for key, _ in selector.select():
                    station = key.data
                    selector.unregister(station.pen.lines)
                    self._at_work.remove(station)
                    row = station.finish()
                    if isinstance(row, str):
                        self.sums.trouble.append(row)
                        station.close()
                        another = self._station(stack, station.kind)
                    else:
                        self.sums.rows.append(row)
                        self.wanted.tell(row)
                        another = station
                    if another is not None:
                        self._give(stack, selector, another)

    def _give(self, stack: ExitStack, selector: selectors.BaseSelector, station: _Station) -> None:
        """The next case of its kind; when there is none left, a station of another kind takes its place."""
        queue = self.queues[station.kind]
        if not queue or time.monotonic() >= self.ends:
            station.close()
            another = self._another(stack)
            if another is None:
                return
            station, queue = another, self.queues[another.kind]
        station.begin(queue.pop(0))
        self._at_work.append(station)
        selector.register(station.pen.lines, selectors.EVENT_READ, station)

    def _another(self, stack: ExitStack) -> _Station | None:
        """A new station of a kind that has cases left; of all kinds but the plain fake engine, one is enough."""
        if time.monotonic() >= self.ends:
            return None
        taken = {station.kind for station in self._at_work} - {"fake"}
        kind = next((kind for kind, queue in self.queues.items() if queue and kind not in taken), None)
        return None if kind is None else self._station(stack, kind)

    def _station(self, stack: ExitStack, kind: str) -> _Station | None:
        """A new one; None when it does not come up, several times, each of which is told in the sums."""
        model = self.model if kind == "real" else None
        for _ in range(_TRIES):
            try:
                return stack.enter_context(_Station(self.root, next(self._numbers), kind, model))
            except RuntimeError as error:
                self.sums.trouble.append(str(error))
        return None


class _Station:
    """A pen and the case that is in it."""

    def __init__(self, root: Path, number: int, kind: str, model: Path | None) -> None:
        self.kind = kind
        self._model = model
        self._folder = root / f"{number}"
        self._folder.mkdir(mode=0o700)
        self._log = root / f"pen-{number}.log"
        self._case: Case | None = None
        self.pen = Pen(self._live, self._log)
        self._closed = False
        if self.pen.lines.hear() != "ready":
            self.close()
            raise RuntimeError(f"a pen did not come up:\n{self.tail()}")

    def __enter__(self) -> _Station:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and everything in it. Idempotent."""
        if not self._closed:
            self._closed = True
            self.pen.__exit__()

    def ask(self, question: Any) -> Any:
        """One question that is no case."""
        self.pen.lines.say(question)
        answer = self.pen.lines.hear()
        if answer is None:
            raise RuntimeError(f"a pen died:\n{self.tail()}")
        return answer

    def begin(self, case: Case) -> None:
        """Give it a case."""
        self._case = case
        self.pen.lines.say(asdict(case))

    def finish(self) -> Row | str:
        """The row of its case, or why there is none."""
        told = self.pen.lines.hear()
        if told is not None:
            return Row.read(told)
        return f"a pen died in {self._case.name if self._case else 'no case'}: {self.tail()}"

    def tail(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:] if self._log.exists() else ""

    def _live(self, lines: Lines) -> None:
        """Inside the pen."""
        if self.kind == "real":
            lane = Lane(self._folder, real_plugin)
        else:
            driver = DRIVERS.get(self.kind, DriverId.HOST)
            lane = Lane(self._folder, StruckPlugin, driver=driver)
        make_base(lane, self._model)
        lines.say("ready")
        while (job := lines.hear()) is not None:
            if job == "profile":
                lines.say(profile(lane))
            elif isinstance(job, list):
                lane.reset()
                found = parsers(lane.state, lane.artifact).values()
                lines.say({one.name: asdict(fuzz(one, num_inputs=job[2], seed=job[1])) for one in found})
            else:
                case = Case(**job)
                lines.say(run_case(lane, case, FAMILIES[case.family]).document())


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="coldsnap-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tiny_checkpoint(root: Path) -> Path:
    out = root / "tiny"
    words = ["-m", "coldsnap.engines.transformers.checkpoints", "random", str(out), "--size", "tiny"]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return out


def _tally(words: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return dict(sorted(found.items()))


def _by_name(row: Row) -> str:
    return row.name
