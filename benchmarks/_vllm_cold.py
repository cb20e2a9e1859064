"""Separate cold servers: what the answers must be, and what a start takes when nothing is left to compile.

vLLM's own server where there is one (``python -m vllm.entrypoints.cli.main serve``): a plain process with the options,
environment and cache folders of the captured one, in which coldsnap's plugin does nothing. Elsewhere the engine's own
command as a plain process (``coldsnap.ops.coldstart``). The first start compiles; those after it are timed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._vllm_command import FIRST_PROMPT, HOST, Budget
from benchmarks._vllm_subject import Subject
from benchmarks.harness import summary

from coldsnap.cli.planned import planned_capture
from coldsnap.core.messages import Answer, Prompt
from coldsnap.errors import ColdsnapError
from coldsnap.ops.coldstart import cold_engine
from coldsnap.ops.demo_parts import free_port
from coldsnap.ops.devices import device_environment
from coldsnap.ops.outside import OutsideClient, StartupTimeline
from coldsnap.ops.planning import PlannedCapture

__all__ = ["UNSEEN", "answers_of", "cold_starts", "plain_command"]

UNSEEN = tuple(
    Prompt(text=text, max_tokens=32)
    for text in (
        "The quick brown fox jumps over the",
        "Water boils at a temperature of",
        "def add(a, b):\n    return",
        "In the beginning there was",
        "1 2 3 5 8 13 21",
        "Dear Sir or Madam, I am writing to",
        "ünïcödé \N{SNOWMAN} and the rest of",
        "Once upon a time, in a village by the sea, there lived a woman who",
    )
)
"""Prompts that no capture asks."""
_OURS = {"--load-format": 1, "--model-loader-extra-config": 1}
_END_S = 30.0
_LOG_LINES = 40


def cold_starts(
    subject: Subject, model: Path, *, num_timed: int, share: float, budget: Budget, unseen: Sequence[Prompt] = UNSEEN
) -> dict[str, Any]:
    """Start the engine cold once to compile, then up to ``num_timed`` times; what every start answered, and when.

    No timed start is begun that would end after ``share`` of the budget, as long as the one before it took.
    """
    planned = planned_capture(
        subject.tools, subject.recipe("cold", model, subject.drivers[0]), subject.folder / "cold.json", None, port=None
    )
    seconds: list[StartupTimeline] = []
    given: list[tuple[Answer, ...]] = []
    for number in range(num_timed + 1):
        if seconds and not budget.allows(seconds[-1].first_token_s * 1.2, share=share):
            break
        with _server(subject, planned, number, budget) as (client, timeline):
            given.append(answers_of(client, unseen, budget))
        seconds.append(timeline)
        print(f"  cold start {number}: first token after {timeline.first_token_s:.2f} s", file=sys.stderr, flush=True)
    timed = seconds[1:]
    return {
        "server": "vllm serve" if subject.plain else "the engine's own command",
        "first_start": _document(seconds[0]),
        "first_token_s": summary([one.first_token_s for one in timed]) if timed else None,
        "http_ready_s": summary([one.http_ready_s for one in timed]) if timed else None,
        "samples": [_document(one) for one in timed],
        "prompts": [prompt.model_dump() for prompt in unseen],
        "expected": [list(answer.token_ids) for answer in given[0]],
        "texts": [answer.text for answer in given[0]],
        "all_starts_agree": all(one == given[0] for one in given),
    }


def answers_of(client: OutsideClient, unseen: Sequence[Prompt], budget: Budget) -> tuple[Answer, ...]:
    """One prompt at a time, so that every batch has the same shape."""
    return client.complete(unseen, timeout_s=budget.left())


def plain_command(command: Sequence[str], *, port: int) -> tuple[str, ...]:
    """The unit's command with vLLM's own server in the place of ours, and without what only ours has."""
    at = command.index("serve")
    words: list[str] = []
    rest = iter(command[at + 1 :])
    for word in rest:
        name = word.partition("=")[0]
        if name in _OURS or name in ("--host", "--port"):
            if "=" not in word:
                next(rest, None)
            continue
        words.append(word)
    return (command[0], "-m", "vllm.entrypoints.cli.main", "serve", *words, "--host", HOST, "--port", str(port))


@contextmanager
def _server(
    subject: Subject, planned: PlannedCapture, number: int, budget: Budget
) -> Iterator[tuple[OutsideClient, StartupTimeline]]:
    unit, port = planned.request.launch.units[0], free_port()
    devices = device_environment(subject.tools, unit)
    if not subject.plain:
        with cold_engine(
            planned.request,
            subject.plugin,
            planned.model,
            host=HOST,
            port=port,
            first_prompt=FIRST_PROMPT,
            deadline_s=budget.left(),
            devices=devices,
        ) as engine:
            yield engine.client, engine.timeline
        return
    home = subject.folder / "home"
    home.mkdir(exist_ok=True)
    environment = {**unit.environment, **devices, "HOME": str(home)}
    log = subject.folder / f"cold-{number}.log"
    with _process(plain_command(unit.command, port=port), environment, log) as process:
        client = OutsideClient(host=HOST, port=port)
        yield (
            client,
            client.observe_startup(
                origin=process.began,
                prompt=FIRST_PROMPT,
                deadline_s=budget.left(),
                alive=lambda: process.popen.poll() is None,
            ),
        )


class _Process:
    """A plain process and when it was started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self.began = time.monotonic()
            self.popen = subprocess.Popen(
                command,
                env=dict(environment),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """SIGTERM, then SIGKILL, to all of its session."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.popen.pid, number)
                self.popen.wait(_END_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.popen.wait(_END_S)
        ends = time.monotonic() + _END_S
        while time.monotonic() < ends:  # the engine's processes may hold the GPU a moment longer
            try:
                os.killpg(self.popen.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[_Process]:
    process = _Process(command, environment, log)
    try:
        yield process
    except ColdsnapError as error:
        error.facts.setdefault("log", log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise
    finally:
        process.end()


def _document(one: StartupTimeline) -> dict[str, float]:
    return {"port_open_s": one.port_open_s, "http_ready_s": one.http_ready_s, "first_token_s": one.first_token_s}
