"""The ``coldsnap`` command: its console script and ``python -m coldsnap.cli``.

What it needs takes a good part of a second to import, and Ctrl-C is as likely then as later. So this file imports
nothing but the interpreter's own `sys` before it is ready for that.
"""

import sys

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Ends the process with the exit code of what happened."""
    try:
        from coldsnap.cli.main import run

        run()
    except KeyboardInterrupt:  # `run` takes care of one that comes while it does something
        sys.stderr.write("coldsnap: interrupted\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
