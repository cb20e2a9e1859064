"""The front as a process, in a Python without vLLM, where it can only say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldsnap.core.messages import Prompt, WorkerSettings, WorkerState
from coldsnap.engines.control import ControlClient
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontClient
from coldsnap.engines.vllm.records import read_all_settings
from coldsnap.errors import InvalidDocument, MissingCapability, UsageError

LONG_S = 120.0
Start = Callable[..., "subprocess.Popen[str]"]


def settings(folder: Path, slot: int, **more: object) -> Path:
    """The record of the worker in `slot`, written where the unit driver writes it."""
    record = {"worker": f"w{slot}", "unit": "u0", "rank": slot, "socket": str(folder / f"w{slot}.sock"), **more}
    path = folder / ("settings.json" if slot == 0 else f"settings-{slot}.json")
    path.write_text(WorkerSettings.model_validate(record).model_dump_json())
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*command, **environment)`: with the settings of two workers."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, **more: str) -> subprocess.Popen[str]:
        variables = {"PATH": os.environ["PATH"], SETTINGS_VARIABLE: str(settings(tmp_path, 0)), **more}
        settings(tmp_path, 1)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "coldsnap.engines.vllm", *command],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_there_is_a_record_for_each_worker_of_the_unit(tmp_path: Path) -> None:
    first = settings(tmp_path, 0)
    for slot in (1, 2, 4):
        settings(tmp_path, slot)
    found = read_all_settings({SETTINGS_VARIABLE: str(first)})
    assert [(one.worker, one.rank) for one in found] == [("w0", 0), ("w1", 1), ("w2", 2)]


def test_a_damaged_record_of_any_worker_is_named(tmp_path: Path) -> None:
    first = settings(tmp_path, 0)
    settings(tmp_path, 1).write_text("{}")
    with pytest.raises(InvalidDocument) as caught:
        read_all_settings({SETTINGS_VARIABLE: str(first)})
    assert caught.value.problems[0].value == str(tmp_path / "settings-1.json")


def test_a_front_that_cannot_serve_stays_and_tells_every_worker_why(start: Start, tmp_path: Path) -> None:
    process = start("serve", "MODEL")
    front = FrontClient(tmp_path / FRONT_SOCKET)
    deadline = time.monotonic() + LONG_S
    while not front.path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(MissingCapability, match="not installed"):
        front.wait_up(deadline_s=LONG_S)
    for name in ("w0", "w1"):
        client = ControlClient(tmp_path / f"{name}.sock")
        with pytest.raises(MissingCapability, match="not installed"):
            client.wait_loaded(deadline_s=LONG_S)
        status = client.status()
        assert (status.worker, status.state, status.pid) == (name, WorkerState.FAILED, process.pid)
    asks: tuple[Callable[[], object], ...] = (
        lambda: front.answer(Prompt(text="x", max_tokens=1)),
        lambda: front.open("127.0.0.1", 1),
        lambda: front.quiet("w0"),
    )
    for ask in asks:
        with pytest.raises(MissingCapability, match="not installed"):
            ask()
    assert front.close(drain_s=0.0) == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 0
    assert list(tmp_path.glob("*.sock")) == []


@pytest.mark.parametrize(
    ("command", "environment", "words"),
    [
        (("serve", "MODEL"), {"VLLM_SERVER_DEV_MODE": "1"}, "VLLM_SERVER_DEV_MODE"),
        (("bench",), {}, "serve MODEL"),
        (("serve", "MODEL"), {SETTINGS_VARIABLE: "/nowhere/settings.json"}, "/nowhere/settings.json"),
    ],
)
def test_what_is_wrong_before_anything_begins_ends_it_with_2(
    start: Start, command: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    process = start(*command, **environment)
    said, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 2
    assert words in said


def test_settings_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=SETTINGS_VARIABLE):
        read_all_settings({})
