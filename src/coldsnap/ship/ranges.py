"""A range of a file over HTTP, taken at its word only as far as it can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from coldsnap.errors import RemoteError
from coldsnap.ship.faults import remote_error
from coldsnap.ship.http import Answer, Http
from coldsnap.ship.secret import Secret

__all__ = ["read_range"]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(?:\d{1,19}|\*)")


def read_range(
    http: Http, url: str, offset: int, size: int, *, headers: Mapping[str, str | Secret], what: str
) -> Iterator[memoryview]:
    """``size`` bytes from ``offset`` of what ``url`` leads to.

    Raises RemoteError: ``wrong_length`` for another or an impossible range and for bytes too many, ``truncated``.
    """
    if size == 0:
        return
    wanted = {**headers, "Range": f"bytes={offset}-{offset + size - 1}"}
    try:
        answer = http.send("GET", url, what=what, headers=wanted, ok=(200, 206))
    except RemoteError as error:
        if error.facts.get("status") == 416:
            message = f"{error.place} has no bytes {offset} to {offset + size - 1}: it is shorter"
            raise remote_error("wrong_length", message, place=error.place) from error
        raise
    with answer:
        skip = _skipped(answer, offset, size)
        done = 0
        for piece in answer.pieces():
            if skip >= len(piece):
                skip -= len(piece)
                continue
            part = piece[skip:]
            skip = 0
            if done + len(part) > size and answer.status == 206:
                message = f"{answer.place} sent more than the {size} bytes that were asked for"
                raise remote_error("wrong_length", message, place=answer.place)
            part = part[: size - done]
            done += len(part)
            yield part
            if done == size:
                break
    if done < size:
        message = f"{answer.place} ended its answer after {done} of {size} bytes"
        raise remote_error("truncated", message, place=answer.place)


def _skipped(answer: Answer, offset: int, size: int) -> int:
    """The bytes of the answer before those that were asked for: a server may send the whole file."""
    if answer.status == 200:
        if answer.length is not None and answer.length < offset + size:
            message = f"{answer.place} has {answer.length} bytes, and byte {offset + size - 1} was asked for"
            raise remote_error("wrong_length", message, place=answer.place)
        return offset
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or (int(match[1]), int(match[2])) != (offset, offset + size - 1):
        shown = answer.headers.get("content-range", "nothing")[:80]
        message = f"{answer.place} answered {shown} when asked for bytes {offset} to {offset + size - 1}"
        raise remote_error("wrong_length", message, place=answer.place)
    return 0
