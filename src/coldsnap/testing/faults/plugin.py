"""The fake engine, started so that it can be struck."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from coldsnap.cli.wiring import installed_engines
from coldsnap.engines.protocol import EnginePlugin, ResolvedModel
from coldsnap.errors import MissingCapability
from coldsnap.testing.engine import FakePlugin

__all__ = ["StruckPlugin", "real_plugin"]


class StruckPlugin(FakePlugin):
    """``FakePlugin`` whose program is ``coldsnap.testing.faults.worker``; ``desk`` is where that finds its strikes."""

    def __init__(self, desk: Path) -> None:
        self._desk = desk

    def unit_command(
        self, model: ResolvedModel, options: Mapping[str, object], *, host: str, port: int, python: str
    ) -> tuple[str, ...]:
        """See `EnginePlugin.unit_command`."""
        command = super().unit_command(model, options, host=host, port=port, python=python)
        program = (python, "-m", "coldsnap.testing.faults.worker", "--faults", str(self._desk))
        return (*program, *command[3:])


def real_plugin(desk: Path) -> EnginePlugin:
    """A real engine, which cannot be struck from inside. Raises MissingCapability when none is installed."""
    for name, plugin in installed_engines().items():
        if name != StruckPlugin.name and not plugin.installed(sys.executable, {}).problems:
            return plugin
    raise MissingCapability("no real engine is installed", cure="install coldsnap[transformers], or --no-real-engine")
