"""The settings record an engine process starts from, and the model's identity inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from coldsnap.core.digest import Digest
from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.frames import first_problem
from coldsnap.engines.protocol import ResolvedModel
from coldsnap.errors import EngineError, InvalidDocument, Problem, UsageError

__all__ = ["SETTINGS_VARIABLE", "model_source_from", "model_source_options", "read_settings"]

SETTINGS_VARIABLE = "COLDSNAP_SETTINGS"
_SETTINGS_LIMIT_BYTES = 1 << 20


def read_settings(environment: Mapping[str, str]) -> WorkerSettings:
    """The settings record at the path that the one variable names.

    Raises UsageError without the variable or file, InvalidDocument for a record that breaks its contract,
    EngineError when `RANK` is set and is not the worker's global rank.
    """
    path = environment.get(SETTINGS_VARIABLE)
    if not path:
        raise UsageError(
            f"{SETTINGS_VARIABLE} is not set",
            cure="an engine process is started by coldsnap, which sets it to the path of the worker's settings",
        )
    try:
        with Path(path).open("rb") as file:
            data = file.read(_SETTINGS_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"the settings file {path} cannot be read: {error.strerror}") from error
    try:
        settings = WorkerSettings.model_validate_json(data)
    except ValidationError as error:
        problem = Problem(field=SETTINGS_VARIABLE, message=first_problem(error), value=path)
        raise InvalidDocument("worker settings", [problem]) from error
    claimed = environment.get("RANK")
    if claimed is not None and claimed != str(settings.rank):
        raise EngineError(
            f"worker {settings.worker} has global rank {settings.rank}, and its environment says RANK={claimed}",
            cure="start each worker with the rank of the execution graph, or without RANK",
            facts={"worker": settings.worker, "rank": settings.rank, "environment_rank": claimed},
        )
    return settings


def model_source_options(model: ResolvedModel) -> dict[str, object]:
    """The pinned model's identity as it travels in `WorkerSettings.options`."""
    return {"model_id": model.id, "revision": model.revision, "metadata_sha256": str(model.metadata_sha256)}


def model_source_from(options: Mapping[str, object]) -> ModelSource:
    """The identity that `model_source_options` wrote. Raises InvalidDocument on anything else."""
    try:
        model_id, revision, digest = (options[name] for name in ("model_id", "revision", "metadata_sha256"))
        if len(options) != 3 or not isinstance(model_id, str) or not isinstance(revision, str):
            raise ValueError("exactly model_id, revision and metadata_sha256 are expected")
        return ModelSource(model_id=model_id, revision=revision, metadata_sha256=Digest.parse(str(digest)))
    except (KeyError, ValueError) as error:
        problem = Problem(field="options", message=f"is not a pinned model: {error}", value=str(dict(options))[:200])
        raise InvalidDocument("worker settings", [problem]) from error
