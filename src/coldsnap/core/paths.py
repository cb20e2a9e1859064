"""How a place inside a document is written: ``launch.units[1].environment["a b"]``.

A key that is no plain word is quoted, so that a path is always printable ASCII and can be taken apart again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

__all__ = ["ROOT", "Positions", "join", "path_of", "show", "split"]

ROOT = "(document)"
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_TOKEN = re.compile(r'\.?([^.\[\]"]+)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')
_SHOWN = 120


def join(prefix: str, key: str) -> str:
    """The path of member ``key`` of the object at ``prefix``."""
    if _WORD.match(key) is None:
        return f"{prefix}[{json.dumps(key)}]"
    return f"{prefix}.{key}" if prefix else key


def path_of(location: Sequence[str | int], prefix: str = "") -> str:
    """The path made of keys and indices, below ``prefix``."""
    for part in location:
        prefix = f"{prefix}[{part}]" if isinstance(part, int) else join(prefix, part)
    return prefix


def split(path: str) -> Iterator[str | int]:
    """The keys and indices of a path made by ``join`` or ``path_of``."""
    for word, index, quoted in _TOKEN.findall(path):
        if index:
            yield int(index)
        elif quoted:
            yield str(json.loads(quoted))
        else:
            yield word


class Positions:
    """Where paths stand in one document, as keys that sort in document order; what is missing comes last."""

    def __init__(self, document: object) -> None:
        self._document = document
        self._members: dict[int, dict[str, int]] = {}

    def of(self, path: str) -> tuple[int, ...]:
        """The sort key of ``path``."""
        places: list[int] = []
        here = self._document
        for part in split(path):
            if isinstance(here, dict):
                members = self._members.get(id(here))
                if members is None:
                    members = self._members[id(here)] = {key: index for index, key in enumerate(here)}
                places.append(members.get(str(part), len(members)))
                here = here.get(part)
            elif isinstance(here, list) and isinstance(part, int) and part < len(here):
                places.append(part)
                here = here[part]
            else:
                break
        return tuple(places)


def show(value: object) -> str:
    """A value as short printable ASCII for an error message."""
    if isinstance(value, (dict, list, tuple)):
        noun, count = ("an object", "members") if isinstance(value, dict) else ("a list", "items")
        return f"{noun} of {len(value)} {count}" if value else f"an empty {noun.split()[1]}"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
