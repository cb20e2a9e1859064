"""The ``coldsnap`` command: one file per command, and the one place where errors become exit codes."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import Annotated

import typer
from typer.exceptions import TyperException

from coldsnap import __version__
from coldsnap.cli.exits import EXIT_CODES, exit_code
from coldsnap.errors import ColdsnapError, InternalError, UsageError

__all__ = ["app", "run"]

_CODES = "\n\n".join(
    ["Exit codes: 0 done;", *(f"{code} {text};" for _, code, text in EXIT_CODES if code != 130), "130 interrupted."]
)

app = typer.Typer(
    name="coldsnap",
    help="Capture an initialised LLM inference engine once, restore it in seconds.",
    epilog=_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coldsnap {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Capture an initialised LLM inference engine once, restore it in seconds."""


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run() -> None:
    """The command, for the console script. Ends the process with the exit code of what happened."""
    from coldsnap.cli.commands import register
    from coldsnap.cli.output import print_error

    register(app)
    signal.signal(signal.SIGTERM, _on_terminate)
    as_json = "--json" in sys.argv
    try:
        code = app(standalone_mode=False)
        if code == exit_code(KeyboardInterrupt()):  # what typer makes of one that no operation took
            raise KeyboardInterrupt
    except (ColdsnapError, KeyboardInterrupt) as error:
        print_error(error, as_json=as_json)
        sys.exit(exit_code(error))
    except TyperException as error:
        usage = UsageError(error.format_message().rstrip("."), cure="`coldsnap COMMAND --help` shows what it takes")
        print_error(usage, as_json=as_json)
        sys.exit(exit_code(usage))
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more can be said
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - whatever escaped is a bug of ours, and exits as one
        bug = InternalError(f"a bug: {type(error).__name__}: {error}", cure="please report it with the lines below")
        bug.facts["log"] = traceback.format_exception(error)
        print_error(bug, as_json=as_json)
        sys.exit(exit_code(bug))
    sys.exit(code if isinstance(code, int) else 0)
