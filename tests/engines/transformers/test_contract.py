"""The Transformers engine passes the contract that the fake passes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.messages import Prompt, WorkerState
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.transformers.decoders import StaticDecoder
from coldsnap.engines.transformers.device import CpuAccelerator
from coldsnap.engines.transformers.engine import TransformersEngine
from coldsnap.engines.transformers.options import TransformersOptions, parse_options
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.errors import HostError
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import StableMemory
from coldsnap.testing.engine_harness import Driven
from coldsnap.testing.engine_suite import EngineContract

pytestmark = pytest.mark.model

PROMPTS = (Prompt(text="The capital of France is", max_tokens=6),)

_VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"load_order": "shuffled:7", "arena_base": "0x530000000000"},
)


def make_engine(folder: Path, options: dict[str, object]) -> TransformersEngine:
    model = PLUGIN.resolve_model(str(folder))
    source = model_source_from(PLUGIN.settings_options(model, {}))
    return TransformersEngine(model.path, source, parse_options({"num_threads": 1, **options}))


class TestTransformersEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _checkpoint(self, tiny: Path) -> None:
        self.checkpoint = tiny

    def make(self, variant: int) -> TransformersEngine:
        return make_engine(self.checkpoint, _VARIANTS[variant])

    def make_damaged(self, folder: Path) -> TransformersEngine:
        shutil.copytree(self.checkpoint, folder)
        engine = make_engine(folder, {})
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
        return engine


class TestWithFixedCache(TestTransformersEngine):
    """As on a GPU, without one: keys and values in stable memory, the step prepared once."""

    @pytest.fixture(autouse=True)
    def _fixed_cache(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        memories: list[HostMemory] = []

        def cache_memory(accelerator: CpuAccelerator) -> HostMemory:
            memories.append(HostMemory(base=0x5800_0000_0000 + (len(memories) << 36)))  # several engines a process
            return memories[-1]

        monkeypatch.setattr(CpuAccelerator, "cache_memory", cache_memory)
        monkeypatch.setattr(TransformersOptions, "static_cache", True)
        yield
        for memory in memories:
            memory.release()

    def test_no_key_and_no_value_is_mapped_in_sleep(self, live: Driven) -> None:
        (cache,) = self.caches(live)
        assert cache.mapped
        exported = live.export()
        live.sleep()
        assert not cache.mapped
        live.wake(exported)
        assert cache.mapped

    def test_a_failed_wake_leaves_no_cache_behind(self, live: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
        (cache,) = self.caches(live)
        exported, answers = live.export(), live.answers(PROMPTS)
        live.sleep()

        def fail(decoder: StaticDecoder) -> None:
            raise HostError("no kernel could be loaded")

        with monkeypatch.context() as broken:
            broken.setattr(StaticDecoder, "warm_up", fail)
            with pytest.raises(HostError, match="no kernel"):
                live.wake(exported)
        assert not cache.mapped
        assert live.client.status().state is WorkerState.ASLEEP
        live.wake(exported)
        assert live.answers(PROMPTS) == answers

    @staticmethod
    def caches(live: Driven) -> list[StableMemory]:
        engine = live.engine
        assert isinstance(engine, TransformersEngine)
        decoder = engine._loaded()._decoder
        assert isinstance(decoder, StaticDecoder)
        assert decoder.cache is not None
        return [decoder.cache._memory]
