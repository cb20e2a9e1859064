"""Where an operation's receipt and live timing events go when the caller asked for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldsnap.errors import UsageError
from coldsnap.ops.operation import Outlet

__all__ = ["outlet"]


@contextmanager
def outlet(receipt: Path | None, events: Path | None) -> Iterator[Outlet]:
    """The caller's files, checked before anything runs; events are appended as they happen."""
    if receipt is not None and not receipt.parent.is_dir():
        raise UsageError(f"--receipt-json: {receipt.parent} is no folder", cure="create it first")
    if events is None:
        yield Outlet(receipt_path=receipt)
        return
    try:
        stream = events.open("a", encoding="ascii", buffering=1)
    except OSError as error:
        raise UsageError(
            f"--timing-events: cannot write {events}: {error.strerror}", cure="name a writable file"
        ) from error

    def write(event: dict[str, Any]) -> None:
        stream.write(json.dumps(event, sort_keys=True, separators=(",", ":")) + "\n")

    with stream:
        yield Outlet(receipt_path=receipt, on_event=write)
