"""How the jobs speak: one line an act on standard error, with the seconds since the start.

Standard output belongs to the job's result, so that `./run demo --json` prints one object and nothing else.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_START = time.monotonic()


class Trouble(Exception):
    """Something is missing. Holds what, and what the reader can do about it."""

    def __init__(self, message: str, cure: str = "") -> None:
        super().__init__(message)
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.args[0]}\n  -> {self.cure}" if self.cure else str(self.args[0])


def say(line: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - _START:6.1f} s] {line}\n")
    sys.stderr.flush()


def call(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    to_stdout: bool = False,
    limit_s: float | None = None,
) -> int:
    """Run a command of which the user sees everything, on standard error unless its output is the job's result.

    Its exit status; 124 when it was ended because it took longer than `limit_s`.
    On Ctrl-C or SIGTERM the command is told too and gets the time it needs to clean up; a second Ctrl-C kills it.
    """
    argv = [str(word) for word in command]
    say(f"$ {shlex.join(argv)}")
    sys.stdout.flush()
    try:
        process = subprocess.Popen(argv, stdout=None if to_stdout else sys.stderr, env=env, cwd=cwd)
    except FileNotFoundError as error:
        raise Trouble(f"there is no {argv[0]} here") from error
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        say(f"ended after {limit_s:.0f} s")
        process.terminate()
        process.wait()
        return 124
    except BaseException as reason:
        if not isinstance(reason, KeyboardInterrupt):
            process.terminate()  # the terminal sends Ctrl-C to both of us, SIGTERM comes to one
        try:
            process.wait()
        except (KeyboardInterrupt, SystemExit):
            process.kill()
            process.wait()
        raise


def quiet(
    command: Sequence[str | Path], *, timeout_s: float = 600, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it says; messages are English whatever the machine's language is."""
    argv = [str(word) for word in command]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError as error:
        raise Trouble(f"there is no {argv[0]} here") from error
    except subprocess.TimeoutExpired as error:
        raise Trouble(f"{argv[0]} took longer than {timeout_s:.0f} s: {shlex.join(argv)}") from error
