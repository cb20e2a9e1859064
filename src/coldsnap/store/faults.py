"""What the operating system refused, said in coldsnap's words at this room's border."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from coldsnap.errors import HostError, OutOfSpace, UnsafePath

__all__ = ["host_error", "translated"]

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def translated(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Run a block whose OSErrors become HostErrors that say what was being done to which path."""
    try:
        yield
    except OSError as error:
        raise host_error(error, action, path) from error


def host_error(error: OSError, action: str, path: str | os.PathLike[str]) -> HostError:
    """The HostError for ``error``, met while trying to ``action`` the file or folder ``path``."""
    place = os.fspath(path)
    facts = {"path": place, "errno": errno.errorcode.get(error.errno or 0, str(error.errno))}
    if error.errno in _FULL:
        cure = "free some space ('coldsnap gc --dry-run' shows what could go) or use another --state-root"
        return OutOfSpace(f"cannot {action} {place}: {_FULL[error.errno]}", cure=cure, facts=facts)
    if error.errno == errno.EFBIG:
        cure = "raise the file size limit (ulimit -f) or use a file system that takes larger files"
        return OutOfSpace(f"cannot {action} {place}: the file would be larger than allowed", cure=cure, facts=facts)
    if error.errno == errno.ENOMEM:
        return OutOfSpace(f"cannot {action} {place}: out of memory", cure="free some memory", facts=facts)
    if error.errno == errno.ELOOP:
        return UnsafePath(f"cannot {action} {place}: it is a link", cure="put the real file there", facts=facts)
    if error.errno in (errno.ENOTDIR, errno.EISDIR):
        message = f"cannot {action} {place}: it is not the kind of file it should be"
        return UnsafePath(message, cure="move it away", facts=facts)
    if error.errno in _NOT_ALLOWED:
        cure = "check the owner, the mode and the mount options of the path, or run as the user who owns it"
        return HostError(f"cannot {action} {place}: {os.strerror(error.errno)}", cure=cure, facts=facts)
    reason = os.strerror(error.errno) if error.errno is not None else str(error)
    return HostError(f"cannot {action} {place}: {reason}", cure="check the disk and the path", facts=facts)
