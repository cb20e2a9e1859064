"""The registry of crash points and the code agree, and a point without a hook does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import coldsnap
from coldsnap.core.points import POINTS, install, reached

_SOURCE = Path(coldsnap.__file__).parent


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    install(None)


def test_every_point_stands_in_the_code_and_every_one_there_is_registered() -> None:
    said: set[str] = set()
    for path in _SOURCE.rglob("*.py"):
        if "testing" not in path.relative_to(_SOURCE).parts:
            said |= set(re.findall(r'reached\("([^"]+)"\)', path.read_text()))
    # the phases that a unit's init reports are the rest of these names
    init = "".join((_SOURCE / "capsule" / f"{name}.py").read_text() for name in ("init", "thaw"))
    said |= {f"unit.{phase}" for phase in re.findall(r'_enter\("([^"]+)"\)', init)}
    assert said == set(POINTS)


def test_every_sentence_is_its_own() -> None:
    assert len(set(POINTS.values())) == len(POINTS)
    assert all(re.fullmatch(r"[a-z]+\.[a-z]+", name) for name in POINTS)


def test_a_point_calls_the_hook_while_there_is_one() -> None:
    seen: list[str] = []
    reached("pack.named")
    install(seen.append)
    reached("pack.named")
    reached("unit.criu")
    install(None)
    reached("pack.named")
    assert seen == ["pack.named", "unit.criu"]


def test_what_a_hook_raises_goes_through() -> None:
    def hook(name: str) -> None:
        raise RuntimeError(name)

    install(hook)
    with pytest.raises(RuntimeError, match=r"capture\.leased"):
        reached("capture.leased")


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        POINTS["new.point"] = "no"  # type: ignore[index]
