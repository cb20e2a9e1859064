"""``python -m coldsnap.testing.faults.cli FOLDER VERB ...``: the ``coldsnap`` command with a strike in it.

``FOLDER/command.json`` is the strike, ``FOLDER/notes`` is where points are noted. Everything else is the command's own:
this is the one way to strike it, because the command itself looks for no such thing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coldsnap.cli.main import run
from coldsnap.core.points import install
from coldsnap.testing.faults.strikes import Notes, Striker, read_strike
from coldsnap.testing.faults.worker import NOTES

__all__ = ["COMMAND"]

COMMAND = "command.json"


def main() -> None:
    """Ends the process as the command does."""
    folder = Path(sys.argv.pop(1))
    strike = read_strike(folder / COMMAND)
    install(Striker(lambda: strike, Notes(folder / NOTES), role="controller"))
    run()


if __name__ == "__main__":
    main()
