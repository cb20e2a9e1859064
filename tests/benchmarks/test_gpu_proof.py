"""The steps of a GPU proof: recorded one by one, resumed, and all of them run once with fakes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
proof: ModuleType = importlib.import_module("benchmarks._proof")


def found(**aims: bool) -> Callable[[], Any]:
    return lambda: proof.Found(document={"samples": [1.0, 2.0]}, rows=[("what", "much")], aims=aims)


def broken() -> Any:
    error = RuntimeError("the GPU is on fire")
    error.add_note("nothing was brought back")
    error.facts = {"log": ["a line of the engine's log"], "path": Path("/x")}  # type: ignore[attr-defined]
    raise error


def run(
    folder: Path,
    steps: dict[str, Callable[[], Any]],
    *,
    resume: bool = False,
    commit: str = "c0",
    kind: str = "fake",
    only: tuple[str, ...] = (),
    budget_s: float = 60,
) -> tuple[bool, dict[str, Any], list[str]]:
    said: list[str] = []
    record = proof.Record(folder / "gpu-proof.json", commit=commit, kind=kind, resume=resume)
    good = proof.run_steps(steps, record, only=only, budget_s=budget_s, say=said.append)
    path = folder / "gpu-proof.json"
    return good, json.loads(path.read_text()) if path.exists() else {}, said


def test_every_step_is_recorded_with_where_it_ran(tmp_path: Path) -> None:
    good, document, said = run(tmp_path, {"one": found(fast=True), "two": found()})
    assert good
    assert (document["commit"], document["kind"]) == ("c0", "fake")
    assert list(document["steps"]) == ["one", "two"]
    for entry in document["steps"].values():
        assert entry["state"] == "met"
        assert entry["samples"] == [1.0, 2.0]
        assert entry["machine"]["boot_id"]
        assert {"nvidia_driver", "seconds", "ended_unix_s"} <= entry.keys()
    assert any("what" in line and "much" in line for line in said)


def test_a_missed_aim_is_no_success_and_stops_nothing(tmp_path: Path) -> None:
    good, document, said = run(tmp_path, {"slow": found(fast=False, right=True), "next": found()})
    assert not good
    assert [entry["state"] for entry in document["steps"].values()] == ["missed", "met"]
    assert any(line.split() == ["MISSED", "fast"] for line in said)


def test_a_waived_aim_is_said_to_be(tmp_path: Path) -> None:
    """A step of which nothing could be judged has met nothing, and is no failure either."""
    steps = {
        "all": lambda: proof.Found(waived={"fast": "fake"}),
        "some": lambda: proof.Found(aims={"right": True}, waived={"fast": "fake"}),
        "wrong": lambda: proof.Found(aims={"right": False}, waived={"fast": "fake"}),
    }
    good, document, said = run(tmp_path, {name: steps[name] for name in ("all", "some")})
    assert good
    assert [entry["state"] for entry in document["steps"].values()] == ["waived", "met"]
    assert {entry["waived"]["fast"] for entry in document["steps"].values()} == {"fake"}
    assert [line.strip() for line in said].count("waived: fake: fast") == 2
    assert any(line.startswith("== all: waived in ") for line in said)
    good, document, _ = run(tmp_path, steps, resume=True)
    assert not good
    assert document["steps"]["wrong"]["state"] == "missed"


def test_a_step_that_raises_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    good, document, said = run(tmp_path, {"bad": broken, "next": found()})
    assert not good
    bad = document["steps"]["bad"]
    assert (bad["state"], bad["error"]) == ("failed", "RuntimeError: the GPU is on fire")
    assert bad["notes"] == ["nothing was brought back"]
    assert bad["facts"] == {"log": ["a line of the engine's log"], "path": "/x"}
    assert any("a line of the engine's log" in line for line in said)
    assert document["steps"]["next"]["state"] == "met"


def test_a_resumed_proof_runs_what_failed_or_is_missing(tmp_path: Path) -> None:
    calls: list[str] = []

    def step(name: str) -> Callable[[], Any]:
        def act() -> Any:
            calls.append(name)
            return proof.Found(aims={"held": name != "slow"})

        return act

    run(tmp_path, {"one": step("one"), "bad": broken, "slow": step("slow")})
    good, document, _ = run(tmp_path, {name: step(name) for name in ("one", "bad", "slow", "new")}, resume=True)
    assert calls == ["one", "slow", "bad", "new"]
    assert list(document["steps"]) == ["one", "bad", "slow", "new"]
    assert not good, "an aim that was missed before still is"


@pytest.mark.parametrize(
    ("resume", "commit", "kind"), [(False, "c0", "fake"), (True, "c1", "fake"), (True, "c0", "full")]
)
def test_without_resume_or_for_another_commit_or_kind_all_is_run_again(
    tmp_path: Path, resume: bool, commit: str, kind: str
) -> None:
    run(tmp_path, {"one": found(), "gone": found()})
    _, document, _ = run(tmp_path, {"one": found()}, resume=resume, commit=commit, kind=kind)
    assert list(document["steps"]) == ["one"]


def test_no_step_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    good, document, said = run(tmp_path, {"one": found(), "two": found()}, budget_s=-1)
    assert not good
    assert document == {}
    assert "one, two" in said[-1]


def test_only_the_steps_that_are_asked_for_are_run(tmp_path: Path) -> None:
    _, document, _ = run(tmp_path, {"one": found(), "two": found()}, only=("two",))
    assert list(document["steps"]) == ["two"]


def test_what_fakes_give_does_not_go_where_measurements_are_kept() -> None:
    gpu_proof = importlib.import_module("benchmarks.gpu_proof")
    assert gpu_proof.result_folder(fake=False) == ROOT / "benchmarks/results"
    assert gpu_proof.result_folder(fake=True) == ROOT / ".cache/results"


@pytest.mark.criu
@pytest.mark.usefixtures("criu")
def test_all_steps_run_with_fakes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--fake", "--out", str(tmp_path), "--commit", "c0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    document = json.loads((tmp_path / "gpu-proof.json").read_text())
    names = ["probes", "model", "n610", "n580", "hydrate", "capture-speed", "first-use", "criu", "failures"]
    assert list(document["steps"]) == names
    states = {name: entry["state"] for name, entry in document["steps"].items()}
    timed = {"hydrate", "first-use", "criu"}
    assert states == {name: "waived" if name in ("first-use", "criu") else "met" for name in names}
    assert {why for name in timed for why in document["steps"][name]["waived"].values()} == {"fake"}
    for driver in ("n610", "n580"):
        claims = document["steps"][driver]["claims"]
        assert claims
        assert all(claims.values())
        assert document["steps"][driver]["story"]["num_prompts"] >= 4
        restores = document["steps"][driver]["restores"]
        assert set(restores) == {"ahead", "cached", "beside", "disk"}
        assert any("out of the copy in memory" in how for how in restores["ahead"]["transfers"])
        for mode in ("cached", "disk"):
            assert not any("copy in memory" in how for how in restores[mode]["transfers"])
    faults = document["steps"]["failures"]["faults"]
    for name in ("failed dump", "failed CUDA checkpoint", "lock time-out", "killed helper"):
        assert faults[name]["same_processes"], name
        assert faults[name]["raised"]
        assert faults[name]["serves_the_same"]
    assert faults["failed restore"]["leaves_nothing"]
