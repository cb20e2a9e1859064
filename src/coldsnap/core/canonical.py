"""Canonical JSON: the one byte form of a JSON value that digests are taken of.

The rules (a reader in any language must be able to follow them):

1. Object keys are sorted by Unicode code point; ``,`` and ``:`` stand without spaces.
2. Every character outside space..``~`` is escaped, in lower case, as UTF-16 units: ``\\u00e9``, ``\\ud83d\\ude00``,
   ``\\u007f``; ``\\b \\t \\n \\f \\r \\" \\\\`` have their short forms; ``/`` stands as it is.
3. Integers are written exactly, whatever their size. A float is Python's ``repr``: the shortest text that
   reads back as the same double (1.25, -0.0, 0.0001, 1e-05, 1e+16). 1 and 1.0 are different values.
4. NaN, infinities, lone surrogates, keys that are not text, and nesting deeper than ``MAX_DEPTH`` have no
   canonical form. They are refused with their path, never repaired.

There is no newline at the end; files add their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from math import isfinite
from typing import Any

from coldsnap.core.digest import Digest
from coldsnap.core.paths import join, show
from coldsnap.errors import InvalidDocument, Problem

__all__ = ["MAX_DEPTH", "MAX_PROBLEMS", "canonical_json", "canonical_sha256", "has_plain_shape", "json_problems"]

MAX_DEPTH = 100  # far above any document, far below every recursion limit on the way
MAX_INTEGER_DIGITS = 4300  # Python's own limit for int <-> text, which guards against quadratic time
MAX_PROBLEMS = 10_000  # of one document; more would only cost time and memory, and nobody reads them
_MANY = 100_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\ud[89a-f]")
_DEPTH_CURE = f"nest at most {MAX_DEPTH} deep"


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a JSON-like value (dict, list, tuple, str, int, float, bool, None).

    Raises InvalidDocument naming the path of everything that has no canonical form.
    """
    if not has_plain_shape(value):
        raise _refusal(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refusal(value) from error
    data = text.encode("ascii")
    if _ESCAPED_SURROGATE.search(data) is not None and any(json_problems(value)):
        raise _refusal(value)
    return data


def canonical_sha256(value: object) -> Digest:
    """SHA-256 of ``canonical_json(value)``. Raises as it does."""
    return Digest.of(canonical_json(value))


def has_plain_shape(value: object) -> bool:
    """Whether every key is text and nesting is bounded. Never recurses; a value that holds itself is too deep."""
    level: list[Any] = [value] if isinstance(value, (dict, list, tuple)) else []
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if not all(isinstance(key, str) for key in container):
                    return False
                container = container.values()
            deeper += [child for child in container if isinstance(child, (dict, list, tuple))]
        if not deeper:
            return True
        # Values in memory may hold one part many times: without this, one that holds itself twice would double forever.
        level = deeper if len(deeper) < _MANY else list({id(child): child for child in deeper}.values())
    return not level


def json_problems(value: object, path: str = "") -> Iterator[Problem]:
    """Everything in ``value`` that has no canonical form, with its path, in document order."""
    stack: list[tuple[str, object, int]] = [(path, value, 0)]
    while stack:
        where, item, depth = stack.pop()
        if isinstance(item, (dict, list, tuple)):
            if depth >= MAX_DEPTH:
                yield Problem(field=where or "(document)", message="is nested too deep", cure=_DEPTH_CURE)
            elif isinstance(item, dict):
                yield from _key_problems(where, item)
                pairs = [(join(where, key), child, depth + 1) for key, child in item.items() if isinstance(key, str)]
                stack.extend(reversed(pairs))
            else:
                stack.extend((f"{where}[{index}]", item[index], depth + 1) for index in reversed(range(len(item))))
        else:
            yield from _scalar_problems(where or "(document)", item)


def _key_problems(where: str, item: dict[object, object]) -> Iterator[Problem]:
    for key in item:
        if not isinstance(key, str):
            yield Problem(
                field=where or "(document)", message="a key must be text", value=repr(key)[:80], cure="quote the key"
            )
        elif _SURROGATE.search(key):
            yield _surrogate_problem(join(where, key), key)


def _scalar_problems(where: str, item: object) -> Iterator[Problem]:
    if isinstance(item, str):
        if _SURROGATE.search(item):
            yield _surrogate_problem(where, item)
    elif isinstance(item, bool) or item is None:
        return
    elif isinstance(item, float):
        if not isfinite(item):
            yield Problem(field=where, message="is not a finite number", value=repr(item), cure="write a finite number")
    elif isinstance(item, int):
        if abs(item) >= 10**MAX_INTEGER_DIGITS:
            yield Problem(
                field=where,
                message="is an integer too long to write",
                value=f"{item.bit_length()} bits",
                cure=f"use at most {MAX_INTEGER_DIGITS} digits",
            )
    else:
        yield Problem(
            field=where, message="is not a JSON value", value=type(item).__name__, cure="use plain JSON values"
        )


def _surrogate_problem(where: str, text: str) -> Problem:
    return Problem(
        field=where,
        message="holds half of a surrogate pair, which is no character",
        value=show(text),
        cure="write the whole character",
    )


def _refusal(value: object) -> InvalidDocument:
    problems = list(islice(json_problems(value), MAX_PROBLEMS))
    return InvalidDocument("a value to be written as canonical JSON", problems)
