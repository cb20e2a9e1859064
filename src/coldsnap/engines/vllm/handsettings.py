"""The settings of an export by hand: one switch, and one record. Needs neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from coldsnap.engines.frames import first_problem
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.errors import InvalidDocument, Problem, UsageError

__all__ = ["EXPORT_VARIABLE", "HandSettings", "read_hand_settings"]

EXPORT_VARIABLE = "COLDSNAP_EXPORT_MODEL_PAYLOAD"
_SETTINGS_LIMIT_BYTES = 1 << 20


class HandSettings(BaseModel):
    """The record that COLDSNAP_SETTINGS names: two folders, absolute. One `folder` serves one model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    kind: Literal["coldsnap-vllm-by-hand"]
    folder: str
    state_root: str

    @field_validator("folder", "state_root")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if not Path(value).is_absolute():
            raise ValueError(f"must be an absolute path, not {value!r}")
        return value


def read_hand_settings(environment: Mapping[str, str]) -> HandSettings | None:
    """The settings, when an export is asked for; None when it is not.

    Raises UsageError for a switch that is neither on nor off, or one without settings that can be read, and
    InvalidDocument for a record of another kind or with something wrong.
    """
    switch = environment.get(EXPORT_VARIABLE, "")
    if switch in ("", "0"):
        return None
    if switch != "1":
        raise UsageError(f"{EXPORT_VARIABLE} is {switch!r}", cure="set it to 1, or unset it")
    path = environment.get(SETTINGS_VARIABLE)
    if not path:
        raise UsageError(
            f"{EXPORT_VARIABLE} is set, and {SETTINGS_VARIABLE} is not",
            cure=f"let {SETTINGS_VARIABLE} name a file with the folder of the export and the state root",
        )
    try:
        with Path(path).open("rb") as file:
            data = file.read(_SETTINGS_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(
            f"the settings file {path} cannot be read: {error.strerror}", cure=f"check {SETTINGS_VARIABLE}"
        ) from error
    try:
        return HandSettings.model_validate_json(data)
    except ValidationError as error:
        problem = Problem(
            field=SETTINGS_VARIABLE,
            message=first_problem(error),
            value=path,
            cure='write {"format": 1, "kind": "coldsnap-vllm-by-hand", "folder": "/...", "state_root": "/..."}',
        )
        raise InvalidDocument("settings of an export by hand", [problem]) from error
