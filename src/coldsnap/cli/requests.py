"""Requests from the outside: a recipe made into one, or a strict document from a file or standard input."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from coldsnap.core.request import MAX_REQUEST_BYTES, Operation, OperationRequest, parse_request
from coldsnap.errors import UsageError, UserError

__all__ = ["new_operation_id", "read_request"]


def new_operation_id(verb: str, name: str) -> str:
    """An id for an operation that has none: verb, name and the time to the microsecond (UTC)."""
    now = time.time_ns() // 1000
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 1_000_000))
    return f"{verb}-{name[:80]}-{stamp}.{now % 1_000_000:06d}"


def read_request(source: str, operation: Operation) -> OperationRequest:
    """Parse the request in file ``source`` (``-``: standard input) and check that it asks for ``operation``."""
    if source == "-":
        data = sys.stdin.buffer.read(MAX_REQUEST_BYTES + 1)
    else:
        try:
            with Path(source).open("rb") as file:
                data = file.read(MAX_REQUEST_BYTES + 1)
        except OSError as error:
            raise UserError(
                f"--request-json: cannot read {source}: {error.strerror}", cure="name a readable file, or - for stdin"
            ) from error
    request = parse_request(data)
    if request.operation is not operation:
        raise UsageError(
            f"--request-json: the request asks for {request.operation.value!r}",
            cure=f"use `coldsnap {request.operation.value}`, or a request for {operation.value!r}",
        )
    return request
