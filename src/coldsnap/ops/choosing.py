"""Which snapshot driver a capture uses when its recipe leaves that open."""

from __future__ import annotations

from coldsnap.core.drivers import DriverId, FeatureResult, admit_features, required_features
from coldsnap.core.request import Execution
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import Problem, Refused
from coldsnap.ops.planning import uses_devices
from coldsnap.ops.tools import Tools

__all__ = ["choose_driver"]

_NEWEST_FIRST = (DriverId.N610, DriverId.N580, DriverId.HOST)


def choose_driver(tools: Tools, plugin: EnginePlugin, execution: Execution) -> DriverId:
    """The newest snapshot driver that the engine as asked, and every host it is placed on, support (``auto``).

    One host is all there is so far. Raises Refused with every feature that is in the way of every driver.
    """
    candidates = [
        driver
        for driver in _NEWEST_FIRST
        if driver.value in plugin.supports.drivers and (driver is DriverId.HOST) != uses_devices(execution)
    ]
    if not candidates:
        where = "a GPU" if uses_devices(execution) else "the processor"
        raise Refused(
            "no snapshot driver fits",
            [
                Problem(
                    field="driver",
                    message=f"is to be chosen for {where}, where engine {plugin.name} supports none",
                    value=", ".join(sorted(plugin.supports.drivers)) or "none",
                    cure="ask the engine to compute elsewhere (serve: {device: ...}), or use another engine",
                )
            ],
        )
    refused: list[Problem] = []
    results: list[FeatureResult] = []
    for driver in candidates:
        features = required_features(driver, execution)
        known = {one.feature for one in results}  # drivers share features; each is proved once
        results.extend(tools.probe(tuple(one for one in features if one not in known)))
        problems = admit_features(features, results)
        if not problems:
            return driver
        refused.extend(problems)
    raise Refused(
        "no snapshot driver works here",
        tuple(dict.fromkeys(refused)),
        cure="`coldsnap doctor` shows each need with its cure",
    )
