"""The one table from a driver's id to its freezer."""

from __future__ import annotations

from coldsnap.core.drivers import DriverId
from coldsnap.ops.freezers.base import Freezer
from coldsnap.ops.freezers.initialised import InitialisedFreezer
from coldsnap.ops.freezers.template import TemplateFreezer
from coldsnap.ops.freezers.tree import TreeFreezer
from coldsnap.ops.operation import Operation
from coldsnap.ops.tools import Tools

__all__ = ["freezer_for"]


def freezer_for(tools: Tools, op: Operation, driver: DriverId) -> Freezer:
    """A freezer for one operation, to be entered."""
    match driver:
        case DriverId.HOST:
            return TreeFreezer(tools, op)
        case DriverId.N610:
            return InitialisedFreezer(tools, op)
        case DriverId.N580:
            return TemplateFreezer(tools, op)
