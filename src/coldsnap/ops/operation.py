"""Around every verb that changes something: timing, live events, and a receipt that is never downgraded.

The receipt of an operation is ``<state-root>/receipts/<operation id>.json`` and, when asked for, a file of the
caller's. Both are looked at before anything runs: another request's receipt, or a success, stops the
operation there. A failure is recorded too, with its reasons, and may be replaced by a later success.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coldsnap.core.drivers import DRIVERS
from coldsnap.core.points import reached
from coldsnap.core.receipt import (
    MAX_RECEIPT_BYTES,
    Receipt,
    ReceiptError,
    ReceiptProblem,
    ReceiptState,
    may_replace,
    may_run,
    parse_receipt,
    receipt_bytes,
)
from coldsnap.core.request import OperationRequest, request_sha256
from coldsnap.core.timing import OpenSpan, TimingBuilder
from coldsnap.errors import ColdsnapError, HostError, InvalidDocument, OperationInterrupted, Refused
from coldsnap.ops.tools import Tools
from coldsnap.store.documents import read_private, replace

__all__ = ["Operation", "Outlet", "operation"]

_MAX_FACTS_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlet:
    """Where the caller wants to hear about an operation beside its return value."""

    receipt_path: Path | None = None
    on_event: Callable[[dict[str, Any]], None] | None = None


class Operation:
    """A verb at work: opens spans and takes the result for the receipt."""

    def __init__(self, request: OperationRequest, outlet: Outlet) -> None:
        self.request = request
        self.started = time.monotonic()
        self._builder = TimingBuilder(
            operation_id=request.id,
            now=time.monotonic,
            origin_unix_ns=time.time_ns(),
            on_event=outlet.on_event,
        )
        self._seconds: dict[str, float] = {}
        self._kept: dict[str, Any] = {}
        self.result: Mapping[str, Any] = {}
        self.phase = ""
        """The span that began last: what the operation is doing, or was when it failed."""
        self.stays = "nothing was committed"
        """What is there whatever becomes of the rest of the operation, in a few words."""

    @contextmanager
    def span(self, name: str) -> Iterator[OpenSpan]:
        """Time a phase; phases of one name add up in ``seconds``."""
        began = time.monotonic()
        self.phase = name
        try:
            with self._builder.span(name) as span:
                yield span
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, in the order the phases first ended, and their ``total`` since the start."""
        return {**self._seconds, "total": time.monotonic() - self.started}

    def succeed(self, result: Mapping[str, Any]) -> None:
        """What the receipt of a success says."""
        self.result = result

    def keep(self, **values: Any) -> None:
        """Put values into the receipt's result, whether the operation ends well or not."""
        self._kept |= values

    def receipt(self, began: datetime, error: BaseException | None) -> Receipt:
        """The receipt as of now."""
        request = self.request
        return Receipt(
            operation_id=request.id,
            operation=request.operation,
            state=ReceiptState.SUCCEEDED if error is None else ReceiptState.FAILED,
            request_sha256=request_sha256(request),
            engine=request.launch.engine,
            snapshot_driver=request.snapshot_driver.id,
            replay_semantics=DRIVERS[request.snapshot_driver.id].replay_semantics,
            started_at=_instant(began),
            completed_at=_instant(datetime.now(UTC)),
            duration_seconds=time.monotonic() - self.started,
            timing=self._builder.finish(),
            result=_plain({**self._kept, **self.result}),
            error=_receipt_error(error) if error is not None else None,
        )


@contextmanager
def operation(
    tools: Tools, request: OperationRequest, *, outlet: Outlet | None = None, verb: str | None = None
) -> Iterator[Operation]:
    """Run the body as the operation ``request.id``; errors call it ``verb``, or else what the request does.

    Raises Refused before the body when a receipt says that it must not run. Ctrl-C inside the body becomes
    OperationInterrupted, whose notes say what was undone.
    """
    outlet = outlet or Outlet()
    verb = verb or request.operation.value
    paths = [tools.state.receipts / f"{request.id}.json"]
    if outlet.receipt_path is not None:
        paths.append(outlet.receipt_path)
    digest = request_sha256(request)
    for path in paths:
        _refuse_if_final(path, lambda old: may_run(old, digest))
    began = datetime.now(UTC)
    op = Operation(request, outlet)
    try:
        yield op
    except KeyboardInterrupt as error:
        stopped = OperationInterrupted(f"{verb} was interrupted; {op.stays}")
        for note in getattr(error, "__notes__", ()):
            stopped.add_note(note)
        _write(op.receipt(began, stopped), paths, stopped)
        raise stopped from error
    except OSError as error:
        refused = HostError(
            f"the machine refused what {verb} needs: {error.strerror or error}",
            cure="raise the limit or free what it names, then run it again",
            facts={"errno": error.errno, "path": str(error.filename) if error.filename else None},
        )
        for note in getattr(error, "__notes__", ()):
            refused.add_note(note)
        _write(op.receipt(began, refused), paths, refused)
        raise refused from error
    except Exception as error:
        _write(op.receipt(began, error), paths, error)
        raise
    reached("receipt.writing")
    _write(op.receipt(began, None), paths, None)
    reached("receipt.written")


def _refuse_if_final(path: Path, verdict: Callable[[Receipt], Any]) -> None:
    if not os.path.lexists(path):
        return
    data = read_private(path, MAX_RECEIPT_BYTES)
    try:
        problem = verdict(parse_receipt(data))
    except InvalidDocument as error:
        cure = f"what became of that operation cannot be told: look, then move {path} away, or use another id"
        raise InvalidDocument(str(path), error.problems, cure=cure, facts={"path": str(path)}) from error
    if problem is not None:
        raise Refused(f"the receipt at {path}", [problem])


def _write(receipt: Receipt, paths: list[Path], failure: BaseException | None) -> None:
    """Write the receipt everywhere. While an error is on its way, a receipt that cannot be written is only a note."""
    for path in paths:
        try:
            _refuse_if_final(path, lambda old: may_replace(old, receipt))
            replace(path, receipt_bytes(receipt))
        except (ColdsnapError, OSError) as error:
            if failure is None:
                raise
            failure.add_note(f"the receipt {path} was not written: {error}")


def _receipt_error(error: BaseException) -> ReceiptError:
    reasons = error.problems if isinstance(error, InvalidDocument | Refused) else ()
    return ReceiptError(
        kind=type(error).__name__,
        message=error.message if isinstance(error, ColdsnapError) else f"{type(error).__name__}: {error}",
        cure=error.cure if isinstance(error, ColdsnapError) else None,
        reasons=tuple(ReceiptProblem(field=p.field, message=p.message, value=p.value, cure=p.cure) for p in reasons),
        facts=_plain(error.facts) if isinstance(error, ColdsnapError) else {},
    )


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it; facts that are too many bytes are left out, and said to be."""
    text = json.dumps(_finite(value), default=str)
    if len(text) > _MAX_FACTS_BYTES * 16:
        return {"left_out": f"{len(text)} bytes"}
    plain = json.loads(text)
    return plain if isinstance(plain, dict) else {}


def _finite(value: Any) -> Any:
    """NaN and infinities as text: a canonical document has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _instant(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
