"""The settings records of a unit's workers, and the sockets beside them. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.settings import SETTINGS_VARIABLE, read_settings
from coldsnap.errors import EngineError

__all__ = ["read_all_settings", "run_folder", "settings_of_rank"]


def read_all_settings(environment: Mapping[str, str]) -> tuple[WorkerSettings, ...]:
    """The records of all workers of this unit, by process slot: the one that is named, and `settings-1.json` and on.

    Raises as `read_settings` does.
    """
    found = [read_settings(environment)]
    first = Path(environment[SETTINGS_VARIABLE])
    while (path := first.with_name(f"{first.stem}-{len(found)}{first.suffix}")).exists():
        found.append(read_settings({SETTINGS_VARIABLE: str(path)}))
    return tuple(found)


def settings_of_rank(environment: Mapping[str, str], rank: int) -> WorkerSettings:
    """The record of the worker that has this global rank. Raises EngineError when the unit has none."""
    records = read_all_settings(environment)
    for one in records:
        if one.rank == rank:
            return one
    ranks = [one.rank for one in records]
    raise EngineError(
        f"vLLM made a worker of rank {rank}, and this unit's workers have rank {', '.join(map(str, ranks))}",
        cure="let the command's parallel sizes agree with the recipe",
        facts={"rank": rank, "ranks": ranks},
    )


def run_folder(environment: Mapping[str, str]) -> Path:
    """Where the records, and the sockets of the front and of the engine processes are."""
    return Path(environment[SETTINGS_VARIABLE]).parent
