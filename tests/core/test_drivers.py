"""The driver contracts, as the table of the contract says."""

from __future__ import annotations

import pytest

from coldsnap.core.drivers import DRIVERS, DriverId, GraphPolicy


@pytest.mark.parametrize(
    ("driver", "boundary", "major", "features", "one", "more"),
    [
        ("host", "process-tree", 0, ("criu-process-tree",), "disabled", "disabled"),
        (
            "n580",
            "pre-cuda-process-template",
            580,
            ("criu-process-template", "cuda-fresh-state", "cuda-vmm-exact-address"),
            "recreate-from-plan",
            "recreate-from-plan",
        ),
        (
            "n610",
            "initialized-cuda-process-state",
            580,
            (
                "criu-process-tree",
                "cuda-checkpoint-api",
                "cuda-checkpoint-roundtrip",
                "cuda-initialized-state",
                "cuda-vmm-exact-address",
            ),
            "preserve-exec",
            "preserve-nccl-exec",
        ),
    ],
)
def test_contract(driver: str, boundary: str, major: int, features: tuple[str, ...], one: str, more: str) -> None:
    contract = DRIVERS[DriverId(driver)]
    assert contract.id == driver
    assert contract.capture_boundary == boundary
    assert contract.minimum_nvidia_driver_major == major
    assert contract.base_features == features
    assert contract.default_graph_policy(1) is GraphPolicy(one)
    assert contract.default_graph_policy(8) is GraphPolicy(more)


def test_every_driver_has_a_contract_of_its_own() -> None:
    assert set(DRIVERS) == set(DriverId)
    for attribute in ("abi", "capture_boundary", "replay_semantics"):
        assert len({getattr(contract, attribute) for contract in DRIVERS.values()}) == len(DRIVERS)
    for contract in DRIVERS.values():
        assert all(contract.default_graph_policy(n) in contract.graph_policies for n in (1, 2))
