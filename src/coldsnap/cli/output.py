"""What commands print: one JSON object with ``--json``, tables and sentences for people otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from coldsnap.cli.exits import exit_code
from coldsnap.errors import ColdsnapError, InvalidDocument, Refused

__all__ = ["error_object", "print_error", "print_json", "print_lines", "print_table", "size"]


def size(num_bytes: int) -> str:
    """Bytes for people, in powers of 1024: ``268.4 MiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def print_json(value: object) -> None:
    """One JSON object on stdout, indented, keys in the given order."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on stdout, no markup, no wrapping."""
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout; cells are text, never markup."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    console = Console(highlight=False, markup=False)
    for row in rows:
        table.add_row(*row)
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
    console.print(f"coldsnap: {_said(error)}", style="red")
    if isinstance(error, ColdsnapError):
        for name, fact in error.facts.items():
            if name == "log" and isinstance(fact, list | tuple):
                for line in "".join(f"{one.rstrip()}\n" for one in map(str, fact)).splitlines():
                    console.print(f"    | {line}")
    for note in getattr(error, "__notes__", ()):
        console.print(f"  {note}")
