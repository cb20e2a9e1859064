"""`./run test --rerun`: which failed tests get another chance, and what a suite is then worth.

A test that fails once and then passes is a defect, of the test or of what it tests. It is named loudly but does not
hide that everything else passed. Whatever is not clearly a few failed tests stays a failed suite: nothing here guesses.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FAILED = 3
ATTEMPTS = 2
_TESTS_FAILED = (
    1  # pytest's exit status when all ran and some failed; interrupted, internal and usage errors have others
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed test by the name that pytest takes as a word, and the first line of its error."""

    test: str
    error: str

    def __str__(self) -> str:
        return f"{self.test}: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test in a JUnit report. `error` is the first line of a failure, of the call or of a fixture; None for none."""

    classname: str
    name: str
    error: str | None = None
    skipped: str | None = None

    def __str__(self) -> str:
        return f"{self.classname}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pytest process left. `cases` is None without a report, `lastfailed` without a cache."""

    status: int
    cases: tuple[Case, ...] | None
    lastfailed: tuple[str, ...] | None = None


def cases_in(report: Path) -> tuple[Case, ...] | None:
    """The tests of a JUnit report, expected failures as passed; None when pytest did not live to write it."""
    try:
        found = ElementTree.parse(report)  # noqa: S314 - pytest wrote it a moment ago
    except (FileNotFoundError, ElementTree.ParseError):
        return None
    return tuple(_case(element) for element in found.iter("testcase"))


def lastfailed_in(cache: Path) -> tuple[str, ...] | None:
    """The names in pytest's cache of failed tests; None when there is none."""
    path = cache / "v/cache/lastfailed"
    return tuple(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def failures(outcome: Outcome) -> tuple[Failure, ...]:
    """The tests that may be run again, in the order in which pytest names them.

    Raises ValueError with the reason when none may: no test failed, more than MAX_FAILED did, something other than a
    test failed, or pytest's two accounts of the run differ.
    """
    if outcome.status != _TESTS_FAILED:
        raise ValueError(f"pytest ended with status {outcome.status}, which is more than failed tests")
    if outcome.cases is None:
        raise ValueError("pytest left no report, so it was killed")
    errors: dict[tuple[str, str], str] = {}
    for case in outcome.cases:
        if case.error is not None:
            errors.setdefault((case.classname, case.name), case.error)
    names = outcome.lastfailed or ()
    if not names and not errors:
        raise ValueError("no test failed, so something else did")
    if any("::" not in name for name in names):
        raise ValueError("a file could not be collected")
    if {_address(name) for name in names} != errors.keys():
        raise ValueError("pytest's report and its cache name different tests")
    if len(names) > MAX_FAILED:
        raise ValueError(f"{len(names)} tests failed; up to {MAX_FAILED} are run again")
    return tuple(Failure(test=name, error=errors[_address(name)]) for name in names)


def passed(rerun: Outcome) -> bool:
    """Whether a rerun of one test ran that test and it passed; a skip is no pass."""
    cases = rerun.cases
    return rerun.status == 0 and cases is not None and len(cases) == 1 and cases[0].skipped is None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a suite with a few failed tests is worth after their reruns."""

    unsteady: tuple[Failure, ...]
    broken: tuple[Failure, ...]
    floor_held: bool

    @property
    def status(self) -> int:
        return 1 if self.broken or not self.floor_held else 0

    @property
    def lines(self) -> tuple[str, ...]:
        """What must be read: every test with its error, then one line that sums up and holds all names."""
        lines = [f"FAILED AGAIN: {failure}" for failure in self.broken]
        lines += [f"UNSTEADY TEST: {failure}" for failure in self.unsteady]
        parts = [f"{len(self.broken)} failed again ({_names(self.broken)})"] if self.broken else []
        parts += [] if self.floor_held else ["coverage is below its floor"]
        if self.unsteady:
            parts.append(f"{len(self.unsteady)} UNSTEADY, a defect to be mended ({_names(self.unsteady)})")
        return (*lines, f"test: {'failed' if self.status else 'passed, but'}: {'; '.join(parts)}")


def judge(failed: Sequence[Failure], reruns: Mapping[str, Sequence[Outcome]], *, floor_held: bool) -> Verdict:
    """A test is unsteady when all its ATTEMPTS reruns passed, and broken otherwise, also when a rerun is missing."""
    unsteady: list[Failure] = []
    broken: list[Failure] = []
    for failure in failed:
        outcomes = reruns.get(failure.test, ())
        steady_now = len(outcomes) == ATTEMPTS and all(map(passed, outcomes))
        (unsteady if steady_now else broken).append(failure)
    return Verdict(unsteady=tuple(unsteady), broken=tuple(broken), floor_held=floor_held)


def _names(tests: Sequence[Failure]) -> str:
    return ", ".join(failure.test for failure in tests)


def _case(element: ElementTree.Element) -> Case:
    marks = {kind: element.find(kind) for kind in ("failure", "error", "skipped")}
    wrong = marks["failure"] if marks["failure"] is not None else marks["error"]
    skip = marks["skipped"]
    if skip is not None and skip.get("type") == "pytest.xfail":
        skip = None
    return Case(
        classname=element.get("classname", ""),
        name=element.get("name", ""),
        error=None if wrong is None else (wrong.get("message") or "no reason given").splitlines()[0],
        skipped=None if skip is None else skip.get("message") or "no reason given",
    )


def _address(test: str) -> tuple[str, str]:
    """How a JUnit report spells the name of a test: tests/a/test_b.py::C::d[e] is d[e] of tests.a.test_b.C."""
    path, bracket, parameters = test.partition("[")
    file, *inner = path.split("::")
    *classes, name = inner
    return ".".join((re.sub(r"\.py$", "", file.replace("/", ".")), *classes)), f"{name}{bracket}{parameters}"
