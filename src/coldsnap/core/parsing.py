"""The one way in for documents: bytes to a frozen, checked record, or every problem at once.

A document goes through three sieves and all of them always run:

1. the text (``reading.py``): size, UTF-8, JSON, doubled keys, NaN, half surrogates, depth;
2. the shape: unknown and missing fields, wrong types, strictly (``"1"`` is no number, ``1.0`` no integer);
3. the rules: methods marked ``@rule`` that compare fields of one record.

A rule also runs when other parts of the document failed. ``salvage`` then builds the record from the
fields that did parse; reading one that did not raises ``Unparsed``, which ends that rule and nothing else. So a
rule is written as if everything were there, never reports nonsense about what is missing, and needs no guards.

Example: ``units[1].index`` is "x" and two workers have one id. The second problem is reported too, because its
rule reads only ``workers``; "index equals position" is silent about unit 1 and still checks the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coldsnap.core.canonical import MAX_PROBLEMS
from coldsnap.core.paths import ROOT, Positions, path_of, split
from coldsnap.core.reading import DOUBLED, UNREADABLE, plain_tree, read_json
from coldsnap.errors import InvalidDocument, Problem

__all__ = [
    "NEWER",
    "Record",
    "Unparsed",
    "at",
    "check_document",
    "check_part",
    "head_problems",
    "parse_document",
    "parsed",
    "plain_document",
    "rule",
]

NEWER = "is newer than any known here"
"""What is said of a ``format`` with a higher number. What else such a document breaks are no rules of its own."""

R = TypeVar("R", bound=BaseModel)
S = TypeVar("S")
Prepare = Callable[[Any], Any]
Rule = Callable[[S], Iterable[Problem]]


class Unparsed(AttributeError):
    """A field that did not parse was read by a rule. Never leaves this room."""


def rule(method: Rule[S]) -> Rule[S]:
    """Mark a method of a ``Record`` as a rule: it yields problems with paths relative to its record."""
    method.__dict__["is_rule"] = True
    return method


def _is_rule(member: object) -> bool:
    return isinstance(member, FunctionType) and "is_rule" in member.__dict__


class Record(BaseModel):
    """Base of every document and its parts: frozen, strict, no unknown fields, no NaN."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        defer_build=True,  # a command that reads one document does not pay for the schemas of all
    )
    rule_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        super().__pydantic_init_subclass__(**keywords)
        own = [name for name, member in tuple(vars(cls).items()) if _is_rule(member)]
        cls.rule_names = (*(name for name in cls.rule_names if name not in own), *own)

    def problems(self) -> Iterator[Problem]:
        """Every rule this record or a part of it breaks, with paths relative to this record."""
        for name in self.rule_names:
            try:
                yield from getattr(self, name)()
            except Unparsed:
                continue
        for name, field in type(self).model_fields.items():
            if name in self.__dict__:
                yield from _problems_within(self.__dict__[name], field.alias or name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Unparsed(name)
            return super().__getattr__(name)


def at(prefix: str, problem: Problem) -> Problem:
    """The same problem, its path put below ``prefix``."""
    if problem.field == ROOT:
        field = prefix
    elif problem.field.startswith("[") or not prefix:
        field = prefix + problem.field
    else:
        field = f"{prefix}.{problem.field}"
    return Problem(field=field, message=problem.message, value=problem.value, cure=problem.cure)


def head_problems(record: Record) -> Iterator[Problem]:
    """A ``format`` or ``kind`` that has a default for its writers and may still not be missing when read."""
    for name in ("format", "kind"):
        if name not in record.model_fields_set:
            yield Problem(field=name, message="is missing", cure=f"write {getattr(record, name)!r}")


def parsed(items: Iterable[S], *names: str) -> Iterator[tuple[int, S]]:
    """The items, with their index, of which all the named fields did parse."""
    for index, item in enumerate(items):
        try:
            for name in names:
                getattr(item, name)
        except Unparsed:
            continue
        yield index, item


def parse_document(model: type[R], data: bytes, *, subject: str, limit_bytes: int, prepare: Prepare | None = None) -> R:
    """Parse ``data`` into a ``model`` record.

    ``prepare`` turns the plain tree into the one that is checked (it lays defaults). Raises InvalidDocument
    with every problem, in document order, and nothing else; of a hopeless document with the first ``MAX_PROBLEMS``.
    """
    tree, problems = read_json(data, limit_bytes=limit_bytes)
    return _parse(model, tree, problems, subject, prepare)


def check_document(model: type[R], tree: object, *, subject: str, prepare: Prepare | None = None) -> R:
    """As ``parse_document``, from plain values in memory (dict, list, tuple, text, numbers)."""
    copy, problems = plain_tree(tree)
    return _parse(model, copy, problems, subject, prepare)


def check_part(model: type[R], tree: object, *, subject: str) -> R:
    """As ``check_document``, for a part of a document that was read already: its values are plain, and are not copied.

    What the record holds of type ``Any`` is the caller's own; a model without such fields is as private as a copy.
    """
    return _parse(model, tree, [], subject, None)


def plain_document(record: Record) -> dict[str, Any]:
    """The record as plain JSON values, every default written out; optional fields that are None are absent."""
    document: dict[str, Any] = {}
    for name, field in type(record).model_fields.items():
        value = getattr(record, name)
        if value is not None:
            document[field.alias or name] = _plain(value)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return plain_document(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    return str(value)  # digests and owners


def _parse(model: type[R], tree: object, problems: list[Problem], subject: str, prepare: Prepare | None) -> R:
    if tree is UNREADABLE:
        raise InvalidDocument(subject, _ordered(tree, problems))
    if prepare is not None:
        tree = prepare(tree)
    record: object = None
    faults: list[Any] = []
    try:
        record = model.model_validate(tree)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    stand_ins = {problem.field for problem in problems if problem.message != DOUBLED}
    if faults or stand_ins:
        # Only a document that fails pays for what explains failures.
        from coldsnap.core.salvage import explain, salvage

        explained = (problem for problem in explain(model, faults) if problem.field not in stand_ins)
        problems.extend(islice(explained, MAX_PROBLEMS))
        failed = [tuple(split(place)) for place in stand_ins]
        record = salvage(model, tree, [*failed, *(tuple(fault["loc"]) for fault in faults)])
    problems.extend(islice(_problems_within(record, ""), MAX_PROBLEMS))
    if problems or not isinstance(record, model):
        if any(problem.message == NEWER for problem in problems):
            problems = [problem for problem in problems if problem.field in ("format", "kind")]
        raise InvalidDocument(subject, _ordered(tree, problems))
    return record


def _problems_within(value: object, path: str) -> Iterator[Problem]:
    if isinstance(value, Record):
        for problem in value.problems():
            yield at(path, problem)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            if isinstance(item, Record):
                yield from _problems_within(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, Record):
                yield from _problems_within(item, path_of((key,), path))


def _ordered(tree: object, problems: list[Problem]) -> list[Problem]:
    positions = Positions(tree)
    ordered = sorted(problems, key=lambda problem: (problem.field != ROOT, positions.of(problem.field)))
    if len(ordered) < MAX_PROBLEMS:
        return ordered
    return [
        *ordered[:MAX_PROBLEMS],
        Problem(field=ROOT, message=f"has more problems than the {MAX_PROBLEMS} listed", cure="mend these first"),
    ]
