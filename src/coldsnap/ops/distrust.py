"""After a failure that damaged bytes would explain, earlier proofs of an artifact's files are not believed any more.

A record says that a file was proved and has kept its device, inode, size and modification time. A disk that returns
other bytes, or a hand that puts the time back, keeps all four. So when a tree does not come back, or answers
differently, the records of its capsules and packs go: the next prepare reads every byte again, and unpacks or
refuses what is damaged. A prepared folder goes whole then, with the validation records of its residuals. A copy of a
pack in memory without its record is nobody's, and is made again.
"""

from __future__ import annotations

from coldsnap.capsule.prepared import RECORD_NAME
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import record_path
from coldsnap.store.copies import MemoryCopies
from coldsnap.store.faults import translated

__all__ = ["forget_proofs"]


def forget_proofs(tools: Tools, loaded: LoadedArtifact) -> None:
    """Remove the records of the artifact's prepared capsules and of its packs, also of their copies in memory.

    Idempotent. Raises HostError.
    """
    records = [tools.state.prepared / image.digest.hex / RECORD_NAME for image in loaded.artifact.capsule.images]
    copies = MemoryCopies(tools.state)
    for pack in loaded.packs().values():
        records += [record_path(tools.store.path(pack.sha256)), record_path(copies.path(pack.sha256))]
    for path in records:
        with translated("remove", path):
            path.unlink(missing_ok=True)
