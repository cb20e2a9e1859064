"""What an engine process starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.settings import model_source_from, model_source_options, read_settings
from coldsnap.errors import EngineError, InvalidDocument, UsageError
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN

RECORD = {"worker": "w0", "unit": "u0", "rank": 1, "socket": "/run/coldsnap/worker-w0.sock"}


def put(tmp_path: Path, document: object) -> dict[str, str]:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(document))
    return {"COLDSNAP_SETTINGS": str(path)}


def test_the_record_is_read(tmp_path: Path) -> None:
    assert read_settings(put(tmp_path, RECORD)) == WorkerSettings.model_validate(RECORD)


def test_the_runtimes_rank_may_agree_and_never_differ(tmp_path: Path) -> None:
    environment = put(tmp_path, RECORD)
    assert read_settings({**environment, "RANK": "1", "LOCAL_RANK": "0"}).rank == 1
    for wrong in ("0", "", "01"):
        with pytest.raises(EngineError, match="global rank 1"):
            read_settings({**environment, "RANK": wrong})


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="COLDSNAP_SETTINGS"):
        read_settings({})
    with pytest.raises(UsageError, match="cannot be read"):
        read_settings({"COLDSNAP_SETTINGS": str(tmp_path / "gone")})
    with pytest.raises(InvalidDocument, match="extra"):
        read_settings(put(tmp_path, {**RECORD, "extra": 1}))


def test_a_models_identity_survives_the_options(tmp_path: Path) -> None:
    model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "m")))
    source = model_source_from(json.loads(json.dumps(model_source_options(model))))
    assert (source.model_id, source.revision, source.metadata_sha256) == ("m", model.revision, model.metadata_sha256)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_id": "m", "revision": "r"},
        {"model_id": "m", "revision": "r", "metadata_sha256": "sha256:0"},
        {"model_id": 3, "revision": "r", "metadata_sha256": "sha256:" + "0" * 64},
        {"model_id": "m", "revision": "r", "metadata_sha256": "sha256:" + "0" * 64, "more": 1},
    ],
)
def test_options_that_pin_no_model_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidDocument, match="not a pinned model"):
        model_source_from(options)
