"""``python -m coldsnap.testing.faults.worker --faults FOLDER ...``: the fake engine as a process that can be struck.

The rest of the command line is ``coldsnap.testing.engine_main``'s. ``FOLDER/worker.json`` is the strike that is due, if
any, and ``FOLDER/notes`` is where points are noted; both are looked up each time, so it works in a restored process
too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coldsnap.core.points import install
from coldsnap.testing import engine_main
from coldsnap.testing.faults.boundaries import watch
from coldsnap.testing.faults.strikes import Notes, Striker, read_strike

__all__ = ["NOTES", "STRIKE", "YARD"]

STRIKE = "worker.json"
NOTES = "notes"
YARD = "yard"


def main() -> int:
    """As the fake engine's."""
    at = sys.argv.index("--faults")
    folder = Path(sys.argv[at + 1])
    del sys.argv[at : at + 2]
    striker = Striker(lambda: read_strike(folder / STRIKE), Notes(folder / NOTES), role="worker")
    install(striker)
    watch(striker, folder.parent / YARD)
    return engine_main.main()


if __name__ == "__main__":
    sys.exit(main())
