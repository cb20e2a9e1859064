"""What a mangled answer does to the client that gets it: an answer, or an error of coldsnap's own."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.core.messages import Answer, Answers, Verb
from coldsnap.engines.control import ControlClient
from coldsnap.errors import ColdsnapError, DeadlineExceeded, EngineError
from coldsnap.testing.faults import rogue
from coldsnap.testing.faults.rogue import MUTATIONS

ANSWER = Answers(answers=(Answer(token_ids=(1, 2, 3), text="x"),))
RIGHT = {"late", "dribbled"}


def worker(path: Path, mutate: Callable[[list[bytes]], list[bytes]]) -> threading.Thread:
    """Serves one request: a frame of progress, and the answer, mangled."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        with listener, listener.accept()[0] as connection, connection.makefile("rb") as lines:
            number = json.loads(lines.readline())["id"]
            progress = {"id": number, "progress": {"phase": "p", "done_bytes": 0, "total_bytes": 1}}
            frames = [progress, {"id": number, "result": ANSWER.model_dump(mode="json")}]
            try:
                for piece in mutate([json.dumps(frame).encode() + b"\n" for frame in frames]):
                    connection.sendall(piece)
            except OSError:
                return  # the client has heard enough

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_mangled_answer_is_right_or_refused(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rogue, "_NEVER_S", 60.0)
    path = tmp_path / "w.sock"
    chance = random.Random(seed)
    thread = worker(path, lambda frames: MUTATIONS[name](frames, chance))
    client = ControlClient(path)

    def ask() -> Answers:
        deadline_s = 0.2 if name == "never" else 60.0
        return client.call(Verb.ANSWER, None, reply=Answers, deadline_s=deadline_s)

    if name in RIGHT:
        assert ask() == ANSWER
    elif name == "garbled":
        try:
            found = ask()
        except ColdsnapError:
            found = None
        assert found is None or isinstance(found, Answers)
    elif name == "never":
        with pytest.raises(DeadlineExceeded):
            ask()
    elif name == "strange-error":
        with pytest.raises(ColdsnapError):
            ask()
    else:
        with pytest.raises(EngineError):
            ask()
    if name != "never":
        thread.join(60)


def test_every_mutation_is_repeatable() -> None:
    frames = [b'{"id":1,"progress":{}}\n', b'{"id":1,"result":{"answers":[]}}\n']
    for name, mutation in MUTATIONS.items():
        if name not in ("never", "late"):
            once, twice = (mutation(list(frames), random.Random(7)) for _ in range(2))
            assert once == twice
