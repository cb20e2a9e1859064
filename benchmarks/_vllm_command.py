"""``coldsnap`` as a person calls it: one process a command, and the JSON that it printed.

The outside client of a restore runs here, beside the command, on one monotonic clock. Two moments begin a restore:
``command``, when a shell would start the program, and ``verb``, when the program has been loaded and calls the verb,
which its receipt says. docs/benchmarks.md defines restores by the second; the first is reported beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.ops.outside import OutsideClient, StartupTimeline

FIRST_PROMPT = "Hello"
HOST = "127.0.0.1"
_LOG_LINES = 40
_END_S = 60.0


class CommandFailed(Exception):
    """A command ended with another exit code than 0. ``facts`` hold the engine's last lines, if it said them."""

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.facts = dict(facts)


@dataclass(kw_only=True)
class Budget:
    """The seconds that this call of the proof may take; what waits asks how many are left."""

    seconds: float
    _began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds left; never less than one, so that a wait is at least begun."""
        return max(1.0, self.seconds - (time.monotonic() - self._began))

    def allows(self, seconds: float, *, share: float = 1.0) -> bool:
        """Whether something of so many seconds ends within this share of all."""
        return time.monotonic() - self._began + seconds <= self.seconds * share


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """One restore by command: what was seen outside since both beginnings, its result and its receipt's spans."""

    command: StartupTimeline
    verb: StartupTimeline
    document: Mapping[str, Any]
    spans: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Coldsnap:
    """The program, below one state root."""

    program: Sequence[str]
    state: Path
    budget: Budget

    def call(self, *words: str | Path) -> dict[str, Any]:
        """Run a command to its end; what it printed. Raises CommandFailed."""
        return self._finish(self._start(words), words)

    def restore(self, artifact: Path, *words: str, name: str, port: int, scratch: Path) -> Restored:
        """Restore as service ``name`` and watch from outside. Raises CommandFailed, DeadlineExceeded, EngineError."""
        receipt = scratch / "receipt.json"
        receipt.unlink(missing_ok=True)
        line: Sequence[str | Path] = (
            "restore",
            artifact,
            "--name",
            name,
            "--port",
            str(port),
            "--receipt-json",
            receipt,
            *words,
        )
        client = OutsideClient(host=HOST, port=port)
        origin, origin_unix_ns = time.monotonic(), time.time_ns()
        process = self._start(line)
        try:
            seen = client.observe_startup(
                origin=origin,
                prompt=FIRST_PROMPT,
                deadline_s=self.budget.left(),
                alive=lambda: process.poll() in (None, 0),
            )
        except BaseException as error:
            if process.poll() is None:
                process.terminate()
            try:
                self._finish(process, line)
            except CommandFailed as failure:
                raise failure from error
            raise
        document = self._finish(process, line)
        timing = json.loads(receipt.read_text(encoding="utf-8"))["timing"]
        late = (timing["clocks"][0]["origin_unix_ns"] - origin_unix_ns) / 1e9
        verb = StartupTimeline(
            port_open_s=seen.port_open_s - late,
            http_ready_s=seen.http_ready_s - late,
            first_token_s=seen.first_token_s - late,
        )
        return Restored(command=seen, verb=verb, document=document, spans=timing["spans"])

    def _start(self, words: Sequence[str | Path]) -> subprocess.Popen[str]:
        command = [*self.program, *map(str, words), "--state-root", str(self.state), "--json"]
        if words[0] not in ("delete", "status", "stop"):
            command.append("--quiet")
        # An installed program has its modules compiled; so has this one after its first command, wherever it runs.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(self.state.with_name("pycache"))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _finish(self, process: subprocess.Popen[str], words: Sequence[str | Path]) -> dict[str, Any]:
        what = f"coldsnap {words[0]}"
        try:
            out, err = process.communicate(timeout=self.budget.left())
        except subprocess.TimeoutExpired:
            process.terminate()  # it undoes what it has begun
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            raise CommandFailed(f"{what} was stopped: the time was up", {"log": self._engine_log()}) from None
        except BaseException:
            process.terminate()
            process.communicate(timeout=_END_S)
            raise
        try:
            document: dict[str, Any] = json.loads(out)
        except ValueError:
            document = {"error": "no JSON", "message": (out + err)[-2000:]}
        if process.returncode != 0:
            facts = {
                **document.get("facts", {}),
                "problems": document.get("problems", ()),
                "cure": document.get("cure"),
            }
            if not facts.get("log"):
                facts["log"] = [*err.splitlines()[-_LOG_LINES:], *self._engine_log()]
            failure = CommandFailed(
                f"{what} ended with {process.returncode}: {document.get('error')}: {document.get('message')}", facts
            )
            for one in document.get("problems", ()):
                failure.add_note(json.dumps(one))
            raise failure
        return document

    def _engine_log(self) -> list[str]:
        """The last lines of the log that was written to last."""
        logs = sorted(self.state.glob("services/*/*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(errors="replace").splitlines()[-_LOG_LINES:] if logs else []


def stream(port: int, text: str, *, max_tokens: int, timeout_s: float, now: Callable[[], float]) -> dict[str, Any]:
    """One streamed completion as a client sees it: pieces, when each came (seconds), text and how it ended."""
    import http.client

    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    began, pieces, at, ended = now(), [], [], False
    try:
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[len(b"data: ") :])["choices"]
                if choices and choices[0].get("text"):
                    pieces.append(choices[0]["text"])
                    at.append(now() - began)
            ended = ended or line.startswith(b"data: [DONE]")
        return {
            "status": response.status,
            "num_pieces": len(pieces),
            "at_s": at,
            "text": "".join(pieces),
            "ended": ended,
        }
    finally:
        connection.close()
