"""From tokens to text, a piece at a time, and where to stop.

The text of an answer is defined as the pieces this file yields, joined; streaming or not, over HTTP or over the
control socket, it is the same text. A token that is only half a character is held back until the rest arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["StopFilter", "TextPieces", "Tokenizer"]

_CONTEXT_TOKENS = 5
_HALF_CHARACTER = "\ufffd"


class Tokenizer(Protocol):
    """What is used of a Transformers tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TextPieces:
    """The text of tokens that follow a prompt. A few tokens of context decide spaces, as in the whole text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._start = 0
        self._read = len(self._ids)

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before; often one word, sometimes nothing."""
        self._ids.append(token_id)
        return self._piece(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._piece(final=True)

    def _piece(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(_HALF_CHARACTER) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class StopFilter:
    """Passes text on until a stop string appears, which it and everything after it swallow.

    Text that might be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""
        self._passed = 0
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that may be passed on now."""
        if self.stopped:
            return ""
        searched = max(0, len(self._text) - self._hold)
        self._text += piece
        found = [at for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self.stopped = True
            return self._pass(min(found))
        return self._pass(max(self._passed, len(self._text) - self._hold))

    def finish(self) -> str:
        """What was held back, when no stop string came."""
        return "" if self.stopped else self._pass(len(self._text))

    def _pass(self, end: int) -> str:
        piece = self._text[self._passed : end]
        self._passed = max(self._passed, end)
        return piece
