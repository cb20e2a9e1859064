"""Bytes to a plain JSON tree, with everything wrong about the text itself reported at once.

The standard reader is lenient where documents must not be: it takes the last of two equal keys, NaN, and
half surrogates, and a deep document ends it with RecursionError. Here each of those is a problem with its
path, and reading goes on with a stand-in so that later checks still see the rest of the document.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import isfinite
from typing import Any

from coldsnap.core.canonical import MAX_DEPTH, MAX_INTEGER_DIGITS, MAX_PROBLEMS, has_plain_shape, json_problems
from coldsnap.core.paths import ROOT, join, show
from coldsnap.errors import Problem

__all__ = ["DOUBLED", "UNREADABLE", "plain_tree", "read_json"]

DOUBLED = "stands more than once in its object"
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _Unreadable:
    """There is no tree: the text is not JSON at all."""


UNREADABLE = _Unreadable()


class _HopelessError(Exception):
    """There are so many problems that nobody would read more."""


class _NotFinite:
    def __init__(self, text: str) -> None:
        self.text = text


class _TooLong:
    def __init__(self, digits: int) -> None:
        self.digits = digits


class _Doubled(dict[str, Any]):
    """An object of the text in which some keys stand twice."""

    def __init__(self, plain: dict[str, Any], doubled: tuple[str, ...]) -> None:
        super().__init__(plain)
        self.doubled = doubled


def read_json(data: bytes, *, limit_bytes: int) -> tuple[object, list[Problem]]:
    """The tree and the problems of the text. The tree is ``UNREADABLE`` when nothing can be read."""
    if len(data) > limit_bytes:
        return UNREADABLE, [
            Problem(
                field=ROOT,
                message="is too large",
                value=f"{len(data)} bytes",
                cure=f"keep it within {limit_bytes} bytes",
            )
        ]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return UNREADABLE, [
            Problem(
                field=ROOT,
                message=f"is not UTF-8 at byte {error.start}",
                value=data[error.start : error.start + 4].hex(" "),
                cure="save it as UTF-8",
            )
        ]
    try:
        tree, marked = _decode(text)
    except json.JSONDecodeError as error:
        return UNREADABLE, [_syntax_problem(text, error)]
    except RecursionError:
        return UNREADABLE, [_too_deep(ROOT)]
    if marked or _HALF_ESCAPE.search(text) is not None or not has_plain_shape(tree):
        return plain_tree(tree)
    return tree, []


def plain_tree(tree: object) -> tuple[object, list[Problem]]:
    """A private copy of a JSON-like value in which only plain values are left, and what was not plain.

    A part that is nested too deep, or no JSON at all, becomes null; a member whose key is no text goes. After
    ``MAX_PROBLEMS`` the tree is ``UNREADABLE``.
    """
    problems: list[Problem] = []
    try:
        return _Copier(problems).copy(tree), problems
    except _HopelessError:
        return UNREADABLE, problems


def _decode(text: str) -> tuple[object, bool]:
    """The tree, and whether something in it was marked for ``plain_tree`` to report."""
    marked: list[object] = []

    def mark(thing: object) -> object:
        marked.append(thing)
        return thing

    def read_float(digits: str) -> object:
        number = float(digits)
        return number if isfinite(number) else mark(_NotFinite(digits))

    def read_integer(digits: str) -> object:
        try:
            return int(digits)
        except ValueError:
            return mark(_TooLong(len(digits) - digits.startswith("-")))

    def read_object(pairs: list[tuple[str, Any]]) -> object:
        plain = dict(pairs)
        if len(plain) == len(pairs):
            return plain
        counts = Counter(key for key, _ in pairs)
        return mark(_Doubled(plain, tuple(key for key in plain if counts[key] > 1)))

    hooks: dict[str, Any] = {
        "object_pairs_hook": read_object,
        "parse_float": read_float,
        "parse_constant": lambda name: mark(_NotFinite(name)),
    }
    try:
        return json.JSONDecoder(**hooks).decode(text), bool(marked)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer longer than Python converts: read again with the slower hook that can say where
        return json.JSONDecoder(**hooks, parse_int=read_integer).decode(text), True


def _too_deep(where: str) -> Problem:
    return Problem(field=where, message="is nested too deep", cure=f"nest at most {MAX_DEPTH} deep")


def _syntax_problem(text: str, error: json.JSONDecodeError) -> Problem:
    around = text[error.pos : error.pos + 20]
    message = "more text after the document" if error.msg == "Extra data" else f"not JSON: {error.msg}"
    return Problem(
        field=ROOT,
        message=f"{message} at line {error.lineno}, column {error.colno}",
        value=show(around) if around else "the end of the text",
        cure="remove what follows the document" if error.msg == "Extra data" else "mend the JSON text",
    )


class _Copier:
    """Copies level by level, never by recursion: depth is what hostile documents are made of."""

    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems

    def _found(self, *problems: Problem) -> None:
        self._problems.extend(problems)
        if len(self._problems) >= MAX_PROBLEMS:
            raise _HopelessError

    def copy(self, tree: object) -> object:
        holder: list[object] = [None]
        level: list[tuple[str, object, Any, Any]] = [("", tree, holder, 0)]
        for depth in range(MAX_DEPTH + 2):
            deeper: list[tuple[str, object, Any, Any]] = []
            for where, item, parent, key in level:
                parent[key] = self._one(where, item, depth, deeper)
            level = deeper
        return holder[0]

    def _one(self, where: str, item: object, depth: int, deeper: list[tuple[str, object, Any, Any]]) -> object:
        if isinstance(item, (dict, list, tuple)) and depth >= MAX_DEPTH:
            self._found(_too_deep(where or ROOT))
            return None
        if isinstance(item, dict):
            return self._object(where, item, deeper)
        if isinstance(item, (list, tuple)):
            items: list[object] = [None] * len(item)
            deeper.extend((f"{where}[{index}]", child, items, index) for index, child in enumerate(item))
            return items
        return self._scalar(where or ROOT, item)

    def _object(self, where: str, item: dict[Any, Any], deeper: list[tuple[str, object, Any, Any]]) -> object:
        members: dict[str, object] = {}
        for key in item.doubled if isinstance(item, _Doubled) else ():
            self._found(
                Problem(
                    field=join(where, key),
                    message=DOUBLED,
                    value=show(key),
                    cure="keep one of them",
                )
            )
        for key, child in item.items():
            if isinstance(key, str):
                found = list(json_problems(key, join(where, key)))
                self._found(*found)
                if not found:
                    members[key] = None
                    deeper.append((join(where, key), child, members, key))
            else:
                self._found(
                    Problem(field=where or ROOT, message="a key must be text", value=show(key), cure="quote the key")
                )
        return members

    def _scalar(self, where: str, item: object) -> object:
        if isinstance(item, _NotFinite):
            self._found(
                Problem(
                    field=where, message="is not a finite number", value=show(item.text), cure="write a finite number"
                )
            )
            return 0.0
        if isinstance(item, _TooLong):
            self._found(
                Problem(
                    field=where,
                    message="is an integer too long to read",
                    value=f"{item.digits} digits",
                    cure=f"use at most {MAX_INTEGER_DIGITS} digits",
                )
            )
            return 0
        found = list(json_problems(item, where))
        self._found(*found)
        if not found:
            return item
        return _whole(item) if isinstance(item, str) else None


def _whole(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
