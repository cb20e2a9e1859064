"""Why a vLLM server cannot be captured as a request says: every reason, before anything of it starts.

What an option or a variable may not be is a table (`refusals`). Here are the reasons that need two facts at once: the
command and the policy, the command and the driver, a variable and what may be secret, the command and what the
interpreter has. What can be known in the running tree alone is looked at there: what the configuration turned out to
be (`refusals.fact_problems`, in the front), copies that an earlier sleep left (`CuMemMemory.leftovers`), another
checkpoint (`local_model.pinned_files`), and connections that lead out of the tree (`capsule.hygiene`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from coldsnap.core.launch import HOST_IMAGE, Unit
from coldsnap.core.request import DriverId, GraphPolicy, OperationRequest
from coldsnap.engines.vllm.flags import unknown_flags
from coldsnap.engines.vllm.installed import look_for_vllm
from coldsnap.engines.vllm.options import CommandLine, Device, number_of, read_command
from coldsnap.engines.vllm.refusals import SLEEP_MODE, environment_problems, flag, option_problems
from coldsnap.errors import ColdsnapError, Problem

__all__ = ["capture_problems"]

API_KEY = "VLLM_API_KEY"
_TLS_FILES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
_TEMPLATE_READERS = ("auto", "hf", "safetensors")


def capture_problems(request: OperationRequest) -> Iterator[Problem]:
    """See `EnginePlugin.capture_problems`."""
    for index, unit in enumerate(request.launch.units):
        place = f"launch.units[{index}]"
        try:
            line = read_command(unit.command)
        except ColdsnapError as error:
            yield Problem(
                field=f"{place}.command", message=error.message, value=" ".join(unit.command[:4]), cure=error.cure
            )
            continue
        command = f"{place}.command"
        yield from option_problems(line.options, field=lambda name, command=command: f"{command}.{flag(name)}")  # type: ignore[misc]
        yield from _device_problems(command, line, request)
        yield from _graph_problems(command, line, request)
        yield from _worker_problems(command, line)
        yield from _environment_problems(f"{place}.environment", unit, request)
        yield from _tls_problems(command, line, unit)
        if unit.image == HOST_IMAGE:
            yield from _interpreter_problems(command, line, unit)


def _device_problems(command: str, line: CommandLine, request: OperationRequest) -> Iterator[Problem]:
    """The loader is ours, and sleep mode is on exactly where there is a GPU."""
    reader = line.options.get("load_format")
    if reader != "coldsnap":
        yield Problem(
            field=f"{command}.--load-format",
            message="is not coldsnap's, so nobody would see which bytes are the checkpoint's",
            value=str(reader),
            cure="write --load-format coldsnap, and the other one into --model-loader-extra-config as load_format",
        )
    place, said = f"{command}.{flag(SLEEP_MODE.name)}", line.options.get(SLEEP_MODE.name)
    driver = request.snapshot_driver.id
    if SLEEP_MODE.judge(said) and said is not None:
        yield SLEEP_MODE.problem(place, said)
    elif driver is DriverId.HOST and said:
        cure = "leave it out: vLLM has sleep mode on GPUs alone"
        yield Problem(field=place, message="needs a GPU, and driver host has none", value="true", cure=cure)
    elif driver is not DriverId.HOST and not said:
        cure = f"write {flag(SLEEP_MODE.name)}"
        yield Problem(field=place, message=f"is missing, and {SLEEP_MODE.message}", value="absent", cure=cure)
    wanted = _reader(line)
    if driver is DriverId.N580 and wanted not in _TEMPLATE_READERS:
        yield Problem(
            field=f"{command}.--model-loader-extra-config",
            message="names a reader that uses memory of the device, which a template does not have yet",
            value=wanted,
            cure=f"use one of {', '.join(_TEMPLATE_READERS)}, or driver n610",
        )


def _graph_problems(command: str, line: CommandLine, request: OperationRequest) -> Iterator[Problem]:
    process = request.policy.process
    if not line.options.get("enforce_eager") or request.snapshot_driver.id is DriverId.HOST:
        return
    if process.graph_policy is not GraphPolicy.DISABLED or process.async_graphs:
        said = f"graph_policy {process.graph_policy.value}, async_graphs {str(process.async_graphs).lower()}"
        yield Problem(
            field=f"{command}.--enforce-eager",
            message=f"makes no CUDA graphs, and policy.process asks for them ({said})",
            value="true",
            cure="leave it out; or say in the request that `coldsnap plan` prints that there are none: "
            "policy.process.graph_policy disabled and async_graphs false",
        )


def _worker_problems(command: str, line: CommandLine) -> Iterator[Problem]:
    """Records, sockets and packs are a worker's own throughout; what several of them share is not proved."""
    try:
        workers = number_of(line.options, "tensor_parallel_size", 1)
    except ColdsnapError as error:
        yield Problem(field=f"{command}.--tensor-parallel-size", message=error.message, cure=error.cure)
        return
    if workers != 1:
        yield Problem(
            field=f"{command}.--tensor-parallel-size",
            message="several workers of one engine share memory of several GPUs, and no such tree was ever captured",
            value=str(workers),
            cure="use 1",
        )


def _environment_problems(place: str, unit: Unit, request: OperationRequest) -> Iterator[Problem]:
    yield from environment_problems(unit.environment, field=place)
    allowed = request.extension.allow_secrets if request.extension is not None else ()
    if unit.environment.get(API_KEY) and API_KEY not in allowed:
        yield Problem(
            field=f"{place}.{API_KEY}",
            message="is a key that would be in the process image, and nobody has allowed that",
            cure=f"write allow_secrets: [{API_KEY}] into the recipe; the artifact is then not publishable",
        )


def _tls_problems(command: str, line: CommandLine, unit: Unit) -> Iterator[Problem]:
    """Files that an `open` would not find. Below a mount the unit's own look decides."""
    if unit.image != HOST_IMAGE or unit.mounts:
        return
    for name in _TLS_FILES:
        path = line.options.get(name)
        if isinstance(path, str) and path.startswith("/") and not Path(path).is_file():
            cure = "put it there, or name another"
            yield Problem(field=f"{command}.{flag(name)}", message="is no file", value=path, cure=cure)


def _interpreter_problems(command: str, line: CommandLine, unit: Unit) -> Iterator[Problem]:
    python = unit.command[0]
    found = look_for_vllm(python, unit.environment)
    for problem in found.problems:
        yield Problem(
            field=f"{command}[0]",
            message=f"{problem.field} {problem.message}" + (f" (it has {problem.value})" if problem.value else ""),
            value=python,
            cure=problem.cure,
        )
    if found.vllm is None or found.problems:
        return
    built = Device.CPU if found.for_processors else Device.CUDA
    if built is not line.device:
        yield Problem(
            field=f"{command}[0]",
            message=f"has vLLM {found.vllm.version} built for {built.value}, and {line.device.value} is asked for",
            value=python,
            cure=f"write serve: {{device: {built.value}}} in the recipe, or name another interpreter (python)",
        )
    for name, close in unknown_flags(found.vllm.folder, line.options):
        yield Problem(
            field=f"{command}.{flag(name)}",
            message=f"is no option of vLLM {found.vllm.version}",
            cure=f"did you mean {' or '.join(map(flag, close))}?" if close else "see `vllm serve --help`",
        )


def _reader(line: CommandLine) -> str:
    extra = line.options.get("model_loader_extra_config")
    try:
        read = json.loads(extra) if isinstance(extra, str) else {}
    except ValueError:
        return "auto"
    return str(read.get("load_format", "auto")) if isinstance(read, dict) else "auto"
