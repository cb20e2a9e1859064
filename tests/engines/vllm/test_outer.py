"""The outer half: quick to import, exact about what a unit runs, and a worker for each rank."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from coldsnap.core.execution import Execution, worker_identity
from coldsnap.engines.vllm.arguments import ENVIRONMENT, check_environment
from coldsnap.engines.vllm.options import read_command
from coldsnap.engines.vllm.outer import PLUGIN
from coldsnap.errors import InvalidDocument, UserError
from coldsnap.testing.checkpoint import write_checkpoint


def test_importing_it_imports_no_engine() -> None:
    code = (
        "import sys, coldsnap.engines.vllm.outer as p; p.PLUGIN.execution(p.PLUGIN.options({}));"
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_it_is_found_by_its_entry_point() -> None:
    (found,) = entry_points(group="coldsnap.engines", name="vllm")
    assert found.load() is PLUGIN


def test_the_command_runs_the_interpreter_that_has_vllm(tmp_path: Path) -> None:
    model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "m")))
    host = "0.0.0.0"  # noqa: S104 - said, not done
    command = PLUGIN.unit_command(model, {"max_model_len": 64}, host=host, port=8080, python="/venv/bin/python")
    assert command[:5] == ("/venv/bin/python", "-m", "coldsnap.engines.vllm", "serve", str(model.path))
    assert command[-4:] == ("--host", host, "--port", "8080")
    facts = PLUGIN.read_command(command)
    assert (facts.model, facts.host, facts.port) == (model.path, host, 8080)
    assert read_command(command).options["served_model_name"] == "m", "requests need not know the folder"


def test_the_settings_hold_the_model_and_nothing_of_the_command(tmp_path: Path) -> None:
    model = PLUGIN.resolve_model(str(write_checkpoint(tmp_path / "m")))
    assert set(PLUGIN.settings_options(model, {})) == {"model_id", "revision", "metadata_sha256"}


def test_a_command_of_another_engine_is_refused() -> None:
    with pytest.raises(UserError, match="no command of the vllm engine"):
        PLUGIN.read_command((sys.executable, "-m", "coldsnap.engines.transformers", "--model", "m"))


def test_what_is_compiled_goes_where_the_recipe_lets_it_travel() -> None:
    plain, travelling = PLUGIN.unit_environment(()), PLUGIN.unit_environment(("/srv/cache", "/srv/other"))
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert travelling[name].startswith("/srv/cache/")
        assert plain[name].startswith("/var/cache/coldsnap/vllm/")
        assert not plain[name].startswith("/run/coldsnap"), "the unit's home is memory, and in its image"
    assert len(set(travelling.values())) == len(travelling) - len(set(ENVIRONMENT)) + len(set(ENVIRONMENT.values()))
    check_environment(travelling)


def test_its_variables_keep_a_tree_to_itself() -> None:
    said = PLUGIN.unit_environment(())
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        "USE_LIBUV": "0",
    }
    assert {name: said[name] for name in wanted} == wanted


def test_one_gpu_is_one_worker_alone_in_its_world() -> None:
    execution = PLUGIN.execution({}, unit="u7")
    assert isinstance(execution, Execution)
    (worker,) = execution.workers
    identity = worker_identity(execution, worker.id)
    assert (worker.unit, worker.device_slots, identity.rank, identity.process_slot) == ("u7", (0,), 0, 0)
    assert [group.kind for group in execution.groups] == ["vllm:world"]
    assert PLUGIN.execution({"device": "cpu"}).workers[0].device_slots == ()


def test_tensor_parallel_ranks_are_workers_with_their_devices_and_groups() -> None:
    execution = PLUGIN.execution({"tensor-parallel-size": 4})
    assert [one.id for one in execution.workers] == ["w0", "w1", "w2", "w3"]
    assert [one.device_slots for one in execution.workers] == [(0,), (1,), (2,), (3,)]
    assert [worker_identity(execution, one.id).rank for one in execution.workers] == [0, 1, 2, 3]
    assert {group.kind: group.members for group in execution.groups} == {
        "vllm:world": ("w0", "w1", "w2", "w3"),
        "vllm:tensor": ("w0", "w1", "w2", "w3"),
    }
    assert execution.adapter.payload == {
        "device": "cuda",
        "tensor_parallel_size": 4,
        "workers": ["w0", "w1", "w2", "w3"],
    }


def test_options_that_are_refused_are_refused_wherever_they_are_read() -> None:
    for read in (PLUGIN.options, PLUGIN.execution):
        with pytest.raises(InvalidDocument, match=r"serve\.enable-lora"):
            read({"enable-lora": True})


def test_packs_are_written_in_the_background_by_default() -> None:
    assert PLUGIN.supports.default_materialize == "async"
    assert PLUGIN.supports.materialize == {"off", "async", "required"}
