"""A fake engine over a fresh checkpoint, for tests of what surrounds an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.settings import model_source_from
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN, FakeEngine

MakeFake = Callable[..., FakeEngine]
StartFake = Callable[..., "subprocess.Popen[str]"]
BASE = 0x5100_0000_0000


@pytest.fixture
def make_fake(tmp_path: Path) -> MakeFake:
    """`make_fake(kind=FakeEngine, seed=0, **options)`: not loaded."""

    def make(*, kind: type[FakeEngine] = FakeEngine, seed: int = 0, **options: object) -> FakeEngine:
        model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "checkpoint", seed=seed)))
        source = model_source_from(PLUGIN.settings_options(model, {}))
        return kind(model.path, source, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def start_fake(tmp_path: Path) -> StartFake:
    """`start_fake(**settings)`: a process of its own, over a checkpoint like `make_fake`'s, as coldsnap starts any.

    Its control socket will be `tmp_path / "w.sock"`.
    """

    def start(**settings: object) -> subprocess.Popen[str]:
        model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "checkpoint")))
        record = {
            "worker": "w0",
            "unit": "u0",
            "rank": 0,
            "socket": str(tmp_path / "w.sock"),
            "options": PLUGIN.settings_options(model, {}),
        }
        path = tmp_path / "settings.json"
        path.write_text(WorkerSettings.model_validate({**record, **settings}).model_dump_json())
        command = PLUGIN.unit_command(model, {"shuffle": 3}, host="127.0.0.1", port=8000, python=sys.executable)
        environment = {"PATH": os.environ["PATH"], "COLDSNAP_SETTINGS": str(path)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start
