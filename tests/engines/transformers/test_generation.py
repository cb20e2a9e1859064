"""Tokens against Transformers' own generation, and text and tokens that belong together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coldsnap.engines.transformers.completion import Completion, FinishReason, Piece
from coldsnap.engines.transformers.decoders import GrowingDecoder
from coldsnap.engines.transformers.generation import GREEDY, Generator, Sampling

pytestmark = pytest.mark.model

IDS = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(tiny).eval()
    torch.set_num_threads(before)


def run(model: Any, *, max_tokens: int = 12, sampling: Sampling = GREEDY, end: int | None = None) -> list[int]:
    generator = Generator(GrowingDecoder(model), frozenset([] if end is None else [end]))
    return list(generator.tokens(IDS, max_tokens=max_tokens, sampling=sampling, cancelled=lambda: False))


def test_greedy_tokens_are_those_of_transformers(model: Any) -> None:
    ids = torch.tensor([IDS])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert run(model) == theirs[0, len(IDS) :].tolist()


def test_the_cache_changes_nothing(model: Any) -> None:
    ids = list(IDS)
    for _ in range(12):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().argmax()))
    assert run(model) == ids[len(IDS) :]


def test_an_end_token_is_the_last(model: Any) -> None:
    tokens = run(model)
    end = tokens[5]
    assert run(model, end=end) == tokens[: tokens.index(end) + 1]


def test_cancelling_ends_it(model: Any) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    tokens = Generator(GrowingDecoder(model), frozenset()).tokens(
        IDS, max_tokens=12, sampling=GREEDY, cancelled=cancelled
    )
    assert list(tokens) == run(model)[:3]


def test_a_seed_repeats_and_another_differs(model: Any) -> None:
    hot = {seed: run(model, sampling=Sampling(temperature=2.0, seed=seed)) for seed in (1, 2)}
    assert run(model, sampling=Sampling(temperature=2.0, seed=1)) == hot[1]
    assert hot[1] != hot[2]
    assert run(model, sampling=Sampling(temperature=2.0)) != run(model, sampling=Sampling(temperature=2.0))


def test_the_smallest_nucleus_is_greedy(model: Any) -> None:
    assert run(model, sampling=Sampling(temperature=1.0, top_p=1e-9, seed=3)) == run(model)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-8])
def test_hardly_any_temperature_is_none(model: Any, temperature: float) -> None:
    assert run(model, sampling=Sampling(temperature=temperature, seed=3)) == run(model)


def test_pieces_hold_every_token_and_the_text_of_all(model: Any, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    completion = Completion(prompt_ids=IDS, max_tokens=12, sampling=GREEDY)
    pieces = list(completion.run(Generator(GrowingDecoder(model), frozenset()), tokenizer, lambda: False))
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == run(model)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + [FinishReason.LENGTH]


def test_a_stop_string_ends_it_without_being_shown(model: Any, tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)

    def pieces(*stop: str) -> list[Piece]:
        completion = Completion(prompt_ids=IDS, max_tokens=12, sampling=GREEDY, stop=stop)
        return list(completion.run(Generator(GrowingDecoder(model), frozenset()), tokenizer, lambda: False))

    whole = "".join(piece.text for piece in pieces())
    stop = whole[3:5]
    stopped = pieces(stop)
    assert "".join(piece.text for piece in stopped) == whole[: whole.index(stop)]
    assert stopped[-1].finish_reason is FinishReason.STOP
    assert len(stopped) < 12
