"""The proof of vLLM: what it compares with, what it runs again, and all of its steps once with fakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks._vllm_cold import plain_command
from benchmarks._vllm_restores import Capture
from benchmarks.vllm_proof import finished

from coldsnap.core.drivers import DriverId

ROOT = Path(__file__).resolve().parents[2]


def test_plain_server_has_the_options_and_nothing_of_ours() -> None:
    command = (
        *("/env/python", "-m", "coldsnap.engines.vllm", "serve", "/models/m", "--enable-sleep-mode"),
        *("--load-format", "coldsnap", "--max-model-len", "4096", "--model-loader-extra-config={}"),
        *("--host", "127.0.0.1", "--port=8000"),
    )
    assert plain_command(command, port=99) == (
        *("/env/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m", "--enable-sleep-mode"),
        *("--max-model-len", "4096", "--host", "127.0.0.1", "--port", "99"),
    )


def test_finished_steps_are_those_of_this_commit_that_ran_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    assert finished(path, "a") == set()
    steps = {
        "0.6b-cold": {"state": "met"},
        "0.6b-n610": {"state": "failed"},
        "8b-cold": {"state": "missed", "commit": "b"},
        "8b-n580": {"state": "waived", "commit": "a"},
    }
    path.write_text(json.dumps({"commit": "a", "steps": steps}))
    assert finished(path, "a") == {"0.6b-cold", "8b-n580"}
    assert finished(path, "b") == {"8b-cold"}


@pytest.mark.parametrize(
    ("words", "variables", "counted"),
    [
        (("--port", "54321", "MODEL"), {}, 1),
        (("--port", "54322", "MODEL"), {}, 0),
        (("--port", "54321", "MODEL-of-others"), {}, 0),
        ((), {"VLLM_CACHE_ROOT": "CACHES/vllm"}, 1),
        ((), {"VLLM_CACHE_ROOT": "elsewhere"}, 0),
    ],
)
def test_processes_that_a_capture_left_are_counted_and_no_others(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], counted: int
) -> None:
    model, caches = tmp_path / "model", tmp_path / "caches"
    nothing: Any = None
    subject: Any = SimpleNamespace(caches=caches)
    capture = Capture(
        subject=subject,
        coldsnap=nothing,
        name="c",
        model=model,
        driver=DriverId.HOST,
        expected={},
        port=54321,
    )
    said = [word.replace("MODEL", str(model)) for word in words]
    environment = {name: value.replace("CACHES", str(caches)) for name, value in variables.items()}
    command = [sys.executable, "-c", "print(flush=True); input()", *said]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started: before, /proc shows no words of it
        assert capture.processes_left() == counted
        process.communicate(b"\n", timeout=600)
    assert capture.processes_left() == 0


@pytest.mark.timeout(3600)
@pytest.mark.criu
@pytest.mark.usefixtures("criu")
def test_all_steps_run_with_fakes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.vllm_proof", "--fake", "--out", str(tmp_path), "--commit", "c0"]
    command += ["--budget-s", "3300", "--rounds", "1", "--cold-starts", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    document = json.loads((tmp_path / "vllm-proof.json").read_text())
    steps = document["steps"]
    assert (document["commit"], document["kind"]) == ("c0", "fake")
    names = ["model", "cold", "n610", "disk", "n580", "one-digest", "recovery"]
    assert list(steps) == [f"fake-{name}" for name in names]
    assert {entry["state"] for entry in steps.values()} == {"met"}
    assert len(steps["fake-cold"]["expected"]) == 8
    for name in ("n610", "n580"):
        entry = steps[f"fake-{name}"]
        assert entry["windows_searched"] > 0
        assert set(entry["restores"]) == {"ahead", "cached"}
        for mode in entry["restores"].values():
            assert mode["prompts_agreed"] == [8]
            assert mode["first_token_s"]["n"] == 1
            for verb, command_s in zip(
                mode["first_token_s"]["samples"], mode["command_to_first_token_s"]["samples"], strict=True
            ):
                assert 0 < verb < command_s, "the program is loaded before it calls the verb"
            assert [span for span in mode["timeline"] if span[0] == "hydrate"]
    assert list(steps["fake-n580"]["waived"].values()) == ["fake"]
    packs = steps["fake-one-digest"]["packs"]
    assert len(packs) == 3
    assert len({tuple(one) for one in packs.values()}) == 1
    assert steps["fake-recovery"]["without_the_pack"]["sources"] == ["recovery"]
    assert steps["fake-recovery"]["with_it"]["sources"] == ["native"]
