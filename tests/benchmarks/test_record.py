"""The file of a proof, when some of its steps are made anew."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks._proof import Found, Record, run_steps


def test_steps_that_are_not_made_anew_stay_with_their_commit(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    steps = {"one": lambda: Found(aims={"x": False}), "two": lambda: Found(aims={"y": False})}
    first = Record(path, commit="a" * 40, kind="fake", resume=False)
    assert not run_steps(steps, first, budget_s=float("inf"), say=lambda text: None)
    steps["two"] = lambda: Found(aims={"y": True})
    again = Record(path, commit="b" * 40, kind="real", resume=False, anew=["two"])
    assert run_steps(steps, again, only=["two"], budget_s=float("inf"), say=lambda text: None)
    found = json.loads(path.read_text())
    assert (found["commit"], found["kind"]) == ("b" * 40, "real")
    assert {name: entry["state"] for name, entry in found["steps"].items()} == {"one": "missed", "two": "met"}
    assert (found["steps"]["one"]["commit"], found["steps"]["one"]["kind"]) == ("a" * 40, "fake")
    assert "commit" not in found["steps"]["two"]
    third = Record(path, commit="c" * 40, kind="real", resume=False, anew=["two"])
    assert third.document["steps"]["one"]["commit"] == "a" * 40
    assert "two" not in third.document["steps"]
