"""Answers in the shapes of the OpenAI API, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from coldsnap.engines.transformers.completion import FinishReason, Piece

__all__ = ["ChatReply", "CompletionReply", "Reply"]


class Reply(Protocol):
    """One request's answer. `chunks` counts tokens as it goes, for `usage_chunk`."""

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer in one document."""
        ...

    def opening(self) -> Iterator[dict[str, Any]]:
        """What a stream begins with."""
        ...

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """A piece as documents of a stream."""
        ...

    def usage_chunk(self) -> dict[str, Any]:
        """The last document of a stream that was asked for its usage."""
        ...


class _Common:
    _prefix = ""
    _object = ""
    _chunk_object = ""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt_tokens: int,
        with_token_ids: bool,
    ) -> None:
        self._head: dict[str, Any] = {"id": f"{self._prefix}-{request_id}", "created": created, "model": model}
        self._prompt_tokens = prompt_tokens
        self._with_token_ids = with_token_ids
        self._completion_tokens = 0

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        token_ids = [token for piece in pieces for token in piece.token_ids]
        self._completion_tokens = len(token_ids)
        text = "".join(piece.text for piece in pieces)
        reason = pieces[-1].finish_reason if pieces else FinishReason.LENGTH
        choice = self._choice(self._content(text), reason, token_ids)
        return {**self._head, "object": self._object, "choices": [choice], "usage": self._usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._completion_tokens += len(piece.token_ids)
        if piece.text or piece.finish_reason is not None or self._with_token_ids:
            choice = self._choice(self._delta(piece.text), piece.finish_reason, list(piece.token_ids))
            yield {**self._head, "object": self._chunk_object, "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self._chunk_object, "choices": [], "usage": self._usage()}

    def _choice(self, content: dict[str, Any], reason: FinishReason | None, token_ids: list[int]) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {**choice, "token_ids": token_ids} if self._with_token_ids else choice

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


class CompletionReply(_Common):
    """`text_completion` documents."""

    _prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"


class ChatReply(_Common):
    """`chat.completion` documents."""

    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        """The role, before any text."""
        choice = self._choice({"delta": {"role": "assistant", "content": ""}}, None, [])
        yield {**self._head, "object": self._chunk_object, "choices": [choice]}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}
