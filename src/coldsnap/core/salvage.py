"""What happens to a document whose shape is wrong: pydantic's faults become our problems, and what did parse
is built into a record on which the rules still run (see ``parsing.py``).
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from coldsnap.core.names import Unfit
from coldsnap.core.parsing import NEWER, Unparsed
from coldsnap.core.paths import ROOT, path_of, show
from coldsnap.errors import Problem

__all__ = ["explain", "salvage"]

Location = tuple[str | int, ...]
Shape = tuple[Literal["one", "list", "map"], type[BaseModel]]

# What pydantic calls the fault -> what the reader should be told was expected.
_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "is too small", "write {} or more"),
    "greater_than": ("gt", "is too small", "write more than {}"),
    "less_than_equal": ("le", "is too large", "write {} or less"),
    "less_than": ("lt", "is too large", "write less than {}"),
    "string_too_short": ("min_length", "is too short", "write {} characters or more"),
    "string_too_long": ("max_length", "is too long", "write {} characters or less"),
    "too_short": ("min_length", "has too few items", "write {} or more"),
    "too_long": ("max_length", "has too many items", "write {} or less"),
    "string_pattern_mismatch": ("pattern", "has the wrong form", "write what matches {}"),
}
_MAX_SUGGESTIONS = 100  # looking for a near name costs more than reading; a flood of unknown fields gets none


class _Hole:
    """Stands in a list for an item of which nothing parsed."""

    def __getattr__(self, name: str) -> Any:
        raise Unparsed(name)


def explain(model: type[BaseModel], faults: Sequence[Any]) -> Iterator[Problem]:
    """One problem for each of pydantic's faults: path, what is wrong, the value, the way out."""
    for index, fault in enumerate(faults):
        location: Location = tuple(fault["loc"])
        yield _explain(model, fault, location, suggest=index < _MAX_SUGGESTIONS)


def _explain(model: type[BaseModel], fault: Any, location: Location, *, suggest: bool) -> Problem:
    kind, context = fault["type"], fault.get("ctx", {})
    if location[-1:] == ("[key]",):  # pydantic's way to say that the key itself is at fault
        location = location[:-1]
    field = path_of(location) or ROOT
    value: str | None = "a value not shown" if _is_private(location) else show(fault["input"])
    if kind == "missing":
        return Problem(field=field, message="is missing", cure="add it")
    if kind == "extra_forbidden":
        known = _known_fields(model, location[:-1]) if suggest else []
        near = difflib.get_close_matches(str(location[-1])[:80], known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else "remove it"
        return Problem(field=field, message="is an unknown field", value=value, cure=cure)
    if kind == "literal_error" and location == ("format",) and _is_newer(fault["input"], context["expected"]):
        return Problem(
            field=field, message=NEWER, value=value, cure=f"use a newer coldsnap; this one reads {context['expected']}"
        )
    if kind in ("enum", "literal_error"):
        return Problem(
            field=field, message="is not one of the known values", value=value, cure=f"use {context['expected']}"
        )
    if kind == "value_error":
        error = context.get("error")
        cure = error.cure if isinstance(error, Unfit) else "correct the value"
        return Problem(field=field, message=str(error), value=value, cure=cure)
    if kind in _EXPECTED:
        expected = _EXPECTED[kind]
        return Problem(field=field, message="has the wrong type", value=value, cure=f"write {expected}")
    if kind in _BOUNDS:
        name, message, cure = _BOUNDS[kind]
        return Problem(field=field, message=message, value=value, cure=cure.format(context[name]))
    message = str(fault["msg"])
    return Problem(field=field, message=message[:1].lower() + message[1:], value=value, cure="correct the value")


def _is_newer(found: object, known: str) -> bool:
    """Whether a ``format`` that was found is a later one than ``known``, as pydantic spells it."""
    return type(found) is int and known.isdecimal() and found > int(known)


def _is_private(location: Location) -> bool:
    """Environment values may be secrets; a refusal names the variable and never shows what is in it."""
    return "environment" in location[:-1]


def salvage(model: type[BaseModel], tree: object, failed: Sequence[Location]) -> object:
    """A record of ``model`` holding whatever parsed; ``failed`` are the places that did not."""
    if not isinstance(tree, dict):
        return _Hole()
    failed_in = _by_first(failed)
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in tree:
            found = _salvage_field(model, name, tree[key], failed_in.get(key, []))
            if not isinstance(found, _Hole):
                values[name] = found
        elif not field.is_required():
            values[name] = field.get_default(call_default_factory=True)
    by_key = {model.model_fields[name].alias or name: value for name, value in values.items()}
    given = {name for name, field in model.model_fields.items() if (field.alias or name) in tree}
    record = model.model_construct(given, **by_key)
    for name in model.model_fields:
        if name not in values:
            record.__dict__.pop(name, None)  # model_construct lays defaults over what failed
    return record


def _salvage_field(model: type[BaseModel], name: str, value: Any, failed: list[Location]) -> object:
    if not failed:
        return _adapter(model, name).validate_python(value)
    shape = _shape_of(model.model_fields[name].annotation)
    if shape is None or () in failed:  # the value is not even of the right kind
        return _Hole()
    kind, part = shape
    if kind == "one":
        return salvage(part, value, failed)
    failed_in = _by_first(failed)
    if kind == "list":
        return tuple(_salvage_item(part, item, failed_in.get(index)) for index, item in enumerate(value))
    return {key: _salvage_item(part, item, failed_in.get(key)) for key, item in value.items()}


def _salvage_item(part: type[BaseModel], item: object, failed: list[Location] | None) -> object:
    if failed is not None:
        return salvage(part, item, failed)
    try:
        return part.model_validate(item)
    except ValidationError:  # it parsed in its field only, which may take other spellings
        return _Hole()


def _by_first(failed: Sequence[Location]) -> dict[str | int, list[Location]]:
    grouped: dict[str | int, list[Location]] = {}
    for location in failed:
        if location:
            grouped.setdefault(location[0], []).append(location[1:])
    return grouped


@functools.cache
def _adapter(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = model.model_fields[name]
    annotation: Any = field.annotation
    for item in field.metadata:
        annotation = Annotated[annotation, item]
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return TypeAdapter(annotation)  # a record or a Digest brings its own rules
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


def _shape_of(annotation: Any) -> Shape | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "one", annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape_of(arguments[0])
    if origin in (Union, types.UnionType):
        shapes = [shape for shape in map(_shape_of, arguments) if shape is not None]
        return shapes[0] if len(shapes) == 1 else None
    if origin in (tuple, list) and arguments:
        inner = _shape_of(arguments[0])
        return ("list", inner[1]) if inner is not None and inner[0] == "one" else None
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2:
        inner = _shape_of(arguments[1])
        return ("map", inner[1]) if inner is not None and inner[0] == "one" else None
    return None


def _known_fields(model: type[BaseModel], location: Location) -> list[str]:
    here: type[BaseModel] | None = model
    parts = iter(location)
    for part in parts:
        field = next((f for n, f in here.model_fields.items() if (f.alias or n) == part), None) if here else None
        shape = _shape_of(field.annotation) if field is not None else None
        if shape is None:
            return []
        if shape[0] != "one":
            next(parts, None)
        here = shape[1]
    return [field.alias or name for name, field in here.model_fields.items()] if here else []
