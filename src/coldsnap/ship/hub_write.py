"""Packs into a hub repository, through huggingface_hub.

    what is missing at the head? -> upload, hashing -> what is missing at the head now? -> one commit on it

A file is hashed while it is sent, and its last bytes are sent only when the digest is the item's: of a file that is
damaged here the hub gets a beginning, and no object.

The commit names the head it was made for, so a head that moved refuses it and the question is asked again: two
publishers, or one that was killed and came back, make one commit. An upload that was cut off before it was whole
begins anew; one that was whole is not repeated, because the hub asks for nothing it has.

huggingface_hub waits without bound and follows every wish of a server; the client that is set here for this process
bounds both. It uses Xet only for files by path, and only a hub that offers it gets them so.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from coldsnap.errors import ColdsnapError, MissingCapability, OperationInterrupted, RemoteError
from coldsnap.ship.base import Item, Outgoing, Progress, Tally, Written
from coldsnap.ship.directory import relative_path
from coldsnap.ship.faults import remote_error, status_error
from coldsnap.ship.limits import stop_if_cancelled
from coldsnap.ship.local import LocalFile
from coldsnap.ship.secret import scrub

if TYPE_CHECKING:
    from coldsnap.ship.hub import Hub

__all__ = ["hub_client", "quiet", "translated_for", "write_packs"]

_ROUNDS = 5
_SAMPLE_BYTES = 512  # what the hub looks at to tell how a file is kept
_TITLE = "Publish model payloads"
_LOGGERS = ("huggingface_hub", "httpx2", "httpcore2")

_quiet_lock = threading.Lock()
_quiet_users: list[None] = []
_levels: dict[str, int] = {}


def write_packs(
    hub: Hub, objects: Sequence[Outgoing], *, progress: Progress | None, cancel: threading.Event | None
) -> Written:
    """See ``Hub.write``."""
    with hub_client(hub) as api:
        return _write(hub, api, objects, progress, cancel)


def _write(
    hub: Hub, api: Any, objects: Sequence[Outgoing], progress: Progress | None, cancel: threading.Event | None
) -> Written:
    advance = progress or (lambda num_bytes: None)
    distinct = {one.item: one for one in objects}
    head = hub.head()
    missing = _missing(hub, head, distinct)
    tally = Tally(present=[item for item in distinct if item not in missing])
    for item in tally.present:
        advance(distinct[item].bytes)
    if not missing:
        return tally.written(revision=head or "")
    with translated_for(hub), quiet():
        _make_room(hub, api, head)
        operations = _upload(hub, api, list(missing.values()), advance, cancel)
        revision = _commit(hub, api, operations, missing, cancel)
    tally.sent.extend(missing.values())
    if left := _missing(hub, revision, missing):
        message = f"{hub.name} committed {revision} without {next(iter(left))}"
        raise remote_error("bad_answer", message, place=hub.name)
    return tally.written(revision=revision)


def _missing(hub: Hub, head: str | None, wanted: dict[Item, Outgoing]) -> dict[Item, Outgoing]:
    """What the commit does not have. A path that holds other bytes counts as missing: what is published mends it."""
    if head is None:
        return dict(wanted)
    there = hub.at(head)
    missing = {}
    for item, one in wanted.items():
        try:
            found = there.stat(item)
        except RemoteError as error:
            if error.reason != "wrong_bytes":
                raise
            found = None
        if found is None or found.bytes != one.bytes:
            missing[item] = one
    return missing


@contextlib.contextmanager
def hub_client(hub: Hub) -> Iterator[Any]:
    """The client, on connections with our bounds while the block runs."""
    try:
        import huggingface_hub
    except ImportError as error:
        cure = "pip install 'coldsnap[hub]'"
        raise MissingCapability(f"{hub.name} needs the package huggingface_hub", cure=cure) from error
    from coldsnap.ship.hub_client import bounded_session

    token = hub.access.token
    with bounded_session(hub.http.limits, hub.http.proxy_for(hub.access.endpoint)):
        yield huggingface_hub.HfApi(
            endpoint=hub.access.endpoint, token=token.reveal() if token is not None else False, library_name="coldsnap"
        )


def _make_room(hub: Hub, api: Any, head: str | None) -> None:
    if head is not None:
        return
    if not hub.exists():
        api.create_repo(hub.repository, private=True, exist_ok=True)
    if hub.branch != "main":
        api.create_branch(hub.repository, branch=hub.branch, exist_ok=True)


def _upload(
    hub: Hub, api: Any, objects: list[Outgoing], progress: Progress, cancel: threading.Event | None
) -> list[Any]:
    """Every pack proved, uploaded and not yet committed; one at a time, which a link fills anyway."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    xet = _offers_xet(hub)
    operations = []
    for one in objects:
        stop_if_cancelled(cancel)
        with LocalFile(one) as file:
            operation = CommitOperationAdd(relative_path(one.item), b"")
            operation.upload_info = UploadInfo(
                size=one.bytes, sample=file.read(0, _SAMPLE_BYTES), sha256=bytes.fromhex(one.item.digest.hex)
            )
            if xet:
                file.prove()
                operation.path_or_fileobj = str(one.path)
                api.preupload_lfs_files(hub.repository, [operation], revision=hub.branch, free_memory=False)
                progress(one.bytes)
            else:
                operation.path_or_fileobj = _Sent(file, progress, cancel)
                api.preupload_lfs_files(hub.repository, [operation], revision=hub.branch, free_memory=False)
            if operation._upload_mode == "regular":
                file.prove()
                operation.path_or_fileobj = b"".join(bytes(piece) for piece in file.pieces(0, one.bytes))
            else:
                operation.path_or_fileobj = b""
        operations.append(operation)
    return operations


def _commit(
    hub: Hub, api: Any, operations: list[Any], wanted: dict[Item, Outgoing], cancel: threading.Event | None
) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    by_path = {relative_path(item): item for item in wanted}
    for _ in range(_ROUNDS):
        stop_if_cancelled(cancel)
        head = hub.head()
        missing = _missing(hub, head, wanted)
        if not missing and head is not None:
            return head
        try:
            info = api.create_commit(
                hub.repository,
                [one for one in operations if by_path[one.path_in_repo] in missing],
                commit_message=_TITLE,
                revision=hub.branch,
                parent_commit=head,
            )
        except HfHubHTTPError as error:
            if error.response.status_code not in (409, 412):
                raise
            time.sleep(hub.http.limits.first_pause_s)
            continue
        return str(info.oid)
    raise remote_error("conflict", f"{hub.name} changed {_ROUNDS} times while a commit was made", place=hub.name)


def _offers_xet(hub: Hub) -> bool:
    """Whether the client has Xet and the hub gives us a token for it."""
    from huggingface_hub.utils._runtime import is_xet_available

    if not is_xet_available():
        return False
    url = f"{hub.access.endpoint}/api/models/{hub.repository}/xet-write-token/{hub.branch}"
    try:
        with hub.http.send("GET", url, what="offer Xet", headers=hub.access.headers()):
            return True
    except RemoteError:
        return False


class _Sent(io.BufferedIOBase):
    """A file on its way, for the client: hashed as far as it was read, and read to its end only when it is proved.

    It says how far it was read, less when some is read again, and stops being readable when cancelled.
    """

    def __init__(self, file: LocalFile, progress: Progress, cancel: threading.Event | None) -> None:
        self._file = file
        self._progress = progress
        self._cancel = cancel
        self._at = 0
        self._told = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.outgoing.bytes}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        stop_if_cancelled(self._cancel)
        left = max(0, self._file.outgoing.bytes - self._at)
        data = self._file.read(self._at, left if size is None or size < 0 else min(size, left))
        if len(data) == left:
            self._file.prove()
        self._at += len(data)
        self._progress(self._at - self._told)
        self._told = self._at
        return data


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the client's own log and bars still: they show addresses with signatures."""
    from huggingface_hub.utils import disable_progress_bars

    with _quiet_lock:
        if not _quiet_users:
            for name in _LOGGERS:
                _levels[name] = logging.getLogger(name).level
                logging.getLogger(name).setLevel(logging.CRITICAL)
        _quiet_users.append(None)
    disable_progress_bars()
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_users.pop()
            if not _quiet_users:
                for name in _LOGGERS:
                    logging.getLogger(name).setLevel(_levels[name])


@contextlib.contextmanager
def translated_for(hub: Hub) -> Iterator[None]:
    """The client's errors in our words; what it wraps is looked for inside."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except Exception as error:
        token = hub.access.token
        secrets = [token] if token is not None else []
        for one in _chain(error):
            if isinstance(one, ColdsnapError | OperationInterrupted):
                raise one from None
            if isinstance(one, OfflineModeIsEnabled):
                raise remote_error("offline", f"{hub.name} is not asked: offline mode is on", place=hub.name) from None
            if isinstance(one, HfHubHTTPError):
                said = scrub(one.server_message or "", secrets)
                gated = one.response.headers.get("x-error-code") == "GatedRepo"
                status = one.response.status_code
                raise status_error(status, "take packs", place=hub.name, said=said, gated=gated) from None
            if isinstance(one, httpx2.TimeoutException):
                message = f"{hub.name} is too slow: {type(one).__name__}"
                raise remote_error("too_slow", message, place=hub.name) from None
            if isinstance(one, httpx2.HTTPError):
                message = f"the connection to {hub.name} broke: {type(one).__name__}"
                raise remote_error("broken", message, place=hub.name) from None
        if not isinstance(error, ValueError | RuntimeError | OSError):
            raise  # a bug, here or there
        reason = "too_large" if "too large" in str(error).lower() or "50GB" in str(error) else "refused"
        root = list(_chain(error))[-1]
        said = scrub(f"{error} ({type(root).__name__}: {root})", secrets)
        message = f"{hub.name} does not take the packs: {said}"
        raise remote_error(reason, message, place=hub.name) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
