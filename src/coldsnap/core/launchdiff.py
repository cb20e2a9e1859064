"""What of a launch may differ between capture and restore, and every field that differs and may not.

Placement may change: hosts, device selectors, mount sources, the recipe's base image, the values of a few network
flags in ``command`` (as ``--port 1`` or ``--port=1``), and the network variables of the environment. The rest is
identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from coldsnap.core.launch import Launch, Unit
from coldsnap.core.parsing import plain_document
from coldsnap.core.paths import join, show
from coldsnap.errors import Problem

__all__ = [
    "PLACEMENT_FLAGS",
    "Difference",
    "is_placement_variable",
    "launch_differences",
    "launch_problems",
    "placement_differences",
    "value_differences",
]

PLACEMENT_FLAGS = frozenset({"--port", "--master-addr", "--master-address", "--master-port", "--dist-init-addr"})
_PLACEMENT_PREFIXES = ("NCCL_", "UCX_", "OMPI_MCA_")
_PLACEMENT_NAMES = frozenset({"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME", "NODE_IP", "VLLM_HOST_IP"})
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_NOT_SHOWN = "(not shown)"
_NOTHING = "nothing"
_CURE = "use the captured value, or capture again with this one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One field that is not equal, as text: ``before`` and ``after``. Values that may be secrets are not shown.

    ``message`` is set where "was this, is that" does not say it.
    """

    field: str
    before: str
    after: str
    message: str | None = None

    def below(self, prefix: str) -> Difference:
        """The same difference with its path put below ``prefix``."""
        return replace(self, field=f"{prefix}.{self.field}")

    def problem(self) -> Problem:
        """As a refusal says it, when ``before`` is the captured value."""
        if self.message is not None:
            value = self.after if self.before == _NOTHING else self.before
            return Problem(field=self.field, message=self.message, value=value, cure=_CURE)
        return Problem(field=self.field, message=f"was {self.before} at capture", value=self.after, cure=_CURE)


def is_placement_variable(name: str) -> bool:
    """Whether an environment variable says where a process is, not what it computes."""
    return name in _PLACEMENT_NAMES or name.startswith(_PLACEMENT_PREFIXES)


def launch_problems(captured: Launch, wanted: Launch) -> Iterator[Problem]:
    """Every field of ``wanted`` that must equal ``captured`` and does not, with paths that begin with ``launch``."""
    return (difference.problem() for difference in launch_differences(captured, wanted))


def launch_differences(captured: Launch, wanted: Launch) -> Iterator[Difference]:
    """As ``launch_problems``, for who only compares."""
    old, new = plain_document(captured), plain_document(wanted)
    yield from _differences("launch.engine", old["engine"], new["engine"])
    yield from _differences("launch.model", old["model"], new["model"])
    if len(captured.units) != len(wanted.units):
        yield _differs("launch.units", f"{len(captured.units)} units", f"{len(wanted.units)} units")
    for index, (before, now) in enumerate(zip(captured.units, wanted.units, strict=False)):
        for difference in _unit_differences(before, now):
            yield difference.below(f"launch.units[{index}]")
    yield from _differences("launch.execution", old["execution"], new["execution"])


def placement_differences(captured: Launch, wanted: Launch) -> Iterator[Difference]:
    """What differs and may: where things run, and under which addresses. The rest is ``launch_differences``."""
    for index, (before, now) in enumerate(zip(captured.units, wanted.units, strict=False)):
        for difference in _unit_placement(before, now):
            yield difference.below(f"launch.units[{index}]")


def value_differences(field: str, before: Any, after: Any) -> Iterator[Difference]:
    """Every place where two plain JSON values differ, with its path below ``field``."""
    return _differences(field, before, after)


def _unit_placement(before: Unit, after: Unit) -> Iterator[Difference]:
    yield from _differences("host", before.host, after.host)
    if len(before.devices) == len(after.devices):
        yield from _differences("devices", list(before.devices), list(after.devices))
    yield from _differences("image", before.image, after.image)
    for index, (old, new) in enumerate(zip(before.mounts, after.mounts, strict=False)):
        yield from _differences(f"mounts[{index}].source", old.source, new.source)
    values, now = _placement_values(before.command), _placement_values(after.command)
    for flag in sorted({*values, *now}):
        if values.get(flag) != now.get(flag):
            yield _differs(f"command {flag}", _shown(values.get(flag)), _shown(now.get(flag)))
    for name in sorted({*before.environment, *after.environment}):
        sides = (before.environment.get(name), after.environment.get(name))
        if is_placement_variable(name) and sides[0] != sides[1]:
            yield _differs(join("environment", name), _shown(sides[0]), _shown(sides[1]))


def _placement_values(command: tuple[str, ...]) -> dict[str, str]:
    """Placement flag -> its value, the last one counting."""
    values: dict[str, str] = {}
    for word, following in zip(command, (*command[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        if flag in PLACEMENT_FLAGS:
            values[flag] = value if equals else following
    return values


def _unit_differences(captured: Unit, wanted: Unit) -> Iterator[Difference]:
    yield from _differences("id", captured.id, wanted.id)
    if len(captured.devices) != len(wanted.devices):
        yield _differs("devices", f"{len(captured.devices)} devices", f"{len(wanted.devices)} devices")
    yield from _command_differences(captured.command, wanted.command)
    yield from _environment_differences(captured.environment, wanted.environment)
    if len(captured.mounts) != len(wanted.mounts):
        yield _differs("mounts", f"{len(captured.mounts)} mounts", f"{len(wanted.mounts)} mounts")
    for index, (before, now) in enumerate(zip(captured.mounts, wanted.mounts, strict=False)):
        yield from _differences(f"mounts[{index}].target", before.target, now.target)
        yield from _differences(f"mounts[{index}].read_only", before.read_only, now.read_only)


def _command_differences(captured: tuple[str, ...], wanted: tuple[str, ...]) -> Iterator[Difference]:
    old, new = _words(captured), _words(wanted)
    for (old_place, before), (place, now) in zip(old, new, strict=False):
        if before != now:
            words = (captured[old_place], wanted[place])
            hidden = _is_secret(captured, words[0]) or _is_secret(wanted, words[1])
            yield _differs(f"command[{place}]", *(_NOT_SHOWN if hidden else show(word) for word in words))
    if len(old) != len(new):
        longer = old if len(old) > len(new) else new
        command = captured if longer is old else wanted
        extra = " ".join(
            "..." if word is None or _is_secret(command, word) else word
            for _, word in longer[min(len(old), len(new)) :]
        )
        verb = "lacks" if longer is old else "adds"
        yield Difference(
            field="command",
            before=show(extra) if longer is old else _NOTHING,
            after=_NOTHING if longer is old else show(extra),
            message=f"{verb} words of the captured command",
        )


def _is_secret(command: tuple[str, ...], word: str) -> bool:
    """Whether the word is, or joins, the value of a flag that sounds like a secret: ``--api-key x``, ``--token=x``."""
    flags = [word.partition("=")[0]] if "=" in word else []
    flags += [flag for flag, value in pairwise(command) if value == word]
    return any(flag.startswith("-") and _SECRET_NAME.search(flag) for flag in flags)


def _words(command: tuple[str, ...]) -> list[tuple[int, str | None]]:
    """The words with their place; the value of a placement flag is None, and ``--flag=x`` reads as ``--flag x``."""
    words: list[tuple[int, str | None]] = []
    value_follows = False
    for place, word in enumerate(command):
        flag, equals, _ = word.partition("=")
        if value_follows:
            words.append((place, None))
            value_follows = False
        elif flag in PLACEMENT_FLAGS:
            words.append((place, flag))
            if equals:
                words.append((place, None))
            value_follows = not equals
        else:
            words.append((place, word))
    return words


def _environment_differences(captured: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted({*captured, *wanted}):
        before, now = captured.get(name), wanted.get(name)
        if before == now or is_placement_variable(name):
            continue
        if _SECRET_NAME.search(name):
            before, now = _hidden(before), _hidden(now)
        yield _differs(join("environment", name), _shown(before), _shown(now))


def _hidden(value: str | None) -> str | None:
    return None if value is None else _NOT_SHOWN


def _shown(value: str | None) -> str:
    return "unset" if value is None else show(value)


def _differences(path: str, captured: Any, wanted: Any) -> Iterator[Difference]:
    if isinstance(captured, dict) and isinstance(wanted, dict):
        for key in sorted({*captured, *wanted}):
            place = join(path, key)
            if key not in wanted or key not in captured:
                sides = (captured, wanted)
                yield _differs(place, *(show(side[key]) if key in side else "absent" for side in sides))
            else:
                yield from _differences(place, captured[key], wanted[key])
    elif isinstance(captured, list) and isinstance(wanted, list):
        if len(captured) != len(wanted):
            yield _differs(path, f"{len(captured)} items", f"{len(wanted)} items")
        for index, (before, now) in enumerate(zip(captured, wanted, strict=False)):
            yield from _differences(f"{path}[{index}]", before, now)
    elif type(captured) is not type(wanted) or captured != wanted:
        yield _differs(path, show(captured), show(wanted))


def _differs(field: str, captured: str, wanted: str) -> Difference:
    return Difference(field=field, before=captured, after=wanted)
