"""vLLM's options in their two spellings: a recipe's ``serve`` block, and the command of the front process.

    serve: {max-model-len: 4096, served_model_name: [qwen, qwen3], compilation-config: {mode: 3}}
    serve MODEL ... --compilation-config {"mode":3} --max-model-len 4096 --served-model-name qwen qwen3

Options are vLLM's own and vLLM checks their values; here is checked that they are options at all, that none is refused
(`refusals`), and that a command can be read back. Three are not vLLM's to get as they are written:

- ``device`` is ours, and no option of vLLM's: ``cuda`` or ``cpu``, what the vLLM of the recipe's interpreter is built
  for. It is not in the command; that ``--enable-sleep-mode`` is says ``cuda``.
- ``load-format`` becomes ``coldsnap``, and what the recipe said goes to the loader that does the reading.
- ``served-model-name`` defaults to the checkpoint's name instead of to the path of its folder.

Defaults of vLLM are not written out: which they are is bound with vLLM's version, and a restored process has its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from coldsnap.engines.vllm.refusals import SLEEP_MODE, flag, option_problems
from coldsnap.errors import InvalidDocument, Problem, UsageError

__all__ = [
    "ENTRY",
    "CommandLine",
    "Device",
    "command_arguments",
    "number_of",
    "parse_options",
    "read_arguments",
    "read_command",
]

ENTRY = "coldsnap.engines.vllm"

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?:\.[A-Za-z0-9_-]+)*")
_LOADER_EXTRA = "model_loader_extra_config"
_OURS = frozenset({"host", "port", "model", "model_tag", "help"})
# Lists that vLLM reads as JSON; it takes every other list as several words.
_JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
_LOAD_FORMAT = "coldsnap"
"""The load format of every command; `loader.LOAD_FORMAT`, which cannot be imported without torch."""


class Device(StrEnum):
    """What computes."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """What comes after ``serve``: the model's folder, where people expect it, and the options by plain name.

    Values are as the command spells them: True and False, a word, or several. `load_format` is what the command says.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """Sleep mode is what only a GPU has."""
        return Device.CUDA if self.options.get("enable_sleep_mode") is True else Device.CPU


def parse_options(serve: Mapping[str, object], *, place: str = "serve") -> dict[str, object]:
    """A recipe's options by plain name (underscores), with ``device``. Its own result is accepted again.

    Raises InvalidDocument naming everything that is no option, of the wrong shape, or refused.
    """
    problems: list[Problem] = []
    options: dict[str, object] = {"device": Device.CUDA.value}
    spelled: dict[str, str] = {}
    for name, value in serve.items():
        plain = name.replace("-", "_")
        problems += _shape_problems(f"{place}.{name}", name, plain, value)
        if plain in spelled:
            cure = f"{spelled[plain]} is the same option: write one of them"
            problems.append(Problem(field=f"{place}.{name}", message="stands twice", value=str(value)[:80], cure=cure))
        spelled[plain] = name
        options[plain] = value
    if options["device"] not in list(Device):
        cure = "write cuda or cpu: what the vLLM of the recipe's interpreter is built for"
        problems.append(
            Problem(field=f"{place}.device", message="is no device", value=str(options["device"])[:80], cure=cure)
        )
    problems += option_problems(options, field=lambda name: f"{place}.{spelled.get(name, name)}")
    said = options.get(SLEEP_MODE.name)
    if SLEEP_MODE.judge(said):
        problems.append(SLEEP_MODE.problem(f"{place}.{spelled[SLEEP_MODE.name]}", said))
    if options["device"] == Device.CPU and said:
        cure = "leave it out: vLLM has sleep mode on GPUs alone"
        problems.append(
            Problem(field=f"{place}.{spelled[SLEEP_MODE.name]}", message="needs a GPU", value="true", cure=cure)
        )
    try:
        number_of(options, "tensor_parallel_size", 1)
    except UsageError as error:
        value = str(options["tensor_parallel_size"])[:80]
        name = spelled["tensor_parallel_size"]
        problems.append(Problem(field=f"{place}.{name}", message=error.message, value=value, cure=error.cure))
    problems += _extra_problems(f"{place}.{spelled.get(_LOADER_EXTRA, _LOADER_EXTRA)}", options.get(_LOADER_EXTRA))
    if problems:
        raise InvalidDocument("options of the vllm engine", problems)
    return options


def command_arguments(model: str, options: Mapping[str, object], *, name: str, host: str, port: int) -> tuple[str, ...]:
    """The words after ``serve``, for options that `parse_options` gave; the same for any order of them.

    ``name`` is what requests call the model unless an option says otherwise.
    """
    given = {"served_model_name": name, **options}
    extra = dict(_loader_extra(given.pop(_LOADER_EXTRA, None)))
    reader = given.pop("load_format", None)
    if reader not in (None, "auto", _LOAD_FORMAT):
        extra["load_format"] = reader
    if given.pop("device", Device.CUDA) == Device.CUDA:
        given["enable_sleep_mode"] = True
    given["load_format"] = _LOAD_FORMAT
    if extra:
        given[_LOADER_EXTRA] = extra
    words = [model]
    for option in sorted(given):
        words += _words(option, given[option])
    return (*words, "--host", host, "--port", str(port))


def read_arguments(arguments: Sequence[str]) -> CommandLine:
    """What `command_arguments` wrote, read back; also of a command by hand, in long options. Raises UsageError."""
    options: dict[str, object] = {}
    positional: list[str] = []
    for option, values in _grouped(arguments):
        if option is None:
            positional += values
            continue
        plain = option.removeprefix("--").replace("-", "_")
        if not values and plain.startswith("no_"):
            options[plain.removeprefix("no_")] = False
        elif not values:
            options[plain] = True
        else:
            options[plain] = values[0] if len(values) == 1 else tuple(values)
    model = options.pop("model", None) or options.pop("model_tag", None) or (positional[0] if positional else None)
    if not isinstance(model, str) or len(positional) > 1:
        raise UsageError(
            "the command of the vllm engine names no model, or several", cure="write serve MODEL and then the options"
        )
    host, port = options.pop("host", "127.0.0.1"), options.pop("port", "8000")
    if not isinstance(host, str) or not isinstance(port, str) or not port.isdecimal():
        raise UsageError("--host and --port of the vllm engine's command are no address", cure="write --port 8000")
    return CommandLine(model=model, host=host, port=int(port), options=options)


def read_command(command: Sequence[str]) -> CommandLine:
    """As `read_arguments`, of a whole command. Raises UsageError for one that is not of this engine."""
    words = list(command)
    if ENTRY not in words[:-1] or words[words.index(ENTRY) + 1] != "serve":
        raise UsageError(
            f"{' '.join(words[:1])!r} is no command of the vllm engine", cure=f"write PYTHON -m {ENTRY} serve MODEL ..."
        )
    return read_arguments(words[words.index(ENTRY) + 2 :])


def number_of(options: Mapping[str, object], name: str, default: int) -> int:
    """A number of things that an option says, as a number or as its text. Raises UsageError for anything else."""
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or re.fullmatch(r"[1-9][0-9]{0,3}", str(value)) is None:
        raise UsageError(f"{flag(name)} is no number from 1 to 9999", cure=f"write {default}, or leave it out")
    return int(str(value))


def _shape_problems(place: str, name: str, plain: str, value: object) -> Iterator[Problem]:
    if _NAME.fullmatch(name) is None:
        cure = "write vLLM's own option without its two hyphens, such as max-model-len"
        yield Problem(field=place, message="is no name of an option", value=name[:80], cure=cure)
    elif plain in _OURS:
        yield Problem(field=place, message="is said elsewhere", value=str(value)[:80], cure="see `model` of the recipe")
    if isinstance(value, str) and "\0" in value:
        yield Problem(field=place, message="has a NUL in it", value=repr(value)[:80], cure="remove the NUL")
    if isinstance(value, list | tuple):
        plain_words = all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in value)
        if (
            not value
            or not plain_words
            or (plain not in _JSON_LISTS and any(str(one).startswith("-") or "\0" in str(one) for one in value))
        ):
            cure = "list words or numbers, none of them beginning with a hyphen; or write JSON as text"
            yield Problem(field=place, message="is no list that a command can say", value=str(value)[:80], cure=cure)


def _loader_extra(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    read = json.loads(value) if isinstance(value, str) else value
    if not isinstance(read, dict):
        raise ValueError("is no object")
    return read


def _extra_problems(place: str, value: object) -> Iterator[Problem]:
    try:
        extra = _loader_extra(value)
    except ValueError:
        yield Problem(field=place, message="is no JSON object", value=str(value)[:80], cure="write a mapping")
        return
    yield from option_problems(
        {key: one for key, one in extra.items() if key == "load_format"}, field=lambda name: f"{place}.{name}"
    )


def _words(option: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag(option) if value else "--no-" + flag(option)[2:]]
    if isinstance(value, list | tuple) and option not in _JSON_LISTS:
        return [flag(option), *map(str, value)]
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return [f"{flag(option)}={text}"] if text.startswith("-") or not text else [flag(option), text]


def _grouped(arguments: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Each option with the words up to the next one; first what stands before any."""
    current: str | None = None
    values: list[str] = []
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            if current is not None or values:
                yield current, values
            current, equals, value = word.partition("=")
            values = [value] if equals else []
        elif word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            raise UsageError(f"{word!r} is a short option", cure="write vLLM's long option in its place")
        else:
            values.append(word)
    if current is not None or values:
        yield current, values
