"""Dotted versions as numbers: 580.159.04 is newer than 580.82 and equal to 580.159.4.0."""

from __future__ import annotations

import re

__all__ = ["version_fault", "version_of"]

_VERSION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,7}")


def version_fault(text: str) -> str | None:
    """Why ``text`` is not a dotted version, or None."""
    return None if _VERSION.fullmatch(text) else "is not a dotted version"


def version_of(text: str) -> tuple[int, ...]:
    """The version's numbers, which compare as versions do. Raises ValueError for any other text."""
    if version_fault(text) is not None:
        raise ValueError(f"{text!r} is not a dotted version")
    numbers = [int(part) for part in text.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
