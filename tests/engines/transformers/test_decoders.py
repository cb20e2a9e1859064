"""A fixed cache against the model's own: the same tokens, at fixed addresses, nothing of one request in another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig, MistralConfig

from coldsnap.engines.transformers.decoders import GrowingDecoder, StaticDecoder
from coldsnap.engines.transformers.device import CpuAccelerator, EagerSteps, Steps
from coldsnap.engines.transformers.generation import GREEDY, Generator
from coldsnap.engines.transformers.static_cache import layer_shapes
from coldsnap.errors import EngineError, UserError
from coldsnap.hydrate.host import HostMemory

pytestmark = pytest.mark.model

LENGTH = 40
PROMPTS = ([72, 101, 108, 108, 111], [7], list(range(2, 27)))
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class RecordedSteps(EagerSteps):
    """Replays what it was given once, as a captured graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_prepared = 0
        self.num_replayed = 0

    def prepare(self, work: Callable[[], None]) -> None:
        self.num_prepared += 1
        work()
        super().prepare(work)

    def replay(self) -> None:
        self.num_replayed += 1
        super().replay()


class Bench(CpuAccelerator):
    """The processor with memory that a test can look at, and steps that count."""

    def __init__(self, base: int) -> None:
        self.memory = HostMemory(base=base)
        self.taken = RecordedSteps()
        self.asked: list[bool] = []

    def cache_memory(self) -> HostMemory:
        return self.memory

    def steps(self, *, graph: bool) -> Steps:
        self.asked.append(graph)
        return self.taken


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench(0x5900_0000_0000)
    yield found
    found.memory.release()


def static(model: Any, bench: Bench, *, graph: bool = True) -> StaticDecoder:
    decoder = StaticDecoder(model, bench, length=LENGTH, vocabulary=model.config.vocab_size, graph=graph)
    decoder.warm_up()
    return decoder


def tokens(decoder: GrowingDecoder | StaticDecoder, prompt: list[int], count: int = 12) -> list[int]:
    generator = Generator(decoder, frozenset())
    return list(generator.tokens(prompt, max_tokens=count, sampling=GREEDY, cancelled=lambda: False))


def load(tiny: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny, **options).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_those_of_a_growing_cache(tiny: Path, bench: Bench, dtype: torch.dtype, attention: str) -> None:
    model = load(tiny, dtype=dtype, attn_implementation=attention)
    growing, fixed = GrowingDecoder(model), static(model, bench)
    fixed.check()
    for prompt in (*PROMPTS, *reversed(PROMPTS)):
        assert tokens(fixed, prompt) == tokens(growing, prompt)


def test_a_full_cache_is_used_to_its_last_place(tiny: Path, bench: Bench) -> None:
    model = load(tiny, dtype=torch.float32)
    prompt = list(range(2, 2 + LENGTH - 10))
    fixed = static(model, bench)
    # The last token needs no place: nothing comes after it.
    assert tokens(fixed, prompt, 11) == tokens(GrowingDecoder(model), prompt, 11)
    with pytest.raises(EngineError, match=f"cache of {LENGTH} tokens is full"):
        tokens(fixed, prompt, 12)
    with pytest.raises(EngineError, match=f"{LENGTH + 1} tokens do not fit"):
        fixed.begin(list(range(LENGTH + 1)))


def test_the_step_is_prepared_once_and_works_on_fixed_addresses(tiny: Path, bench: Bench) -> None:
    model = load(tiny)
    seen: list[tuple[int, ...]] = []
    forward = model.forward

    def spy(**arguments: Any) -> Any:
        if arguments["input_ids"].shape == (1, 1):
            seen.append((arguments["input_ids"].data_ptr(), arguments["position_ids"].data_ptr()))
        return forward(**arguments)

    fixed = static(model, bench)
    spy.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = spy
    for prompt in PROMPTS:
        tokens(fixed, prompt, 4)
    fixed.warm_up()
    assert bench.asked == [True]
    assert (bench.taken.num_prepared, bench.taken.num_replayed) == (1, 3 * len(PROMPTS))
    steps = [one for one in seen if seen.count(one) > 1]
    assert len(set(steps)) == 1
    assert len(steps) == 3 * len(PROMPTS)


def test_the_cache_lies_in_one_allocation_of_its_own(tiny: Path, bench: Bench) -> None:
    model = load(tiny, dtype=torch.bfloat16)
    fixed = static(model, bench)
    config = model.config
    needed = 2 * config.num_hidden_layers * config.num_key_value_heads * LENGTH * config.head_dim * 2
    (allocation,) = bench.memory.allocations
    assert allocation.tag == "kv"
    assert fixed.cache is not None
    assert needed <= allocation.size == fixed.cache.bytes < needed + 2 * config.num_hidden_layers * 4096
    fixed.begin(PROMPTS[0])
    assert any(bench.memory.view(allocation.ptr, allocation.size))


def test_sleep_forgets_and_gives_back_and_wake_answers_alike(tiny: Path, bench: Bench) -> None:
    fixed = static(load(tiny), bench)
    before = [tokens(fixed, prompt) for prompt in PROMPTS]
    (allocation,) = bench.memory.allocations
    interrupted = fixed.begin(PROMPTS[0])
    fixed.let_go()
    assert not bench.memory.mapped
    fixed.let_go()
    fixed.come_back()
    assert bench.memory.mapped
    assert not any(bench.memory.view(allocation.ptr, allocation.size))
    with pytest.raises(EngineError, match="continued after another"):
        interrupted.step(1)
    assert bench.memory.allocations == (allocation,)
    assert [tokens(fixed, prompt) for prompt in PROMPTS] == before
    assert bench.taken.num_prepared == 1


def test_one_request_ends_the_one_before(tiny: Path, bench: Bench) -> None:
    fixed = static(load(tiny), bench)
    first = fixed.begin(PROMPTS[0])
    fixed.begin(PROMPTS[1])
    with pytest.raises(EngineError, match="continued after another"):
        first.step(1)


def test_what_was_computed_before_is_cleared(tiny: Path, bench: Bench) -> None:
    """Infinite numbers behind the mask would come through as NaN."""
    model = load(tiny, dtype=torch.float32)
    fixed = static(model, bench)
    (allocation,) = bench.memory.allocations
    expected = tokens(fixed, PROMPTS[0])
    torch.frombuffer(bench.memory.view(allocation.ptr, allocation.size), dtype=torch.float32).fill_(float("inf"))
    assert tokens(fixed, PROMPTS[0]) == expected


def test_before_the_warm_up_nothing_is_reserved_and_nothing_answered(tiny: Path, bench: Bench) -> None:
    decoder = StaticDecoder(load(tiny), bench, length=LENGTH, vocabulary=320, graph=False)
    assert (decoder.cache, bench.memory.allocations, bench.asked) == (None, (), [False])
    with pytest.raises(EngineError, match="not warmed up"):
        decoder.begin([1])
    decoder.let_go()
    decoder.come_back()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            MistralConfig(**SMALL, intermediate_size=64, sliding_window=8),
            "layer 0 of this model",
        ),
        (BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=4), "takes positions and a cache"),
    ],
    ids=["window", "no positions"],
)
def test_a_model_that_cannot_have_one_is_refused(bench: Bench, config: Any, says: str) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UserError, match=says) as caught:
        static(model, bench)
    assert caught.value.cure is not None
    assert "kv_cache_tokens: 0" in caught.value.cure
    assert tokens(GrowingDecoder(model), PROMPTS[0])


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        LlamaConfig(**SMALL, intermediate_size=64),
    ],
    ids=["gpt2", "llama"],
)
def test_other_architectures_agree_with_themselves(bench: Bench, config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fixed = static(model, bench)
    fixed.check()
    for prompt in PROMPTS:
        assert tokens(fixed, prompt) == tokens(GrowingDecoder(model), prompt)


def test_a_model_that_computes_something_else_is_refused(tiny: Path, bench: Bench) -> None:
    """Such as one that makes its positions from a mask of its own."""
    model = load(tiny, dtype=torch.float32)
    fixed = static(model, bench)
    forward = model.forward

    def without_mask(**arguments: Any) -> Any:
        if arguments.get("attention_mask") is not None:
            arguments["attention_mask"] = torch.ones_like(arguments["attention_mask"])
        return forward(**arguments)

    without_mask.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = without_mask
    with pytest.raises(UserError, match="computes something else over a static cache") as caught:
        fixed.check()
    assert float(caught.value.facts["difference"]) > 0  # type: ignore[arg-type]


def test_a_cache_of_another_kind_has_no_shapes() -> None:
    with pytest.raises(UserError, match="keeps a list"):
        layer_shapes([])
