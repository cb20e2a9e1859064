"""Any URL that fsspec knows (``s3://``, ``gs://``, ``memory://``...) as a store. Needs the extra ``[fsspec]``.

Names are those of a directory (``directory.py``). An object store makes an object visible when it is whole; elsewhere
a temporary name and ``mv`` do it. Credentials are fsspec's own business and its own configuration's; its errors are
passed on without their text, which may hold them. It waits for minutes where nobody answers, and calls every failure
of a web server a missing file: here both have the reason that they have.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from coldsnap.errors import ColdsnapError, MissingCapability, UsageError
from coldsnap.ship.base import PIECE_BYTES, Item, Kind, Outgoing, Progress, Stored, Tally, Written
from coldsnap.ship.directory import item_of, relative_path
from coldsnap.ship.faults import remote_error, status_error
from coldsnap.ship.limits import Limits, stop_if_cancelled
from coldsnap.ship.local import LocalFile
from coldsnap.ship.secret import public_url

__all__ = ["AnyUrl"]

_FOLDERS = ("model-payloads/sha256", "blobs/sha256", "manifests/sha256")


class AnyUrl:
    """See the module's head. ``url`` is the folder of the store."""

    kinds = frozenset(Kind)

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        self.name = public_url(url)
        self._limits = limits or Limits()
        self._is_web = urlsplit(url).scheme in ("http", "https")
        try:
            import fsspec
            import fsspec.asyn
        except ImportError as error:
            cure = "pip install 'coldsnap[fsspec]'"
            raise MissingCapability(f"{self.name} needs the package fsspec", cure=cure) from error
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except ImportError as error:  # its text is fsspec's own, written before it saw the address
            message = f"fsspec cannot open {self.name}: {error}"
            raise UsageError(
                message, cure="install the package that is named; `coldsnap[fsspec]` has fsspec alone"
            ) from error
        except Exception as error:  # whatever the package of this scheme raises
            message = f"fsspec cannot open {self.name}: {type(error).__name__}"
            raise UsageError(message, cure="check the scheme and the address") from error
        self._root = str(root).rstrip("/")

    def list(self) -> Iterator[Stored]:
        """Every file that bears an item's name."""
        for folder in _FOLDERS:
            with self._translated("list its objects"):
                self._system.invalidate_cache()
                try:
                    found = self._system.ls(f"{self._root}/{folder}", detail=True)
                except FileNotFoundError:
                    continue
            for entry in found:
                item = item_of(f"{folder}/{str(entry['name']).rpartition('/')[2]}")
                if item is not None and entry.get("type") == "file":
                    yield Stored(item=item, bytes=int(entry["size"]))

    def stat(self, item: Item) -> Stored | None:
        """The size that the file system states."""
        with self._translated("look up an object"):
            self._system.invalidate_cache()
            try:
                found: dict[str, Any] = self._call("info", self._limits.connect_s, self._path(item))
            except FileNotFoundError as error:
                if (failure := self._failure(error)) is not None:
                    raise failure from error
                return None
        return Stored(item=item, bytes=int(found["size"])) if found.get("type") == "file" else None

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """Piece by piece."""
        end = offset + size
        while offset < end:
            wanted = min(PIECE_BYTES, end - offset)
            with self._translated("read an object"):
                try:
                    data = self._call(
                        "cat_file", self._limits.idle_s, self._path(item), start=offset, end=offset + wanted
                    )
                except FileNotFoundError as error:
                    raise remote_error("not_found", f"{self.name} has no {item}", place=self.name) from error
            if len(data) != wanted:
                message = f"{self.name} gave {len(data)} of {wanted} bytes of {item} from byte {offset}"
                raise remote_error("wrong_length", message, place=self.name)
            offset += wanted
            yield memoryview(data)

    def write(
        self,
        objects: Sequence[Outgoing],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Written:
        """See ``base.py``."""
        tally = Tally()
        advance = progress or (lambda num_bytes: None)
        for one in objects:
            stop_if_cancelled(cancel)
            if not tally.is_there(one, self.stat(one.item), advance, place=self.name):
                self._send(one, advance, cancel)
                tally.sent.append(one)
        return tally.written()

    def _send(self, one: Outgoing, progress: Progress, cancel: threading.Event | None) -> None:
        path = self._path(one.item)
        aside = f"{path}.{secrets.token_hex(8)}.partial"
        with LocalFile(one) as file:
            try:
                with self._translated("take an object"):
                    self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
                    with self._system.open(aside, "wb") as out:
                        for piece in file.pieces(0, one.bytes):
                            stop_if_cancelled(cancel)
                            out.write(bytes(piece))
                            progress(len(piece))
                file.prove()
                with self._translated("name an object"):
                    self._system.mv(aside, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._system.rm_file(aside)
                raise

    def _call(self, method: str, patience_s: float, path: str, **kwargs: int) -> Any:
        """Of a system that works in a loop of its own, end what takes longer than ``patience_s``."""
        from fsspec.asyn import AsyncFileSystem, sync

        if isinstance(self._system, AsyncFileSystem):
            return sync(self._system.loop, getattr(self._system, f"_{method}"), path, timeout=patience_s, **kwargs)
        return getattr(self._system, method)(path, **kwargs)

    def _failure(self, error: FileNotFoundError) -> ColdsnapError | None:
        """Why a web server did not answer, where that is told as a missing file; None when the file is missing."""
        cause = error.__cause__
        what, status = "look up an object", getattr(cause, "status", None)
        if not self._is_web or cause is None or isinstance(cause, FileNotFoundError) or status in (404, 410):
            return None
        if isinstance(status, int) and status >= 400:
            return status_error(status, what, place=self.name)
        message = f"{self.name} failed when asked to {what}: {type(cause).__name__}"
        return remote_error("unreachable", message, place=self.name)

    def _path(self, item: Item) -> str:
        return f"{self._root}/{relative_path(item)}"

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (PermissionError, NotImplementedError) as error:
            message = f"{self.name} does not let us {what}: {type(error).__name__}"
            raise remote_error("forbidden", message, place=self.name) from error
        except ColdsnapError:
            raise
        except TimeoutError as error:
            message = f"{self.name} is too slow when asked to {what}"
            raise remote_error("too_slow", message, place=self.name) from error
        except Exception as error:  # packages behind fsspec have errors of their own, which are no OSErrors
            message = f"{self.name} failed when asked to {what}: {type(error).__name__}"
            raise remote_error("unreachable", message, place=self.name) from error
