"""The fake engine as a real process: started from its settings, asked over its socket, ended by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.core.messages import AnswerBody, Answers, Prompt, SleepReport, Verb, WorkerSettings, WorkerState
from coldsnap.engines.control import ControlClient
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN, FakeEngine
from coldsnap.testing.engine_harness import driven, free_port, post

PROMPTS = (Prompt(text="hello", max_tokens=3),)
StartFake = Callable[..., "subprocess.Popen[str]"]


def test_it_serves_sleeps_and_ends_on_sigterm(
    tmp_path: Path, start_fake: StartFake, make_fake: Callable[..., FakeEngine]
) -> None:
    port = free_port()
    with start_fake(port=port) as process:
        client = ControlClient(tmp_path / "w.sock")
        try:
            found = client.wait_loaded(deadline_s=60, alive=lambda: process.poll() is None)
            assert (found.state, found.pid, found.port) == (WorkerState.SERVING, process.pid, port)
            answers = client.call(Verb.ANSWER, AnswerBody(prompts=PROMPTS), reply=Answers, deadline_s=60).answers
            code, reply = post(port, "/v1/completions", {"prompt": "hello", "max_tokens": 3})
            assert (code, tuple(reply["choices"][0]["token_ids"])) == (200, answers[0].token_ids)
            client.call(Verb.SLEEP, reply=SleepReport, deadline_s=60)
            links = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert sum(link.startswith("socket:") for link in links) == 1  # the control listener alone
        finally:
            process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "loaded in" in log
    with driven(make_fake(), tmp_path / "here", base=0x5100_0000_0000) as live:
        assert live.answers(PROMPTS) == answers


def test_wrong_settings_end_it_with_the_reason(start_fake: StartFake) -> None:
    with start_fake(options={"model_id": "m"}) as process:
        log, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "not a pinned model" in log


STUBBORN = """
import sys, threading, time
from pathlib import Path
from coldsnap.engines import process
from coldsnap.engines.settings import model_source_from, read_settings
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN, FakeEngine

class Stubborn(FakeEngine):
    def load(self, memory, observer):
        super().load(memory, observer)
        threading.Thread(target=time.sleep, args=(600,)).start()  # an interpreter would wait for it

    def stop_serving(self, *, drain_s=30.0):
        {stop}
        return super().stop_serving(drain_s=drain_s)

process.EXIT_S = {exit_s}
build = lambda settings: Stubborn(Path({folder!r}), model_source_from(settings.options))
process.leave(process.run_engine(read_settings({{"COLDSNAP_SETTINGS": {settings!r}}}), build))
"""


@pytest.mark.parametrize(("stop", "exit_s", "status"), [("pass", 60.0, 0), ("time.sleep(600)", 6.0, 1)])
def test_its_end_is_bounded(tmp_path: Path, stop: str, exit_s: float, status: int) -> None:
    """Threads that go on do not matter; an end that takes too long is told with every stack."""
    model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "checkpoint")))
    settings = WorkerSettings(
        worker="w0",
        unit="u0",
        rank=0,
        socket=str(tmp_path / "w.sock"),
        port=free_port(),
        options=PLUGIN.settings_options(model, {}),
    )
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    script = STUBBORN.format(stop=stop, exit_s=exit_s, folder=str(model.path), settings=str(tmp_path / "settings.json"))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        ControlClient(tmp_path / "w.sock").wait_loaded(deadline_s=60, alive=lambda: process.poll() is None)
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=60)
    assert process.returncode == status
    assert ("stop_serving" in log) == (status == 1)
