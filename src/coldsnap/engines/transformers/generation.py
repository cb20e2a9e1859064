"""One token after another: the loop over a decoder, and how a token is chosen.

Every request starts from nothing, so an answer depends on the model and the request alone. One request computes at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from coldsnap.engines.transformers.decoders import Decoder, Decoding

__all__ = ["GREEDY", "Generator", "Sampling"]

_COLDEST = 1e-5
"""Logits divided by less may leave the range of their type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is chosen. Temperature 0 to 1e-5 takes the likeliest; otherwise `seed` None draws a fresh one."""

    temperature: float
    top_p: float = 1.0
    seed: int | None = None


GREEDY = Sampling(temperature=0.0)


class Generator:
    """Generates with one decoder. Call it from one thread only: each thread would bring its own compute threads."""

    def __init__(self, decoder: Decoder, end_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._end_ids = end_ids

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens after which an answer is complete."""
        return self._end_ids

    def tokens(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, cancelled: Callable[[], bool]
    ) -> Iterator[int]:
        """At most `max_tokens` tokens, the last one an end token if the model came to its end.

        Ends early, without an error, when `cancelled` says so.
        """
        choose = _chooser(sampling)
        decoding: Decoding | None = None
        token = 0
        for _ in range(max_tokens):
            if cancelled():
                return
            if decoding is None:
                decoding = self._decoder.begin(prompt_ids)
            else:
                decoding.step(token)
            with torch.inference_mode():
                token = choose(decoding.logits)
            yield token
            if token in self._end_ids:
                return


def _chooser(sampling: Sampling) -> Callable[[torch.Tensor], int]:
    if sampling.temperature <= _COLDEST:
        return lambda logits: int(torch.argmax(logits))
    source = torch.Generator()
    if sampling.seed is None:
        source.seed()
    else:
        source.manual_seed(sampling.seed)

    def draw(logits: torch.Tensor) -> int:
        probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
        if sampling.top_p < 1:
            ordered, places = torch.sort(probabilities, descending=True)
            before = torch.cumsum(ordered, dim=-1) - ordered
            ordered[before >= sampling.top_p] = 0
            return int(places[torch.multinomial(ordered, 1, generator=source)])
        return int(torch.multinomial(probabilities, 1, generator=source))

    return draw
