"""What each snapshot driver does around the freezing and thawing of process trees, behind one small protocol."""

from coldsnap.ops.freezers.base import Freezer, Running, Still
from coldsnap.ops.freezers.choose import freezer_for

__all__ = ["Freezer", "Running", "Still", "freezer_for"]
