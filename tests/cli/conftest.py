"""``coldsnap`` in this process: the real command line with tools made of the shipped fakes."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.cli import commands, main, wiring
from coldsnap.ops.tools import Tools
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk, desk
from coldsnap.testing.engine_harness import free_port

commands.register(main.app)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How one command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> Any:
        """The one JSON document on standard output; anything beside it is an error."""
        return json.loads(self.out)


Coldsnap = Callable[..., Ran]


@pytest.fixture
def coldsnap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Coldsnap]:
    """Run a command line and return how it ended."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(commands, "register", lambda app: None)  # once is enough for this process

    def run(*words: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["coldsnap", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Ran(code=code if isinstance(code, int) else 1, out=out, err=err)

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nobody changes."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """What ``make_tools`` gives to every command from now on; ``--state-root`` is not looked at."""
    with desk(tmp_path / "state") as one:

        def make(state_root: Path, *, reporter: Any = None, **others: Any) -> Tools:
            return replace(one.tools, reporter=reporter or one.tools.reporter)

        monkeypatch.setattr(wiring, "make_tools", make)
        monkeypatch.setattr(wiring, "installed_engines", lambda: one.tools.engines)
        yield one


@pytest.fixture
def recipe(kit: Desk, model: Path, tmp_path: Path) -> Path:
    """A recipe for the fake engine."""
    path = tmp_path / "svc.yaml"
    path.write_text(f"engine: fake\nmodel: {model}\nserve: {{port: {free_port()}}}\n")
    return path


@pytest.fixture
def artifact(coldsnap: Coldsnap, recipe: Path, tmp_path: Path) -> Path:
    """Captured by the command itself."""
    path = tmp_path / "svc.json"
    ran = coldsnap("capture", recipe, "-o", path, "--quiet")
    assert ran.code == 0, ran.err
    return path
