"""The defaults of a request that depend on its driver, its engine and its number of workers.

They are laid under the document before it is checked, so that what the document says, even ``false``, stands.
"""

from __future__ import annotations

from typing import Any

from coldsnap.core.drivers import DRIVERS, DriverId
from coldsnap.core.policy import Materialize

__all__ = ["defaults_for", "with_defaults"]


def defaults_for(driver: DriverId, *, num_workers: int, engine: str) -> dict[str, Any]:
    """The defaults that depend on the driver, the number of workers and the engine, as a request's ``policy``."""
    contract = DRIVERS[driver]
    materialize = Materialize.ASYNC if engine == "vllm" else Materialize.OFF
    return {
        "process": {
            "backend": contract.backend.value,
            "graph_policy": contract.default_graph_policy(num_workers).value,
        },
        "weights": {"native": {"materialize": materialize.value}},
    }


def with_defaults(tree: Any) -> Any:
    """``tree`` over the defaults of its driver. A part that is not an object is left for the checks to report."""
    driver, engine = _inside(tree, "snapshot_driver", "id"), _inside(tree, "launch", "engine")
    workers = _inside(tree, "launch", "execution", "workers")
    if not isinstance(driver, str) or driver not in list(DriverId):
        return tree
    defaults = defaults_for(
        DriverId(driver),
        num_workers=len(workers) if isinstance(workers, list) else 1,
        engine=engine if isinstance(engine, str) else "",
    )
    return _laid_over({"policy": defaults}, tree)


def _inside(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _laid_over(defaults: dict[str, Any], tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    merged = dict(tree)
    for key, default in defaults.items():
        if key not in merged:
            merged[key] = default
        elif isinstance(default, dict):
            merged[key] = _laid_over(default, merged[key])
    return merged
