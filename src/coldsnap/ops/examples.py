"""The example model of an engine, made once and kept in the user's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import HostError, UserError

__all__ = ["CACHE", "example_model"]

CACHE = Path("~/.cache/coldsnap/models")


def example_model(plugin: EnginePlugin, cache: Path = CACHE, *, random: str | None = None) -> Path:
    """The folder of the engine's example model, made if it is not there. The engine runs in a process of its own.

    ``random`` asks for random weights of that size instead.

    Raises UserError for an engine without one, HostError with the last line of what failed.
    """
    cache = cache.expanduser()
    made = plugin.example_model_command(cache, random=random)
    if made is None:
        raise UserError(f"engine {plugin.name} has no example model", cure="name a checkpoint with --model")
    command, path = made
    if path.is_dir():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not path.is_dir():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise HostError(
            f"the example model could not be made: {lines[-1]}",
            cure="install coldsnap[demo], check the network, or name a checkpoint with --model",
            facts={"log": lines[-20:]},
        )
    return path
