"""When an option of vLLM asks for what is refused: judged in any spelling, and how that is said.

A value is what YAML says, a word of a command, or what vLLM made of that word: a number or its text, a record or the
JSON that makes one. None is always an option that nobody gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from coldsnap.errors import Problem

__all__ = ["Judge", "Refusal", "is_off", "is_on", "is_relative", "is_several", "none_of", "one_of", "refusals"]

Judge: TypeAlias = Callable[[object], bool]
_SHOWN = 80


def is_on(value: object) -> bool:
    """An option that asks for something: neither absent, off, empty nor zero."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "0", "0.0", "false", "none", "null", "{}", "[]")
    return bool(value)


def is_off(value: object) -> bool:
    """An option that says no; absent it says nothing."""
    return value is not None and not is_on(value)


def is_several(value: object) -> bool:
    """A number of things that is not one; absent is one."""
    return value is not None and str(value).strip() != "1"


def one_of(*words: str) -> Judge:
    """Exactly one of these words, in any case."""
    return lambda value: isinstance(value, str) and value.lower() in words


def none_of(*words: str) -> Judge:
    """Anything but these words."""
    return lambda value: value is not None and str(value).lower() not in words


def is_relative(value: object) -> bool:
    """A path that depends on where a process is."""
    return isinstance(value, str) and not value.startswith("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """``name``, with underscores, is refused when ``judge`` says so of its value; a ``secret`` one is not repeated."""

    name: str
    judge: Judge
    message: str
    cure: str
    secret: bool = False

    def problem(self, field: str, value: object) -> Problem:
        """This refusal of ``value`` at ``field``."""
        shown = None if self.secret else str(value)[:_SHOWN]
        return Problem(field=field, message=self.message, value=shown, cure=self.cure)


def refusals(judge: Judge, message: str, *names: str, cure: str = "leave it out") -> tuple[Refusal, ...]:
    """The same refusal of several options."""
    return tuple(Refusal(name=name, judge=judge, message=message, cure=cure) for name in names)
