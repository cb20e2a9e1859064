"""The words documents are made of: ids, names and paths, each with one pattern, one message, one cure.

An ``Annotated`` type here is text that was checked; its JSON Schema carries the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

__all__ = [
    "AbsolutePath",
    "Choice",
    "Count",
    "EnvironmentName",
    "Id",
    "Index",
    "Items",
    "Length",
    "Line",
    "QualifiedName",
    "RelativePath",
    "SomeItems",
    "Table",
    "Text",
    "Unfit",
    "check_id",
    "is_id",
    "path_fault",
]

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ENVIRONMENT_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
QUALIFIED_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}:[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ID_CURE = "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
MAX_ITEMS = 65536
MAX_COUNT = (1 << 63) - 1  # what a file's size can be; sums of them are still numbers that can be shown


class Unfit(ValueError):
    """Text that is not what its place needs; carries the way out beside the reason."""

    def __init__(self, message: str, cure: str) -> None:
        self.cure = cure
        super().__init__(message)


def is_id(text: str) -> bool:
    """Whether ``text`` is an id."""
    return _ID.fullmatch(text) is not None


def path_fault(path: str, *, absolute: bool) -> str | None:
    """Why ``path`` is not a clean path of its kind, or None."""
    if not path:
        return "is an empty path"
    if "\0" in path:
        return "is a path with a NUL in it"
    if absolute != path.startswith("/"):
        return "is not an absolute path" if absolute else "is not a relative path"
    parts = path[1:].split("/") if absolute else path.split("/")
    if path != "/" and any(part in ("", ".", "..") for part in parts):
        return "is not a clean path"
    return None


def check_id(text: str) -> str:
    """``text``, which is an id. Raises Unfit."""
    if not is_id(text):
        raise Unfit("is not an id", _ID_CURE)
    return text


def _qualified(text: str) -> str:
    scope, colon, name = text.partition(":")
    if not colon or not is_id(scope) or not is_id(name):
        raise Unfit("is not a qualified name", "write two ids around one colon, such as vllm:world")
    return text


def _environment_name(text: str) -> str:
    if _ENVIRONMENT.fullmatch(text) is None:
        raise Unfit("is not an environment name", "use letters, digits and '_', not beginning with a digit")
    return text


def _path(*, absolute: bool) -> Callable[[str], str]:
    cure = "write an absolute path" if absolute else "write a relative path"

    def check(text: str) -> str:
        fault = path_fault(text, absolute=absolute)
        if fault is not None:
            raise Unfit(fault, f"{cure} without empty, '.' or '..' parts")
        return text

    return check


def _line(text: str) -> str:
    if not text:
        raise Unfit("is empty", "write a value")
    if _CONTROL.search(text):
        raise Unfit("holds a control character", "write it on one line of plain text")
    return text


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise Unfit("holds a NUL, which no command or environment can carry", "remove the NUL")
    return text


def _schema(**keywords: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **keywords})


class Length:
    """Between ``least`` and ``MAX_ITEMS`` items or members, counted in the document and not among those that parsed."""

    def __init__(self, least: int) -> None:
        self._least = least

    def _check(self, value: Any) -> Any:
        if isinstance(value, (dict, list, tuple)):
            if len(value) < self._least:
                raise Unfit("is empty", "write at least one item")
            if len(value) > MAX_ITEMS:
                raise Unfit("has too many items", f"write at most {MAX_ITEMS}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        plain = handler(schema)
        if plain.get("type") == "object":
            return {**plain, "maxProperties": MAX_ITEMS}
        return {**plain, **({"minItems": self._least} if self._least else {}), "maxItems": MAX_ITEMS}


T = TypeVar("T")
K = TypeVar("K")

Id = Annotated[str, AfterValidator(check_id), _schema(pattern=ID_PATTERN)]
QualifiedName = Annotated[str, AfterValidator(_qualified), _schema(pattern=QUALIFIED_PATTERN)]
EnvironmentName = Annotated[str, AfterValidator(_environment_name), _schema(pattern=ENVIRONMENT_PATTERN)]
AbsolutePath = Annotated[str, AfterValidator(_path(absolute=True)), _schema(pattern="^/")]
RelativePath = Annotated[str, AfterValidator(_path(absolute=False)), _schema(pattern="^[^/]")]
Line = Annotated[str, AfterValidator(_line), _schema(minLength=1)]
Text = Annotated[str, AfterValidator(_without_nul), _schema()]
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]

# JSON has neither tuples nor enumerations: a list and a plain text are taken for them, and nothing else is loosened.
Items = Annotated[tuple[T, ...], Field(strict=False), Length(0)]
Table = Annotated[Mapping[K, T], Length(0)]
SomeItems = Annotated[tuple[T, ...], Field(strict=False), Length(1)]
Choice = Annotated[T, Field(strict=False)]
