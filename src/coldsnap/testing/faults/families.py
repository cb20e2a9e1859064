"""Families of cases by name."""

from __future__ import annotations

from collections.abc import Mapping

from coldsnap.testing.faults.at_points import at_point, at_write
from coldsnap.testing.faults.case import Inflict
from coldsnap.testing.faults.commands import commanded
from coldsnap.testing.faults.damage import damaged
from coldsnap.testing.faults.gpus import failed_call
from coldsnap.testing.faults.races import raced
from coldsnap.testing.faults.rogue import mangled
from coldsnap.testing.faults.strangers import estranged
from coldsnap.testing.faults.surroundings import disk_full, limited, no_access

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Inflict] = {
    "point": at_point,
    "write": at_write,
    "damage": damaged,
    "disk": disk_full,
    "limit": limited,
    "access": no_access,
    "race": raced,
    "reply": mangled,
    "scene": estranged,
    "command": commanded,
    "call": failed_call,
}
"""What each family does."""
