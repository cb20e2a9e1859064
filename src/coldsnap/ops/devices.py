"""The GPUs of a launch's units on this machine: what they are, how a process is told of them, what they were before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from coldsnap.capsule.cuda.inventory import Gpu, chosen_gpus, device_facts, selector_problems
from coldsnap.core.compat import HostFacts
from coldsnap.core.launch import Launch, Unit
from coldsnap.errors import InternalError, Problem, Refused
from coldsnap.ops.tools import Tools

__all__ = [
    "VISIBLE_DEVICES",
    "device_environment",
    "device_map",
    "launch_device_problems",
    "unit_facts",
    "unit_gpus",
]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def launch_device_problems(tools: Tools, launch: Launch) -> Iterator[Problem]:
    """Every selector of a unit that names no GPU here, and environments that would choose devices behind our back."""
    if not any(unit.devices for unit in launch.units):
        return
    inventory = tools.accelerator.inventory()
    for index, unit in enumerate(launch.units):
        yield from selector_problems(inventory, unit.devices, field=f"launch.units[{index}].devices")
        if VISIBLE_DEVICES in unit.environment:
            yield Problem(
                field=f"launch.units[{index}].environment.{VISIBLE_DEVICES}",
                message="chooses devices, which is for launch.units[].devices to do",
                value=unit.environment[VISIBLE_DEVICES],
                cure="take it out, and name the devices (in a recipe: devices: [...])",
            )


def unit_gpus(tools: Tools, unit: Unit) -> tuple[Gpu, ...]:
    """The GPUs of a unit, by slot. Raises Refused for a selector that names none here."""
    if not unit.devices:
        return ()
    inventory = tools.accelerator.inventory()
    problems = selector_problems(inventory, unit.devices, field=f"launch.units[{unit.index}].devices")
    if problems:
        raise Refused(f"the devices of unit {unit.id}", problems)
    return tuple(gpu for gpu in chosen_gpus(inventory, unit.devices) if gpu is not None)


def unit_facts(tools: Tools, unit: Unit) -> HostFacts:
    """This machine as the unit's compatibility compares it. A selector that names no GPU here leaves a gap."""
    facts = tools.host_facts()
    if not unit.devices:
        return facts
    inventory = tools.accelerator.inventory()
    gpus = [gpu for gpu in chosen_gpus(inventory, unit.devices) if gpu is not None]
    return replace(facts, devices=device_facts(gpus), cuda_userspace=inventory.cuda_userspace)


def device_environment(tools: Tools, unit: Unit) -> dict[str, str]:
    """How a process of the unit is told which devices it has: by UUID, so that no order can be mistaken."""
    gpus = unit_gpus(tools, unit)
    return {VISIBLE_DEVICES: ",".join(gpu.uuid for gpu in gpus)} if gpus else {}


def device_map(captured: tuple[str, ...], here: tuple[Gpu, ...]) -> Mapping[str, str]:
    """UUID at capture -> UUID here, slot by slot and for every slot; nothing when all are the same."""
    if len(captured) != len(here):
        raise InternalError(
            f"{len(captured)} devices were captured and {len(here)} are here, which a gate should have refused",
            cure="report this",
        )
    pairs = {old: gpu.uuid for old, gpu in zip(captured, here, strict=True)}
    return {} if all(old == new for old, new in pairs.items()) else pairs
