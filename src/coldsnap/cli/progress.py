"""Progress on the terminal: a bar per phase on stderr; nothing but lines when stderr is not a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

from coldsnap.cli.output import printable
from coldsnap.ops.report import Advance

__all__ = ["TerminalReporter"]


class TerminalReporter:
    """Shows phases as they run. ``quiet`` keeps warnings and drops the rest."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._bars = self._console.is_terminal and not quiet
        self._lock = threading.Lock()
        self._live: Progress | None = None
        self._open = 0

    @contextmanager
    def phase(self, title: str, *, total_bytes: int | None = None) -> Iterator[Advance]:
        started, title = time.monotonic(), printable(title)
        if not self._bars:
            yield lambda num_bytes, /: None
            if not self._quiet:
                self._console.print(f"  {title}  {time.monotonic() - started:.2f} s", markup=False)
            return
        progress = self._enter()
        task = progress.add_task(title, total=total_bytes)
        try:
            yield lambda num_bytes, /: progress.advance(task, num_bytes)
            progress.console.print(f"  {title}  {time.monotonic() - started:.2f} s", markup=False)
        finally:
            progress.remove_task(task)
            self._leave()

    def note(self, text: str) -> None:
        if not self._quiet:
            self._console.print(printable(f"  {text}"), markup=False)

    def warn(self, text: str) -> None:
        self._console.print(printable(f"  warning: {text}"), markup=False, style="yellow")

    def _enter(self) -> Progress:
        with self._lock:
            if self._live is None:
                self._live = Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(),
                    TransferSpeedColumn(),
                    console=self._console,
                    transient=True,
                )
                self._live.start()
            self._open += 1
            return self._live

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._live is not None:
                self._live.stop()
                self._live = None
