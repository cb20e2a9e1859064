"""One completion: tokens, text and the reason it ended, in the order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coldsnap.engines.transformers.decoding import StopFilter, TextPieces, Tokenizer
from coldsnap.engines.transformers.generation import Generator, Sampling

__all__ = ["Completion", "FinishReason", "Piece"]


class FinishReason(StrEnum):
    """Why a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens that were generated since the piece before, and the text that became certain with them."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What is to be generated after a prompt."""

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()

    def run(self, generator: Generator, tokenizer: Tokenizer, cancelled: Callable[[], bool]) -> Iterator[Piece]:
        """Pieces, the last with its finish reason. Ends without one when it was cancelled."""
        text, stops = TextPieces(tokenizer, self.prompt_ids), StopFilter(self.stop)
        tokens = generator.tokens(
            self.prompt_ids, max_tokens=self.max_tokens, sampling=self.sampling, cancelled=cancelled
        )
        num_tokens = 0
        for token in tokens:
            num_tokens += 1
            passed = stops.add(text.add(token))
            ended = token in generator.end_ids
            if not (stops.stopped or ended or num_tokens == self.max_tokens):
                yield Piece(token_ids=(token,), text=passed)
                continue
            passed += stops.add(text.finish())
            reason = FinishReason.STOP if stops.stopped or ended else FinishReason.LENGTH
            yield Piece(token_ids=(token,), text=passed + stops.finish(), finish_reason=reason)
            return
