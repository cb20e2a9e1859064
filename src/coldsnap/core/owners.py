"""Who a stored object belongs to: ``unit/u0``, ``worker/w0``, ``service/s0`` or ``group/g0``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from coldsnap.core.names import ID_PATTERN, Unfit, is_id

__all__ = ["Owner", "OwnerKind"]

_CURE = "write unit/, worker/, service/ or group/ and an id"


class OwnerKind(StrEnum):
    """What kind of thing can own an object. Services and groups are reserved for state that spans workers."""

    UNIT = "unit"
    WORKER = "worker"
    SERVICE = "service"
    GROUP = "group"


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """An owner. ``str(owner)`` is its one text form."""

    kind: OwnerKind
    id: str

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Parse ``kind/id``. Raises ValueError on any other text."""
        kind, slash, name = text.partition("/")
        if not slash or kind not in list(OwnerKind) or not is_id(name):
            raise Unfit(f"is not an owner: {text[:80]!r}", _CURE)
        return cls(OwnerKind(kind), name)

    @classmethod
    def unit(cls, name: str) -> Owner:
        """The owner of a launch unit's objects."""
        return cls.parse(f"unit/{name}")

    @classmethod
    def worker(cls, name: str) -> Owner:
        """The owner of a worker's objects."""
        return cls.parse(f"worker/{name}")

    def __str__(self) -> str:
        return f"{self.kind}/{self.id}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def parse(value: Any) -> Owner:
            if isinstance(value, Owner):
                return value
            if isinstance(value, str):
                return cls.parse(value)
            raise Unfit("is not an owner", _CURE)

        return core_schema.no_info_plain_validator_function(
            parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^(unit|worker|service|group)/{ID_PATTERN[1:]}"}
