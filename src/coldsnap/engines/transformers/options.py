"""The engine's options: one record, and its two spellings (a recipe's `serve` block, the command line).

Every default is here and nowhere else. The command line always names every option, so that a later default
cannot change what an old command means.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coldsnap.errors import InvalidDocument, Problem, UsageError

__all__ = [
    "CommandLine",
    "Device",
    "Dtype",
    "TransformersOptions",
    "command_arguments",
    "parse_command",
    "parse_options",
]

_LOAD_ORDER = re.compile(r"forward|reverse|shuffled:[0-9]{1,9}")
_ADDRESS = re.compile(r"0x[0-9a-f]{1,12}")


class Dtype(StrEnum):
    """What the parameters are computed in; `auto` is what the checkpoint says."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Device(StrEnum):
    """What computes; `cuda` is the first GPU this process sees."""

    CPU = "cpu"
    CUDA = "cuda"


class TransformersOptions(BaseModel):
    """What a recipe's `serve` block may say, beside `host` and `port`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: Annotated[Dtype, Field(strict=False)] = Field(default=Dtype.AUTO, description="number type of the weights")
    device: Annotated[Device, Field(strict=False)] = Field(default=Device.CPU, description="what computes: cpu or cuda")
    num_threads: int = Field(default=0, ge=0, le=1024, description="compute threads; 0: one a core")
    max_model_len: int | None = Field(default=None, ge=1, description="tokens of prompt and answer together")
    kv_cache_tokens: int = Field(
        default=4096, ge=0, le=1 << 20, description="cuda: places for keys and values, fixed; 0: grow with each request"
    )
    cuda_graph: bool = Field(default=True, description="cuda: capture the step from token to token; needs fixed places")
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256, description="as requests name it")
    load_order: str = Field(default="forward", description="forward, reverse or shuffled:SEED: order in the arena")
    arena_base: str | None = Field(default=None, description="address of the arena, such as 0x510000000000")

    @field_validator("load_order")
    @classmethod
    def _known_order(cls, value: str) -> str:
        if _LOAD_ORDER.fullmatch(value) is None:
            raise ValueError("must be forward, reverse or shuffled:SEED")
        return value

    @field_validator("arena_base")
    @classmethod
    def _page_address(cls, value: str | None) -> str | None:
        if value is not None and (_ADDRESS.fullmatch(value) is None or int(value, 16) % 4096 or int(value, 16) == 0):
            raise ValueError("must be a hexadecimal address that is a multiple of 0x1000")
        return value

    @model_validator(mode="after")
    def _graphs_need_places(self) -> TransformersOptions:
        if self.device is Device.CUDA and self.cuda_graph and self.kv_cache_tokens == 0:
            raise ValueError("cuda_graph needs kv_cache_tokens above 0, because a captured graph cannot grow")
        return self

    @property
    def static_cache(self) -> bool:
        """Whether keys and values have fixed places."""
        return self.device is Device.CUDA and self.kv_cache_tokens > 0


class CommandLine(BaseModel):
    """What the engine's command says: the model's folder, where people expect it to listen, and the options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    host: str
    port: int
    options: TransformersOptions


def parse_options(serve: Mapping[str, object], *, field: str = "serve") -> TransformersOptions:
    """The options a mapping says. Raises InvalidDocument naming every unknown or wrong one."""
    try:
        return TransformersOptions.model_validate(dict(serve))
    except ValidationError as error:
        known = ", ".join(TransformersOptions.model_fields)
        problems = [
            Problem(
                field=".".join([field, *map(str, problem["loc"])]),
                message=problem["msg"],
                value=str(problem["input"])[:80],
                cure=f"options are {known}" if problem["type"] == "extra_forbidden" else None,
            )
            for problem in error.errors()
        ]
        raise InvalidDocument("options of the transformers engine", problems) from error


def command_arguments(model: str, options: TransformersOptions, *, host: str, port: int) -> tuple[str, ...]:
    """The arguments that `parse_command` reads back as the same values."""
    arguments = ["--model", model, "--host", host, "--port", str(port)]
    for name, value in options.model_dump(mode="json").items():
        if value is not None:
            arguments += [_flag(name), str(value).lower() if isinstance(value, bool) else str(value)]
    return tuple(arguments)


def parse_command(arguments: Sequence[str]) -> CommandLine:
    """The values of a command line. Raises UsageError for unknown flags, InvalidDocument for wrong values."""
    parser = _Parser(prog="python -m coldsnap.engines.transformers", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name in TransformersOptions.model_fields:
        parser.add_argument(_flag(name), dest=name, type=_TYPES.get(name, str))
    values = vars(parser.parse_args(list(arguments)))
    model, host, port = values.pop("model"), values.pop("host"), values.pop("port")
    given = {name: value for name, value in values.items() if value is not None}
    return CommandLine(model=model, host=host, port=port, options=parse_options(given, field="command"))


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


_TYPES: Mapping[str, Callable[[str], object]] = {
    "num_threads": int,
    "max_model_len": int,
    "kv_cache_tokens": int,
    "cuda_graph": _truth,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"the command of the transformers engine: {message}")
