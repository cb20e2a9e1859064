"""What a demo is made of: cold starts of separate processes, and restores of one artifact, watched from outside."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coldsnap.core.messages import Answer, Prompt
from coldsnap.core.request import DriverId, OperationRequest
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import AcceptanceFailed, EngineError
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.coldstart import cold_engine
from coldsnap.ops.devices import device_environment
from coldsnap.ops.live import stop_service
from coldsnap.ops.outside import OutsideClient, StartupTimeline
from coldsnap.ops.planning import PlannedCapture
from coldsnap.ops.preparing import prepare
from coldsnap.ops.report import Silent
from coldsnap.ops.restore import restore
from coldsnap.ops.tools import Tools

__all__ = ["ACCEPTANCE", "QUESTION", "UNSEEN", "ColdStarts", "Restores", "Story", "cold_starts", "free_port", "new_id"]

QUESTION = "What is the capital of France?"
ACCEPTANCE = (
    Prompt(text="The opposite of cold is", max_tokens=2),
    Prompt(text="One, two, three,", max_tokens=2),
)
UNSEEN = (
    Prompt(text="The quick brown fox jumps over the", max_tokens=16),
    Prompt(text="Water boils at a temperature of", max_tokens=16),
    Prompt(text="def add(a, b):\n    return", max_tokens=16),
    Prompt(text="In the beginning there was", max_tokens=16),
)
NAME = "coldsnap-demo"
_HOST = "127.0.0.1"
_FIRST_PROMPT = "Hello"
_DEADLINE_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """What is told. ``driver`` None: the newest that works here. ``serve`` and ``environment``: of
    the engine.

    ``stage``: packs are in memory before each timed restore. ``by_command``: the answers come from a service that the
    command restored, as a user would; else from one that the verb did. Without a ``question`` nothing is chatted.
    """

    name: str = NAME
    driver: DriverId | None = None
    serve: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: bool = False
    unseen: tuple[Prompt, ...] = UNSEEN
    question: str | None = QUESTION
    num_cold_starts: int = 3
    num_restores: int = 3
    by_command: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStarts:
    """What separate cold processes answered and when; good for every driver of one model and engine."""

    expected: tuple[Answer, ...]
    answer: str
    timelines: tuple[StartupTimeline, ...]


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def cold_starts(tools: Tools, plugin: EnginePlugin, planned: PlannedCapture, port: int, story: Story) -> ColdStarts:
    """One start that warms caches and gives the expected answers, then the timed ones."""
    timelines = []
    given: tuple[tuple[Answer, ...], str] = ((), "")
    for index in range(story.num_cold_starts + 1):
        title = f"cold start {index} of {story.num_cold_starts}"
        with (
            tools.reporter.phase(title if index else "cold start to warm caches and get expected answers"),
            cold_engine(
                planned.request,
                plugin,
                planned.model,
                host=_HOST,
                port=port,
                first_prompt=_FIRST_PROMPT,
                deadline_s=_DEADLINE_S,
                devices=device_environment(tools, planned.request.launch.units[0]),
            ) as engine,
        ):
            if index == 0:
                given = _answers(engine.client, story)
            if index or not story.num_cold_starts:
                timelines.append(engine.timeline)
    return ColdStarts(expected=given[0], answer=given[1], timelines=tuple(timelines))


def _answers(client: OutsideClient, story: Story) -> tuple[tuple[Answer, ...], str]:
    """What a service answers to the prompts that no capture saw, and to the question."""
    given = client.complete(story.unseen, timeout_s=_DEADLINE_S)
    if story.question is None:
        return given, ""
    return given, client.chat(story.question, max_tokens=32, timeout_s=_DEADLINE_S)


class Restores:
    """The restores of one artifact as the service of one story, and what was seen of each that was timed."""

    def __init__(self, tools: Tools, artifact: Path, port: int, story: Story) -> None:
        self._tools, self._artifact, self._port, self._story = tools, artifact, port, story
        self._loaded = load_artifact(artifact)
        self._client = OutsideClient(host=_HOST, port=port)
        self.timelines: list[StartupTimeline] = []
        self.phases: list[dict[str, float]] = []
        self.transfers: list[dict[str, str]] = []

    def prepare(self, *, stage: bool | None = None) -> float:
        """Everything that may be done before a restore; the seconds it took. ``stage`` as the recipe says, or not."""
        return prepare(self._tools, self._loaded, self._request("prepare", stage)).seconds["total"]

    def answers(self, client: OutsideClient) -> tuple[tuple[Answer, ...], str]:
        """What the restored service answers."""
        return _answers(client, self._story)

    @contextmanager
    def by_command(self) -> Iterator[tuple[StartupTimeline, OutsideClient]]:
        """Run ``coldsnap restore`` as a user would, and watch from outside; the service is stopped on the way out."""
        command = [sys.executable, "-m", "coldsnap.cli", "restore", str(self._artifact), "--name", self._story.name]
        command += ["--port", str(self._port), "--state-root", str(self._tools.state.path), "--quiet"]
        origin = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            timeline = self._client.observe_startup(
                origin=origin, prompt=_FIRST_PROMPT, deadline_s=_DEADLINE_S, alive=lambda: process.poll() in (None, 0)
            )
            process.communicate(timeout=60)
            yield timeline, self._client
        except EngineError as error:
            process.kill()
            _, text = process.communicate()
            error.facts.setdefault("log", text.decode(errors="replace").splitlines()[-20:])
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=60)
            self._stop()

    def by_call(self, *, ask: bool, stage: bool | None = None) -> tuple[tuple[Answer, ...], str] | None:
        """Call the verb and watch from outside at the same time; ask, if wanted; the service is stopped at the end."""
        request = self._request("restore", stage)
        failed = threading.Event()
        quiet = replace(self._tools, reporter=Silent())
        with ThreadPoolExecutor(max_workers=1) as observer:
            origin = time.monotonic()
            seen = observer.submit(
                self._client.observe_startup,
                origin=origin,
                prompt=_FIRST_PROMPT,
                deadline_s=_DEADLINE_S,
                alive=lambda: not failed.is_set(),
            )
            try:
                result = restore(quiet, self._loaded, request, host=_HOST, port=self._port)
            except BaseException:
                failed.set()
                raise
        try:
            self.timelines.append(seen.result())
            self.phases.append(dict(result.seconds))
            self.transfers.append(
                {
                    f"{worker}.{file}": how
                    for worker, one in result.wake.items()
                    for file, how in one.transfer_path.items()
                }
            )
            return self.answers(self._client) if ask else None
        finally:
            self._stop()

    def negative_control(self) -> bool:
        """Whether a restore that leaves the memory zero is caught."""
        request = self._request("negative-control")
        try:
            restore(self._tools, self._loaded, request, host=_HOST, port=self._port, negative_control=True)
        except AcceptanceFailed:
            return True
        return False

    def _request(self, verb: str, stage: bool | None = None) -> OperationRequest:
        return activation_request(
            self._loaded, operation_id=new_id(verb), name=self._story.name, port=self._port, stage=stage
        )

    def _stop(self) -> None:
        if self._tools.services.load(self._story.name) is not None:
            stop_service(self._tools, self._story.name)


def new_id(verb: str) -> str:
    """An operation id of its own."""
    return f"demo-{verb}-{time.time_ns()}"
