"""`./run test` and `./run check`: who judges, and what counts as passed."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from house.reruns import ATTEMPTS, Outcome, cases_in, failures, judge, lastfailed_in
from house.say import call, say
from house.setup import CACHE, ROOT, VENV

ALLOW_SKIPS, RERUN = "--allow-skips", "--rerun"

# Python without its suffix: named, or the tools pass them by.
_SCRIPTS = ("run", "scripts/install-criu", "scripts/install-registry", "scripts/record-demo")


def check() -> int:
    """Run every check, also when an earlier one fails. Exit status 1 when any failed."""
    tools = VENV / "bin"
    checks: dict[str, list[str | Path]] = {
        "lint": [tools / "ruff", "check", ".", *_SCRIPTS],
        "format": [tools / "ruff", "format", "--check", ".", *_SCRIPTS],
        "types": [tools / "mypy"],
        "types of the scripts": [tools / "mypy", "scripts/house", "scripts/install-criu"],
        "types of the registry's script": [tools / "mypy", "scripts/install-registry"],
        "types of the recorder": [tools / "mypy", "scripts/record-demo"],  # one program a call: each is a __main__
        "imports": [tools / "lint-imports"],
    }
    environment = {**os.environ, "MYPYPATH": "scripts"}
    failed = [name for name, command in checks.items() if call(command, env=environment, cwd=ROOT) != 0]
    say(f"check: failed: {', '.join(failed)}" if failed else f"check: all {len(checks)} passed")
    return 1 if failed else 0


def for_pytest(words: Sequence[str]) -> list[str]:
    """Those of a test job's words that are pytest's."""
    return [word for word in words if word not in (ALLOW_SKIPS, RERUN)]


def test(words: Sequence[str]) -> int:
    """Run pytest, whose closing line comes last on standard output. Its exit status, or 1 for a skipped test.

    With `--rerun` failed tests that pass when run again leave status 0 if nothing else is amiss; they are named last.
    """
    allow_skips, rerun = ALLOW_SKIPS in words, RERUN in words
    own = for_pytest(words)
    results = CACHE / "test"
    shutil.rmtree(results / "cache", ignore_errors=True)  # a failure of an earlier run is none of this one's
    command = own or ["--cov", "--cov-report=term-missing:skip-covered"]
    if rerun:
        command = [*command, "--maxfail=0"]  # what a word like -x leaves out could not be judged
    first = _pytest(command, results, apart=rerun)
    skipped = [case for case in first.cases or () if case.skipped is not None]
    for case in skipped:
        say(f"skipped: {case}: {case.skipped}")
    if skipped and not allow_skips:
        say(f"test: {len(skipped)} skipped, which counts as failed; --allow-skips accepts it")
        return first.status or 1
    return _again(first, results, covered=not own) if rerun and first.status != 0 else first.status


def _again(first: Outcome, results: Path, *, covered: bool) -> int:
    """Run a few failed tests again, each in processes of its own, and say last what that makes of the suite."""
    try:
        failed = failures(first)
    except ValueError as reason:
        say(f"test: failed, and nothing is run again: {reason}")
        return first.status
    reruns = {one.test: [_pytest([one.test], results, apart=True) for _ in range(ATTEMPTS)] for one in failed}
    # Pytest's status 1 may be for the floor as well as for a test. The data are those of the whole run.
    report: list[str | Path] = [VENV / "bin/python", "-m", "coverage", "report", "--format=total"]
    floor_held = not covered or call(report, env=_environment(results), cwd=ROOT) == 0
    verdict = judge(failed, reruns, floor_held=floor_held)
    for line in verdict.lines:
        say(line)
    return verdict.status


def _pytest(words: Sequence[str], results: Path, *, apart: bool) -> Outcome:
    """One pytest process. `apart` from the cache that people's `--lf` reads, with one of its own in `results`."""
    results.mkdir(parents=True, exist_ok=True)
    report = results / "junit.xml"
    report.unlink(missing_ok=True)
    command: list[str | Path] = [VENV / "bin/python", "-m", "pytest", f"--junitxml={report}", *words]
    command += ["-o", f"cache_dir={results / 'cache'}"] if apart else []
    status = call(command, env=_environment(results), cwd=ROOT, to_stdout=True)
    return Outcome(status=status, cases=cases_in(report), lastfailed=lastfailed_in(results / "cache"))


def _environment(results: Path) -> dict[str, str]:
    return {
        **os.environ,
        "COVERAGE_FILE": str(results / "coverage"),
        "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
