"""Log files that packages open when they are imported, and keep open.

flashinfer (0.6.14) opens ``flashinfer_jit.log`` in its folder of compiled kernels, in each process, and who compiles
there makes it longer. A process that is frozen with it can be restored while the file has the same size, so mostly not.
What is written there goes to stderr as well, and so to the unit's log: the file is given up.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["close_log_files"]

_LOGGERS = (("flashinfer.jit.core", "logger"),)  # no logging.getLogger finds this one


def close_log_files() -> int:
    """Take the files away from those loggers, in this process; how many there were. Call it before a freeze."""
    closed = 0
    for module, name in _LOGGERS:
        logger = getattr(sys.modules.get(module), name, None)
        if not isinstance(logger, logging.Logger):
            continue
        for handler in [one for one in logger.handlers if isinstance(one, logging.FileHandler)]:
            logger.removeHandler(handler)
            handler.close()
            closed += 1
    return closed
