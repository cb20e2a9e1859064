"""Strict parsing of documents that hold very many rows: one table of fields is parser and JSON Schema in one.

A manifest of a large model lists hundreds of thousands of extents. A general validator spends tens of
microseconds on each, so rows are checked here by one plain function per field, and long lists column by
column: is every value of this member an int, the least and the greatest in range? A good list takes that fast
way; only a list with something wrong in it is gone through row by row, to name everything that is wrong.

A field checker takes the JSON value and returns what the record holds, or raises ``Unfit`` with the
reason and the way out. A column checker takes all values of one member and returns what the records hold, or
None when any of them needs a closer look; it must never take what the field checker refuses.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from operator import itemgetter
from typing import Any, TypeVar

from coldsnap.core.digest import DIGEST_PATTERN, Digest
from coldsnap.core.names import Unfit, is_id, path_fault
from coldsnap.core.paths import ROOT, join, show
from coldsnap.core.reading import read_json
from coldsnap.errors import InternalError, Problem

__all__ = [
    "Field",
    "Table",
    "any_list",
    "clean_path",
    "constant",
    "digest",
    "hex64",
    "identifier",
    "integer",
    "line",
    "load",
    "nested",
    "one_of",
    "optional",
    "records",
]

T = TypeVar("T")

Column = Callable[[list[Any]], list[Any] | None]

_MIN_COLUMN = 16  # below this, rows are checked one by one
_ESCAPED_SURROGATE = re.compile(rb"\\\\u[dD][89a-fA-F]")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


class _OddError(Exception):
    """The text holds something that only the careful reader can name."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _OddError
    return members


def _no_constant(text: str) -> object:
    raise _OddError(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def load(data: bytes, *, limit_bytes: int) -> tuple[object, list[Problem]]:
    """The JSON tree of ``data`` and what is wrong with its text, as ``coldsnap.core.reading.read_json`` gives them.

    Text without any oddity, which is nearly all text, is read several times faster than by ``read_json``.
    """
    if len(data) <= limit_bytes and _ESCAPED_SURROGATE.search(data) is None:
        try:
            return _DECODER.decode(data.decode("utf-8")), []
        except (_OddError, ValueError, RecursionError):
            pass  # named by the careful reader
    return read_json(data, limit_bytes=limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """How one member is checked, alone and (where it pays) as a whole column, and its JSON Schema."""

    check: Callable[[Any], Any]
    schema: Mapping[str, object]
    column: Column | None = None


class Table:
    """The exact members of an object: each must be there, and no other may be."""

    def __init__(self, **fields: Field) -> None:
        self._fields = fields
        self._checks = [(name, one.check) for name, one in fields.items()]
        self._names = fields.keys()
        columns = {name: one.column for name, one in fields.items() if one.column is not None}
        self._columns = columns if len(columns) == len(fields) else None

    def __len__(self) -> int:
        return len(self._fields)

    def row(self, value: object, path: str, problems: list[Problem]) -> dict[str, Any] | None:
        """The checked members of the object ``value``; None with the reasons added to ``problems``."""
        if type(value) is dict and value.keys() == self._names:
            try:
                return {name: check(value[name]) for name, check in self._checks}
            except (Unfit, _Nested):
                pass  # named below, with everything else that is wrong with this row
        problems.extend(self._faults(value, path))
        return None

    def rows(self, value: list[object], path: str, problems: list[Problem], make: Callable[..., T]) -> list[T] | None:
        """``make(**members)`` of each object in the list; None when any of them is wrong."""
        if (columns := self.columns(value)) is not None:
            return records(make, columns)
        made: list[T] = []
        before = len(problems)
        for index, item in enumerate(value):
            members = self.row(item, f"{path}[{index}]", problems)
            if members is not None:
                made.append(make(**members))
        return made if len(problems) == before else None

    def columns(self, value: list[Any]) -> dict[str, list[Any]] | None:
        """The checked columns of a long list; None when its rows must be looked at."""
        if self._columns is None or len(value) < _MIN_COLUMN:
            return None
        if {*map(type, value)} != {dict} or {*map(len, value)} != {len(self._columns)}:
            return None
        checked: dict[str, list[Any]] = {}
        for name, check in self._columns.items():
            try:
                found = check([*map(itemgetter(name), value)])
            except KeyError:
                return None
            if found is None:
                return None
            checked[name] = found
        return checked

    def partial(self, value: object, path: str, problems: list[Problem]) -> dict[str, Any]:
        """The members that are right, so that rules across members can still look at them."""
        problems.extend(self._faults(value, path))
        good: dict[str, Any] = {}
        if isinstance(value, dict):
            for name, check in self._checks:
                if name in value:
                    try:
                        good[name] = check(value[name])
                    except (Unfit, _Nested):
                        continue
        return good

    def schema(self) -> dict[str, object]:
        """The object's JSON Schema."""
        return {
            "type": "object",
            "properties": {name: dict(one.schema) for name, one in self._fields.items()},
            "required": list(self._fields),
            "additionalProperties": False,
        }

    def _faults(self, value: object, path: str) -> Iterator[Problem]:
        if not isinstance(value, dict):
            names = ", ".join(self._fields)
            yield Problem(field=path or ROOT, message="is not an object", value=show(value), cure=f"write {{{names}}}")
            return
        for name in value:
            if name not in self._names:
                cure = f"remove it; the fields are {', '.join(self._fields)}"
                yield Problem(field=join(path, name), message="is not a field of this format", cure=cure)
        for name, check in self._checks:
            if name not in value:
                yield Problem(field=join(path, name), message="is missing", cure="add the field")
                continue
            try:
                check(value[name])
            except _Nested as nested_fault:
                nested_problems: list[Problem] = []
                nested_fault.table.row(value[name], join(path, name), nested_problems)
                yield from nested_problems
            except Unfit as unfit:
                yield Problem(field=join(path, name), message=str(unfit), value=show(value[name]), cure=unfit.cure)


def records(make: Callable[..., T], columns: Mapping[str, list[Any]]) -> list[T]:
    """``make(**members)`` of each row.

    A frozen record with slots assigns its members one by one through ``object.__setattr__``: 29 ms for 10,000 extents,
    a third of what reading their manifest took. Filling slot by slot takes 5 ms and makes the same records, provided
    that the class has just these fields and nothing of its own to do when it is made.
    """
    slots = getattr(make, "__slots__", None)
    if not isinstance(make, type) or not is_dataclass(make) or slots is None or hasattr(make, "__post_init__"):
        return [make(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    if {*slots} != {*columns}:
        raise InternalError(f"{make.__name__} has the fields {slots}, its rows {tuple(columns)}")
    made: list[Any] = [make.__new__(make) for _ in next(iter(columns.values()))]
    for name, values in columns.items():
        deque(map(vars(make)[name].__set__, made, values), maxlen=0)
    return made


class _Nested(Exception):
    """A nested object is wrong; the table that says how."""

    def __init__(self, table: Table) -> None:
        self.table = table
        super().__init__("nested object")


def integer(low: int, high: int) -> Field:
    """A whole number from ``low`` to ``high``; true and 1.0 are not whole numbers."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Unfit("is not a whole number in its range", f"write an integer from {low} to {high}")
        return value

    def column(values: list[Any]) -> list[Any] | None:
        fits = {*map(type, values)} == {int} and low <= min(values) and max(values) <= high
        return values if fits else None

    return Field(check=check, schema={"type": "integer", "minimum": low, "maximum": high}, column=column)


def constant(wanted: str | int) -> Field:
    """Exactly this value, of this type."""

    def check(value: object) -> object:
        if type(value) is not type(wanted) or value != wanted:
            raise Unfit("is another format or kind", f"only {show(wanted)} is read")
        return value

    return Field(check=check, schema={"const": wanted})


def one_of(make: Callable[[str], T], choices: tuple[str, ...]) -> Field:
    """One of a few words, turned into what ``make`` makes of it."""

    def check(value: object) -> T:
        if type(value) is not str or value not in choices:
            raise Unfit("is none of the words that may stand here", f"write one of {', '.join(choices)}")
        return make(value)

    return Field(check=check, schema={"enum": list(choices)})


def _digest(value: object) -> Digest:
    if type(value) is not str or not value.startswith("sha256:"):
        raise Unfit("is not a digest", "write 'sha256:' and 64 lower-case hex digits")
    try:
        return Digest.from_hex(value[7:])
    except ValueError as error:
        raise Unfit("is not a digest", "write 'sha256:' and 64 lower-case hex digits") from error


def _hex64(value: object) -> str:
    if type(value) is not str or _HEX64.fullmatch(value) is None:
        raise Unfit("is not 64 lower-case hex digits", "write the SHA-256 as 64 lower-case hex digits, without prefix")
    return value


def _identifier(value: object) -> str:
    if type(value) is not str or not is_id(value):
        raise Unfit("is not an id", "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


def _line(value: object) -> str:
    if type(value) is not str or not value:
        raise Unfit("is not a line of text", "write a non-empty text")
    if _CONTROL.search(value):
        raise Unfit("holds a control character or half a surrogate pair", "write it on one line of plain text")
    return value


def _clean_path(value: object) -> str:
    fault = path_fault(_line(value), absolute=False)
    if fault is not None:
        raise Unfit(fault, "write a relative path without empty, '.' or '..' parts")
    return str(value)


def _any_list(value: object) -> list[object]:
    if type(value) is not list:
        raise Unfit("is not a list", "write a list")
    return value


def optional(inner: Field) -> Field:
    """What ``inner`` takes, or null."""

    def check(value: object) -> object:
        return None if value is None else inner.check(value)

    return Field(check=check, schema={"anyOf": [dict(inner.schema), {"type": "null"}]})


def nested(table: Table, make: Callable[..., object]) -> Field:
    """An object with a table of its own."""

    def check(value: object) -> object:
        members = table.row(value, "", [])
        if members is None:
            raise _Nested(table)
        return make(**members)

    return Field(check=check, schema=table.schema())


def any_list(items: Mapping[str, object]) -> Field:
    """A list, whose items the caller checks. ``items`` is their schema."""

    def column(values: list[Any]) -> list[Any] | None:
        return values if {*map(type, values)} == {list} else None

    return Field(check=_any_list, schema={"type": "array", "items": dict(items)}, column=column)


def _all_hex64(values: list[Any]) -> bool:
    """Whether all are texts of 64 lower-case hex digits, by taking them to bytes and back: quicker than a pattern."""
    if {*map(type, values)} != {str} or {*map(len, values)} != {64}:
        return False
    text = "".join(values)
    try:
        return bytes.fromhex(text).hex() == text
    except ValueError:
        return False


def _digest_column(values: list[Any]) -> list[Any] | None:
    if {*map(type, values)} != {str} or {value[:7] for value in values} != {"sha256:"}:
        return None
    texts = [value[7:] for value in values]
    return Digest.known(texts) if _all_hex64(texts) else None


def _hex64_column(values: list[Any]) -> list[Any] | None:
    return values if _all_hex64(values) else None


def _line_column(values: list[Any]) -> list[Any] | None:
    fits = {*map(type, values)} == {str} and all(values) and _CONTROL.search("".join(values)) is None
    return values if fits else None


def _path_column(values: list[Any]) -> list[Any] | None:
    if _line_column(values) is None or any(path_fault(one, absolute=False) is not None for one in {*values}):
        return None
    return values


digest = Field(check=_digest, schema={"type": "string", "pattern": DIGEST_PATTERN}, column=_digest_column)
hex64 = Field(check=_hex64, schema={"type": "string", "pattern": "^[0-9a-f]{64}$"}, column=_hex64_column)
identifier = Field(check=_identifier, schema={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"})
line = Field(check=_line, schema={"type": "string", "minLength": 1}, column=_line_column)
clean_path = Field(check=_clean_path, schema={"type": "string", "pattern": "^[^/]"}, column=_path_column)
