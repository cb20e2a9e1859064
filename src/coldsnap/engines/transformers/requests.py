"""What clients may ask over HTTP, in OpenAI's words, checked field by field.

Fields that this engine has no use for are taken when they ask for nothing (`n: 1`, `presence_penalty: 0`) and
refused by name when they ask for something, so that no answer silently ignores a part of its question.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

__all__ = ["BadRequestError", "ChatRequest", "CompletionRequest", "parse_request"]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
_IGNORED = frozenset({"user", "metadata", "store", "service_tier"})


class BadRequestError(Exception):
    """A request that cannot be served, `param` naming the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


class _Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool = False

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and (len(value) > 16 or not all(value)):
            raise ValueError("at most 16 stop strings, none of them empty")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(_Base):
    """`POST /v1/completions`. A list of whole numbers is a prompt of token ids."""

    prompt: str | Annotated[list[int], Field(min_length=1)] | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Base):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


_Base.model_rebuild()

T = TypeVar("T", bound=_Base)


def parse_request(kind: type[T], body: Any) -> T:
    """The request in a decoded JSON body. Raises BadRequestError naming the fields that are wrong."""
    if not isinstance(body, dict):
        raise BadRequestError("the request body is not a JSON object")
    wanted = {}
    for name, value in body.items():
        if name in kind.model_fields:
            wanted[name] = value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise BadRequestError(f"{name}: {value!r} is not supported by this engine", param=name)
        elif name not in _IGNORED:
            raise BadRequestError(f"{name}: unknown field", param=name)
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        problems = error.errors()
        fields = list(dict.fromkeys(str(problem["loc"][0]) for problem in problems))
        text = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)
        raise BadRequestError(text, param=", ".join(fields)) from error
