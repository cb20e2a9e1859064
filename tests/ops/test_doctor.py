"""The doctor names every need with its cure, and changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.cuda.accelerator import Accelerator
from coldsnap.capsule.cuda.inventory import Inventory
from coldsnap.capsule.hostfacts import host_facts
from coldsnap.core.drivers import FeatureResult, FeatureState
from coldsnap.engines.protocol import Installed
from coldsnap.errors import MissingCapability, Problem
from coldsnap.ops import doctor
from coldsnap.ops.doctor import Need, examine
from coldsnap.ops.tools import Tools
from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, fake_inventory
from coldsnap.testing.engine import PLUGIN, FakePlugin


class Incomplete(FakePlugin):
    """Needs packages that are not there."""

    def installed(self, python: str, environment: Mapping[str, str]) -> Installed:
        problems = [
            Problem(field=name, message="is not here", cure="pip install 'coldsnap[fake]'")
            for name in ("torch", "uvicorn")
        ]
        return Installed(python=python, versions={"torch": "2"}, problems=tuple(problems) if python == MISSING else ())


MISSING = sys.executable


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[FeatureState, str], None]:
    """Say what the round trip of freeze and restore gives, without one."""

    def say(state: FeatureState, reason: str) -> None:
        def probe(features: Any, **keywords: Any) -> tuple[FeatureResult, ...]:
            return tuple(FeatureResult(feature=one, state=state, reason=reason) for one in features)

        monkeypatch.setattr(doctor, "probe_features", probe)

    say(FeatureState.PASSED, "it works")
    return say


def needs(path: Path, engines: Any = None) -> dict[str, Need]:
    return {need.name: need for need in examine(path, engines if engines is not None else {"fake": PLUGIN})}


def test_a_state_root_to_be_made_is_fine_and_is_not_made(tmp_path: Path, probed: object) -> None:
    need = needs(tmp_path / "a" / "b")["state root"]
    assert (need.state, need.blocking) == ("ok", False)
    assert list(tmp_path.iterdir()) == []


def test_a_state_root_open_to_others_is_a_need_with_its_cure(tools: Tools, probed: object) -> None:
    tools.state.path.chmod(0o777)
    need = needs(tools.state.path)["state root"]
    assert (need.state, need.blocking) == ("missing", True)
    assert "chmod go-w" in need.cure


def test_packages_that_an_engine_lacks(tmp_path: Path, probed: object) -> None:
    need = needs(tmp_path, {"fake": Incomplete()})["engine fake"]
    assert (need.state, need.blocking) == ("missing", False), "another engine may be all that is wanted"
    assert need.found == "torch is not here; uvicorn is not here"
    assert need.cure == "pip install 'coldsnap[fake]'"


def test_an_engine_is_looked_for_in_other_interpreters_too(tmp_path: Path, probed: object) -> None:
    found = {need.name: need for need in examine(tmp_path, {"fake": Incomplete()}, pythons=["/venv/bin/python"])}
    assert found["engine fake"].state == "missing"
    other = found["engine fake in /venv/bin/python"]
    assert (other.state, other.found) == ("ok", "torch 2")


def test_no_criu_is_a_need_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed: object) -> None:
    def none(*arguments: object) -> None:
        raise MissingCapability("no usable CRIU", cure="run scripts/install-criu as root")

    monkeypatch.setattr(doctor, "find_criu", none)
    need = needs(tmp_path)["CRIU"]
    assert (need.state, need.blocking, need.cure) == ("missing", True, "run scripts/install-criu as root")
    assert "freeze and restore" not in needs(tmp_path)


def test_every_missing_need_has_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed: Callable[[FeatureState, str], None]
) -> None:
    probed(FeatureState.FAILED, "the kernel lacks it")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.access", lambda *arguments: False)
    found = needs(tmp_path / "a")
    assert found["root"].blocking
    assert found["state root"].blocking
    assert all(need.cure for need in found.values() if need.state == "missing")


def test_a_round_trip_that_fails_says_why(tmp_path: Path, probed: Callable[[FeatureState, str], None]) -> None:
    probed(FeatureState.FAILED, "the kernel lacks it")
    found = needs(tmp_path)
    if "freeze and restore" in found:  # asked as root only, with a CRIU
        assert found["freeze and restore"].found == "the kernel lacks it"
        assert found["freeze and restore"].blocking
    else:
        assert found["root"].blocking or found["CRIU"].blocking


def on_gpus(path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator) -> dict[str, Need]:
    facts = host_facts()
    monkeypatch.setattr(doctor, "host_facts", lambda: replace(facts, nvidia_driver="580.159.04"))
    return {need.name: need for need in examine(path, {"fake": PLUGIN}, accelerator)}


def test_gpus_and_the_drivers_for_them_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed: Callable[[FeatureState, str], None]
) -> None:
    machine = FakeCheckpoints().accelerator(fake_inventory(2))
    found = on_gpus(tmp_path, monkeypatch, machine)
    assert (found["GPUs"].state, found["GPUs"].found) == ("ok", "0: Fake GPU, 1: Fake GPU")
    assert found["snapshot driver n610"].found == "all 5 features passed"
    assert found["snapshot driver n580"].found == "all 3 features passed"
    probed(FeatureState.FAILED, "the kernel lacks it")
    found = on_gpus(tmp_path, monkeypatch, machine)
    assert (found["snapshot driver n610"].state, found["snapshot driver n610"].blocking) == ("missing", False)
    assert found["snapshot driver n610"].found == "criu-process-tree failed: the kernel lacks it"


def test_a_driver_without_devices_is_a_need_that_blocks_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed: object
) -> None:
    found = on_gpus(tmp_path, monkeypatch, FakeCheckpoints().accelerator(Inventory(why_not="cuInit: no device")))
    assert (found["GPUs"].state, found["GPUs"].found, found["GPUs"].blocking) == ("missing", "cuInit: no device", False)
    assert "snapshot driver n610" not in found
