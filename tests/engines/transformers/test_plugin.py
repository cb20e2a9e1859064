"""The outer half: quick to import, exact about what it pins."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from coldsnap.core.execution import Execution, worker_identity
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.errors import UserError
from coldsnap.testing.checkpoint import write_checkpoint


def test_importing_it_imports_no_engine() -> None:
    code = (
        "import sys, coldsnap.engines.transformers.plugin as p; p.PLUGIN.options({});"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_it_is_found_by_its_entry_point() -> None:
    (found,) = entry_points(group="coldsnap.engines", name="transformers")
    assert found.load() is PLUGIN


def test_the_command_and_the_settings_divide_what_there_is_to_say(tmp_path: Path) -> None:
    model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "m")))
    host = "0.0.0.0"  # noqa: S104 - said, not done
    command = PLUGIN.unit_command(model, {"num_threads": 2}, host=host, port=8080, python="/venv/bin/python")
    assert command[:3] == ("/venv/bin/python", "-m", "coldsnap.engines.transformers")
    facts = PLUGIN.read_command(command)
    assert (facts.model, facts.host, facts.port) == (model.path, "0.0.0.0", 8080)  # noqa: S104
    assert set(PLUGIN.settings_options(model, {})) == {"model_id", "revision", "metadata_sha256"}


def test_a_command_of_another_engine_is_refused() -> None:
    with pytest.raises(UserError, match="no command of the transformers engine"):
        PLUGIN.read_command(("vllm", "serve", "m"))


def test_one_worker_is_alone_in_its_world() -> None:
    execution = PLUGIN.execution({}, unit="u7")
    assert isinstance(execution, Execution)
    (worker,) = execution.workers
    identity = worker_identity(execution, worker.id)
    assert (worker.unit, worker.device_slots, identity.rank, identity.process_slot) == ("u7", (), 0, 0)
