"""The runtimes as coldsnap asks them: what goes wrong with a program, a daemon, an image, a first process."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coldsnap.capsule.contained import address_of
from coldsnap.capsule.containers.commands import OWNER_LABEL, ContainerPlan
from coldsnap.capsule.containers.maker import ContainerMaker
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import ContainerMark, ContainerRoot, UnitSpec
from coldsnap.capsule.identity import end_process
from coldsnap.capsule.makers import Begun, InitFiles
from coldsnap.core.launch import Runtime
from coldsnap.errors import (
    ColdsnapError,
    DeadlineExceeded,
    HostError,
    MissingCapability,
    PeerError,
    ResourceBusy,
    UserError,
)
from coldsnap.testing.containers import FakeContainers

if TYPE_CHECKING:
    from tests.capsule.containers.conftest import Shop

    from coldsnap.testing.containers import Image

REFERENCE = "registry.example.com/org/root@sha256:" + "0" * 64
PATIENCE_S = 60.0


@pytest.fixture(params=list(Runtime))
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeContainers:
    return FakeContainers(tmp_path / "runtime", request.param)


def spec(fake: FakeContainers, folder: Path, *, python: str = "/usr/bin/python3", image: str = REFERENCE) -> UnitSpec:
    root = ContainerRoot(runtime=fake.kind, image=image, python=python, labels={OWNER_LABEL: str(folder)})
    return UnitSpec(unit="u0", log_path=folder / "log", root=root)


def begin(runtime: ContainerRuntime, unit: UnitSpec, seconds: float = PATIENCE_S) -> Begun:
    log = os.open(unit.log_path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        return ContainerMaker({runtime.runtime: runtime}).begin(unit, InitFiles(log=log), Deadline("test", seconds))
    finally:
        os.close(log)


@pytest.mark.parametrize("runtime", Runtime)
def test_a_runtime_that_is_not_here(runtime: Runtime, tmp_path: Path) -> None:
    for program in (None, tmp_path / "nothing"):
        with pytest.raises(MissingCapability, match=f"{runtime} is not on this machine"):
            ContainerRuntime(runtime=runtime, program=program).version()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(HostError, match=f"{runtime} cannot be run"):
        ContainerRuntime(runtime=runtime, program=tmp_path / "text").version()
    with pytest.raises(MissingCapability, match="is not on this machine"):
        ContainerMaker({}).clear(ContainerMark(runtime=runtime, id="a"))


def test_a_daemon_that_does_not_run(fake: FakeContainers, tmp_path: Path) -> None:
    fake.has(REFERENCE, tmp_path)
    fake.fails("create", "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?")
    with pytest.raises(MissingCapability, match="Cannot connect"):
        begin(fake.runtime, spec(fake, tmp_path))
    assert fake.containers == ()


def test_a_program_that_does_not_answer(fake: FakeContainers, tmp_path: Path) -> None:
    fake.program.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        fake.runtime.create(ContainerPlan(name="n", image=REFERENCE, command=("p",)), seconds=0.05)


def test_an_image_that_is_not_here(fake: FakeContainers, tmp_path: Path) -> None:
    assert not fake.runtime.has_image(REFERENCE)
    with pytest.raises(UserError, match="cannot make a container") as caught:
        begin(fake.runtime, spec(fake, tmp_path))
    assert "coldsnap prepare" in (caught.value.cure or "")
    with pytest.raises(UserError, match="manifest unknown"):
        fake.runtime.pull(REFERENCE)
    fake.offers(REFERENCE, tmp_path)
    fake.runtime.pull(REFERENCE)
    assert fake.runtime.has_image(REFERENCE)


def test_a_question_that_fails_is_no_missing_image(fake: FakeContainers, tmp_path: Path) -> None:
    fake.has(REFERENCE, tmp_path)
    fake.fails("image inspect", "Got permission denied while trying to connect to the Docker daemon socket")
    with pytest.raises(MissingCapability, match="permission denied"):
        fake.runtime.has_image(REFERENCE)


def test_a_name_that_is_taken(fake: FakeContainers, tmp_path: Path) -> None:
    fake.has(REFERENCE, tmp_path)
    plan = ContainerPlan(name="n", image=REFERENCE, command=("p",))
    first = fake.runtime.create(plan)
    with pytest.raises(ResourceBusy, match="already in use"):
        fake.runtime.create(plan)
    assert fake.containers == (first,), "what has the name is somebody's own"


def test_what_has_no_label_of_ours_is_not_found(fake: FakeContainers, tmp_path: Path) -> None:
    fake.has(REFERENCE, tmp_path)
    ours = fake.runtime.create(ContainerPlan(name="a", image=REFERENCE, command=("p",), labels={OWNER_LABEL: "/x"}))
    fake.runtime.create(ContainerPlan(name="b", image=REFERENCE, command=("p",), labels={OWNER_LABEL: "/y"}))
    fake.runtime.create(ContainerPlan(name="c", image=REFERENCE, command=("p",)))
    assert [(found.id, found.name) for found in fake.runtime.find({OWNER_LABEL: "/x"})] == [(ours, "a")]
    fake.runtime.remove(ours)
    fake.runtime.remove(ours)
    assert fake.runtime.state(ours) is None
    assert fake.runtime.find({OWNER_LABEL: "/x"}) == ()
    assert len(fake.containers) == 2


def test_a_container_that_cannot_be_removed_is_said(fake: FakeContainers, tmp_path: Path) -> None:
    fake.has(REFERENCE, tmp_path)
    container = fake.runtime.create(ContainerPlan(name="a", image=REFERENCE, command=("p",)))
    fake.fails("rm", "device or resource busy")
    with pytest.raises(HostError, match="cannot remove a container: device or resource busy"):
        fake.runtime.remove(container)


def _unit(shop: Shop, folder: Path, *, python: str) -> UnitSpec:
    labels = {OWNER_LABEL: str(folder)}
    root = ContainerRoot(runtime=shop.runtime.runtime, image=shop.image.reference, python=python, labels=labels)
    return UnitSpec(unit="u0", log_path=folder / "log", root=root)


@pytest.mark.criu
def test_a_first_process_that_ends_at_once_has_its_words_told(shop: Shop, tmp_path: Path) -> None:
    runtime = shop.runtime
    with pytest.raises(PeerError, match="ended at once with exit status 2") as caught:
        begin(runtime, _unit(shop, tmp_path, python="/bin/sh"))
    assert "Illegal option" in caught.value.message
    assert runtime.find({OWNER_LABEL: str(tmp_path)}) == ()


@pytest.mark.criu
def test_an_interpreter_that_the_image_lacks(shop: Shop, tmp_path: Path) -> None:
    runtime = shop.runtime
    with pytest.raises(UserError, match="/no/python") as caught:
        begin(runtime, _unit(shop, tmp_path, python="/no/python"))
    assert "`python` in the recipe" in (caught.value.cure or "")
    assert runtime.find({OWNER_LABEL: str(tmp_path)}) == ()


@pytest.mark.criu
def test_nobody_else_gets_the_descriptors(
    fake: FakeContainers, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who guessed the number connects first: it gets nothing, and the container is begun all the same."""
    fake.has(image.reference, image.root)
    monkeypatch.setattr("coldsnap.capsule.containers.maker.secrets.randbits", lambda bits: 77)
    got: list[bytes] = []
    started = threading.Event()

    class Intruding(ContainerRuntime):
        def create(self, plan: ContainerPlan, *, seconds: float = 1.0) -> str:
            thread.start()
            assert started.wait(PATIENCE_S)
            return super().create(plan, seconds=seconds)

    def intrude() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(address_of(77))
            started.set()
            sock.settimeout(PATIENCE_S)
            got.append(sock.recv(1))

    thread = threading.Thread(target=intrude)
    runtime = Intruding(runtime=fake.kind, program=fake.program, environment={"PATH": "/usr/bin:/bin"})
    unit = spec(fake, tmp_path, python=str(image.python), image=image.reference)
    begun = begin(runtime, unit)
    thread.join(PATIENCE_S)
    assert got == [b""]
    begun.channel.close()
    assert end_process(begun.pid, begun.ticks, timeout_s=PATIENCE_S)
    ContainerMaker({fake.kind: runtime}).clear(begun.container)
    assert fake.containers == ()


@pytest.mark.criu
def test_what_happens_after_the_start_leaves_no_container(fake: FakeContainers, image: Image, tmp_path: Path) -> None:
    fake.has(image.reference, image.root)
    fake.fails("container inspect", "the daemon lost its mind")
    unit = spec(fake, tmp_path, python=str(image.python), image=image.reference)
    with pytest.raises(ColdsnapError, match="lost its mind"):
        begin(fake.runtime, unit)
    assert fake.containers == ()


def test_a_unit_that_has_no_container_is_our_own_mistake(fake: FakeContainers, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no image"):
        begin(fake.runtime, replace(spec(fake, tmp_path), root=None))
