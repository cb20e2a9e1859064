"""``coldsnap demo`` from its command line to its one JSON object, with the fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.stand import PATIENCE_S, plugin_path, processes_of

from .conftest import TENSORS  # isort: skip

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("criu")]


def test_the_demo_keeps_every_promise_and_leaves_nothing(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tensors=TENSORS)
    command = [sys.executable, "-m", "coldsnap.cli", "demo", "--engine", "fake", "--model", str(model), "--runs", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "demo"), "--json", "--quiet"],
        env={**os.environ, "PYTHONPATH": str(plugin_path(tmp_path / "plugins"))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["passed"] is True
    assert (said["tokens_equal"], said["negative_control_detected"], said["old_pids_gone"]) == (True, True, True)
    assert said["num_prompts"] >= 3
    assert said["cold_answer"] == said["restored_answer"]
    assert (said["windows_searched"], said["windows_in_image"]) == (200, 0)
    assert said["restore_to_first_token_s"] > 0
    assert said["cold_start_to_first_token_s"] > 0
    assert said["pack_bytes"] == sum(-(-size // 4096) * 4096 for size in TENSORS.values())
    assert said["image_bytes"] > 0
    assert said["residual_bytes"] > 0
    assert processes_of(tmp_path) == {}


def test_the_recovery_demo_deletes_a_pack_and_gets_it_back(tmp_path: Path) -> None:
    models = [write_checkpoint(tmp_path / name, seed=seed, tensors=TENSORS) for seed, name in enumerate(("a", "b"))]
    command = [sys.executable, "-m", "coldsnap.cli", "demo-recovery", "--engine", "fake", "--json", "--quiet"]
    for model in models:
        command += ["--model", str(model)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "demo")],
        env={**os.environ, "PYTHONPATH": str(plugin_path(tmp_path / "plugins"))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["passed"] is True
    assert [one["model"] for one in said["models"]] == ["a", "b"]
    for one in said["models"]:
        assert (one["recovery_tokens_equal"], one["native_tokens_equal"]) == (True, True)
        assert (one["recovery_source"], one["next_restore_source"]) == ("recovery", "native")
        assert one["rebuilt_pack_digest"] == one["pack_digest"]
        assert [step["outcome"] for step in one["recovery_ladder"]] == ["skipped", "used"]
    assert len({one["pack_digest"] for one in said["models"]}) == 2
    assert processes_of(tmp_path) == {}
