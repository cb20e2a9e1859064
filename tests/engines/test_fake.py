"""The fake engine passes the contract, and is as sensitive as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.core.messages import Prompt
from coldsnap.engines.observer import Observer
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.engine_harness import driven
from coldsnap.testing.engine_suite import EngineContract
from coldsnap.testing.memory import FakeMemory


class TestFakeEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _factory(self, make_fake: Callable[..., FakeEngine]) -> None:
        self.fresh = make_fake

    def make(self, variant: int) -> FakeEngine:
        return self.fresh(shuffle=variant or None)

    def make_damaged(self, folder: Path) -> FakeEngine:
        engine = self.fresh()
        (engine.model_path / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100)
        return engine


def test_one_wrong_byte_anywhere_gives_a_wrong_token(make_fake: Callable[..., FakeEngine]) -> None:
    engine, memory, observer = make_fake(), FakeMemory(), Observer()
    engine.load(memory, observer)
    prompt = Prompt(text="hello", max_tokens=1)
    expected = engine.answer(prompt)
    labels = observer.observation(memory.allocations)
    table = [(one.ptr, one.size) for one in labels.labels if one.reason.startswith("computed")]
    places = [(one.range.ptr, one.range.size) for one in labels.extents] + table
    assert len(places) == 5
    for ptr, size in places:
        for where in (ptr, ptr + size // 2, ptr + size - 1):
            view = memory.view(where, 1)
            view[0] ^= 0x40
            assert engine.answer(prompt) != expected
            view[0] ^= 0x40
    assert engine.answer(prompt) == expected


def test_it_can_be_driven_from_memory_of_its_own_choice(make_fake: Callable[..., FakeEngine], tmp_path: Path) -> None:
    with driven(make_fake(arena_base=0x5300_0000_0000), tmp_path / "w", base=0x5100_0000_0000) as live:
        assert live.memory.allocations[0].ptr == 0x5300_0000_0000
