"""`./run test --rerun`: what is run again, what that makes of a suite, and that nobody overlooks it."""

import importlib
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
checks: ModuleType = importlib.import_module("house.checks")
reruns: ModuleType = importlib.import_module("house.reruns")

PASSED = reruns.Case(classname="t.test_a", name="test_fine")


def case(test: str, error: str | None = "E", skipped: str | None = None) -> Any:
    return reruns.Case(classname="t.test_a", name=test, error=error, skipped=skipped)


def outcome(status: int, *tests: str, **more: Any) -> Any:
    """A pytest process in which these tests of t/test_a.py failed and one other passed."""
    named = {"cases": (*map(case, tests), PASSED), "lastfailed": tuple(f"t/test_a.py::{test}" for test in tests)}
    return reruns.Outcome(status=status, **{**named, **more})


@pytest.mark.parametrize("tests", [["x"], ["x", "y[a/b::c.py]"], ["x", "y", "z"]])
def test_up_to_three_failed_tests_are_run_again(tests: list[str]) -> None:
    assert [str(failure) for failure in reruns.failures(outcome(1, *tests))] == [f"t/test_a.py::{t}: E" for t in tests]


def test_an_error_of_a_fixture_is_a_failure_and_the_first_error_is_told() -> None:
    """Pytest writes a test whose call and teardown both fail as two cases of one name."""
    found = reruns.failures(outcome(1, "x", cases=(case("x", "first"), case("x", "second"))))
    assert found == (reruns.Failure(test="t/test_a.py::x", error="first"),)


def test_a_method_is_found_in_the_report() -> None:
    method = reruns.Case(classname="t.test_a.TestB", name="test_c[1]", error="E")
    found = reruns.failures(reruns.Outcome(status=1, cases=(method,), lastfailed=("t/test_a.py::TestB::test_c[1]",)))
    assert [failure.test for failure in found] == ["t/test_a.py::TestB::test_c[1]"]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (outcome(1, "w", "x", "y", "z"), "4 tests failed"),
        (outcome(0, "x"), "status 0"),
        (outcome(2, "x"), "status 2"),  # interrupted, or a file that cannot be imported
        (outcome(3, "x"), "status 3"),  # an internal error
        (outcome(-9, "x"), "status -9"),
        (outcome(1, "x", cases=None), "no report"),  # a time limit that ends the process has status 1 too
        (outcome(1), "no test failed"),  # coverage below its floor, or a warning at the very end
        (outcome(1, lastfailed=None), "no test failed"),
        (outcome(1, lastfailed=("t/test_a.py",)), "could not be collected"),
        (outcome(1, "x", lastfailed=()), "different tests"),
        (outcome(1, "x", lastfailed=None), "different tests"),
        (outcome(1, "x", lastfailed=("t/test_a.py::x", "t/test_a.py::y")), "different tests"),
        (outcome(1, "x", cases=(PASSED,)), "different tests"),
    ],
)
def test_anything_but_a_few_failed_tests_stays_failed(run: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reruns.failures(run)


GOOD = reruns.Outcome(status=0, cases=(case("x", None),))


@pytest.mark.parametrize(
    "bad",
    [
        reruns.Outcome(status=1, cases=(case("x"),)),
        reruns.Outcome(status=1, cases=(case("x", None),)),
        reruns.Outcome(status=0, cases=(case("x", None, "no moon"),)),
        reruns.Outcome(status=0, cases=()),
        reruns.Outcome(status=5, cases=()),
        reruns.Outcome(status=4, cases=None),
        reruns.Outcome(status=-11, cases=None),
    ],
)
def test_one_bad_rerun_breaks_a_test(bad: Any) -> None:
    x, y = (reruns.Failure(test=f"t/test_a.py::{name}", error="E") for name in "xy")
    for pair in ([bad, GOOD], [GOOD, bad], [bad, bad], [GOOD], []):
        verdict = reruns.judge([x, y], {x.test: pair, y.test: [GOOD, GOOD]}, floor_held=True)
        assert (verdict.broken, verdict.unsteady, verdict.status) == ((x,), (y,), 1)
        assert verdict.lines[:2] == ("FAILED AGAIN: t/test_a.py::x: E", "UNSTEADY TEST: t/test_a.py::y: E")
        assert "test: failed" in verdict.lines[-1]


@pytest.mark.parametrize("floor_held", [True, False])
def test_unsteady_tests_are_named_and_pass_only_above_the_floor(floor_held: bool) -> None:
    x = reruns.Failure(test="t/test_a.py::x", error="E")
    verdict = reruns.judge([x], {x.test: [GOOD, GOOD]}, floor_held=floor_held)
    assert (verdict.unsteady, verdict.broken, verdict.status) == ((x,), (), 0 if floor_held else 1)
    assert [part in verdict.lines[-1] for part in ("passed", "below its floor")] == [floor_held, not floor_held]
    assert all("t/test_a.py::x" in line for line in verdict.lines)


CODE = """
def half(number):
    if number:
        return number / 2
    return 0
"""
STEADY = """
import tiny
def test_one(): assert tiny.half(2) == 1
"""
ZERO = "def test_zero(): assert tiny.half(0) == 0\n"
UNSTEADY = """
import pathlib
def test_once():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise OSError("the moon is down\\nand more")
"""
THRICE = """
import pathlib
def test_twice():
    times = pathlib.Path("times")
    times.write_text(times.read_text() + "x" if times.exists() else "x")
    assert len(times.read_text()) in (2, 4), "odd"
"""


@pytest.mark.parametrize(
    ("tests", "words", "status", "last"),
    [
        (STEADY + ZERO, ["--rerun"], 0, None),
        (STEADY + ZERO + UNSTEADY, [], 1, None),
        (STEADY + ZERO + UNSTEADY, ["--rerun"], 0, "test: passed, but: 1 UNSTEADY.*test_tiny.py::test_once"),
        (STEADY + UNSTEADY, ["--rerun"], 1, "test: failed: coverage is below its floor; 1 UNSTEADY"),
        (STEADY, ["--rerun"], 1, "nothing is run again: no test failed"),
        (STEADY + ZERO + THRICE, ["--rerun"], 1, r"test: failed: 1 failed again \(test_tiny.py::test_twice\)"),
        (
            STEADY + ZERO + UNSTEADY + "def test_never(): assert False\n",
            ["--rerun"],
            1,
            r"failed: 1 failed again \(test_tiny.py::test_never\); 1 UNSTEADY.*\(test_tiny.py::test_once\)",
        ),
        (
            STEADY
            + ZERO
            + "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_never(n):\n    assert False\n",
            ["--rerun", "-x"],  # which would otherwise hide three of them
            1,
            "nothing is run again: 4 tests failed",
        ),
        (STEADY + "import absent\n", ["--rerun"], 1, "nothing is run again: pytest ended with status 2"),
        (STEADY + UNSTEADY + "import os\ndef test_ends(): os._exit(1)\n", ["--rerun"], 1, "nothing is run.*no report"),
        (
            STEADY + ZERO + UNSTEADY + "import pytest\ndef test_skips(): pytest.skip('why')\n",
            ["--rerun"],
            1,
            "test: 1 skipped, which counts as failed",
        ),
        (
            STEADY + ZERO + UNSTEADY + "import pytest\ndef test_skips(): pytest.skip('why')\n",
            ["--rerun", "--allow-skips"],
            0,
            "test: passed, but: 1 UNSTEADY",
        ),
    ],
)
def test_a_real_suite(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tests: str,
    words: list[str],
    status: int,
    last: str | None,
) -> None:
    for name, value in (("ROOT", tmp_path), ("CACHE", tmp_path / ".cache"), ("VENV", Path(sys.prefix))):
        monkeypatch.setattr(checks, name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text(
        textwrap.dedent("""
            [tool.pytest.ini_options]
            testpaths = ["test_tiny.py"]
            [tool.coverage.run]
            source = ["tiny"]
            [tool.coverage.report]
            fail_under = 95
            """)
    )
    (tmp_path / "tiny.py").write_text(CODE)
    (tmp_path / "test_tiny.py").write_text(tests)
    ended = checks.test(words)
    said = capfd.readouterr().err.splitlines()
    assert (ended != 0) == (status != 0), said
    assert re.search(last or r"\$ \S*/python -m pytest", said[-1]), said
    if "UNSTEADY" in (last or ""):
        assert any(line.endswith("UNSTEADY TEST: test_tiny.py::test_once: OSError: the moon is down") for line in said)
    assert not (tmp_path / ".pytest_cache").exists() or "--rerun" not in words  # people's `--lf` is theirs
