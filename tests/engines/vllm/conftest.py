"""A service like the front's without vLLM, for tests of the front and of the half that asks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from coldsnap.core.messages import Answer, ErrorFrame, Prompt
from coldsnap.engines.frames import error_frame
from coldsnap.engines.vllm.link import FrontState, Phase
from coldsnap.engines.vllm.quiet import QuietWorkers
from coldsnap.engines.vllm.symbols import SYMBOLS, Symbol
from coldsnap.errors import ColdsnapError, EngineError
from coldsnap.testing.engine import FakeEngine

MakeService = Callable[..., "FakeService"]


class FakeService:
    """Implements `coldsnap.engines.vllm.link.Service` around a fake engine, and writes down what was done to it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.done: list[str] = []
        self.phase: Phase = "up"
        self.error: ErrorFrame | None = None
        self.on_failure: Callable[[ColdsnapError], None] = lambda error: None
        self.workers = QuietWorkers(lambda: self.done.append("sleep"), lambda: self.done.append("resume"))

    def fail(self, error: ColdsnapError) -> None:
        if self.error is None:
            self.phase, self.error = "failed", error_frame(error)
            self.on_failure(error)

    def state(self) -> FrontState:
        phase: Phase = "quiet" if self.phase == "up" and self.workers.names else self.phase
        serving = self.engine.is_serving
        return FrontState(phase=phase, in_flight=self.engine.num_in_flight, serving=serving, error=self.error)

    def answer(self, prompt: Prompt) -> Answer:
        if self.state().phase != "up":
            raise EngineError(f"the engine is {self.state().phase}")
        return FakeEngine.answer(self.engine, prompt)

    def open(self, host: str, port: int) -> None:
        FakeEngine.start_serving(self.engine, host, port)
        self.done.append("open")

    def close(self, *, drain_s: float) -> int:
        self.done.append("close")
        return FakeEngine.stop_serving(self.engine, drain_s=drain_s)

    def quiet(self, worker: str) -> None:
        self.workers.quiet(worker)

    def resume(self, worker: str) -> None:
        self.workers.resume(worker)


@pytest.fixture
def make_service(make_fake: Callable[..., FakeEngine]) -> MakeService:
    """`make_service(engine=None)`: around this engine, or around a new one that is not loaded."""
    return lambda engine=None: FakeService(engine if engine is not None else make_fake())


def _write_tree(folder: Path, sources: dict[str, str]) -> Path:
    for name, text in {"vllm": "", **sources}.items():
        path = folder.joinpath(*name.split("."))
        inner = any(other.startswith(f"{name}.") for other in sources) or name == "vllm"
        path = path / "__init__.py" if inner else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _every_symbol(*, without: Symbol | None = None, place: int = 0) -> dict[str, str]:
    """Sources that hold each symbol but `without`, in its first or its last place."""
    plain: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for symbol in SYMBOLS:
        where = symbol.places[place]
        owner, _, member = symbol.name.partition(".")
        accepted = ", ".join(symbol.parameters)
        if member:
            body = classes[where][owner]
            if symbol is not without:
                body.append(f"    async def {member}(self, {accepted}): pass" if accepted else f"    {member} = 0")
        elif symbol is not without:
            plain[where].append(f"def {owner}({accepted}): pass")
    names = plain.keys() | classes.keys()
    return {
        where: "\n".join(
            [*plain[where], *(f"class {owner}:\n    '''.'''\n" + "\n".join(b) for owner, b in classes[where].items())]
        )
        for where in names
    }


@pytest.fixture
def write_tree() -> Callable[[Path, dict[str, str]], Path]:
    """`write_tree(folder, {module: source})`: a package `vllm` of these modules; the folder."""
    return _write_tree


@pytest.fixture
def every_symbol() -> Callable[..., dict[str, str]]:
    """`every_symbol(without=None, place=0)`: sources that have each name that we rely on, for `write_tree`."""
    return _every_symbol


@pytest.fixture
def make_vllm(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`make_vllm(version, distribution="vllm", **sources)`: variables of a Python with the sources of such a vLLM."""

    numbers = count()

    def make(
        version: str = "0.32.0", *, distribution: str = "vllm", without: Symbol | None = None, **sources: str
    ) -> dict[str, str]:
        folder = tmp_path / f"site-{next(numbers)}"
        _write_tree(
            folder, {**_every_symbol(without=without), **{f"vllm.{name}": text for name, text in sources.items()}}
        )
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        return {"PYTHONPATH": str(folder)}

    return make
