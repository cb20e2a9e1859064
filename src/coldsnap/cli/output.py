"""What commands print: one JSON object with ``--json``, tables and sentences for people otherwise."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from coldsnap.cli.exits import exit_code
from coldsnap.errors import ColdsnapError, InvalidDocument, Refused

__all__ = ["error_object", "print_error", "print_json", "print_lines", "print_table", "printable", "size"]

_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_HALF = re.compile("[\ud800-\udfff]")
_BYTE = range(0xDC80, 0xDD00)  # how Python keeps a byte of a file name that is no UTF-8


def size(num_bytes: int) -> str:
    """Bytes for people, in powers of 1024: ``268.4 MiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def printable(text: str) -> str:
    """The text with what no terminal should be sent written as an escape; lines and tabs stay.

    Control characters, letters that turn the direction of others, and the bytes of file names that are no UTF-8.
    """
    return _ODD.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code in _BYTE:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _whole(value: object) -> object:
    """The value with half surrogates written as escapes: they are no text, and most readers of JSON refuse them."""
    if isinstance(value, str):
        return _HALF.sub(_escape, value)
    if isinstance(value, Mapping):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value


def print_json(value: object) -> None:
    """One JSON object on stdout, indented, keys in the given order."""
    text = json.dumps(value, indent=2, default=str)
    if "\\ud" in text:
        text = json.dumps(_whole(json.loads(text)), indent=2)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_lines(lines: Iterable[str], *, as_is: bool = False) -> None:
    """Plain lines on stdout, no markup, no wrapping. ``as_is``: somebody else's text, shown with its own colours."""
    for line in lines:
        sys.stdout.write((line if as_is else printable(line)) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout; cells are text, never markup."""
    table = Table(
        title=printable(title) if title is not None else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for column in columns:
        table.add_column(printable(column), overflow="fold")
    console = Console(highlight=False, markup=False)
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)


def error_object(error: BaseException) -> dict[str, object]:
    """An error as the JSON that ``--json`` prints: kind, message, problems, cure, facts, what was undone."""
    result: dict[str, object] = {
        "error": type(error).__name__,
        "message": error.message if isinstance(error, ColdsnapError) else _said(error),
        "exit_code": exit_code(error),
    }
    if isinstance(error, ColdsnapError):
        result |= {"cure": error.cure, "facts": error.facts}
    if isinstance(error, InvalidDocument | Refused):
        result["problems"] = [p.document() for p in error.problems]
    if notes := getattr(error, "__notes__", ()):
        result["notes"] = list(notes)
    return result


def _said(error: BaseException) -> str:
    """Its message; an interrupt that met nothing under way has none of its own."""
    return str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)


def print_error(error: BaseException, *, as_json: bool) -> None:
    """For people on stderr; with ``--json`` also as an object on stdout."""
    if as_json:
        print_json(error_object(error))
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(printable(f"coldsnap: {_said(error)}"), style="red")
    if isinstance(error, ColdsnapError):
        for name, fact in error.facts.items():
            if name == "log" and isinstance(fact, list | tuple):
                for line in "".join(f"{one.rstrip()}\n" for one in map(str, fact)).splitlines():
                    console.print(printable(f"    | {line}"))
    for note in getattr(error, "__notes__", ()):
        console.print(printable(f"  {note}"))
