"""The contract of ``capsule/makers.py`` as tests that every maker runs.

A test module subclasses ``UnitMakerContract`` and says, in a fixture ``ground``, what a unit's root is and how to see
what is left of it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pytest

from coldsnap.capsule.channel import Closed
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import BindMount, UnitSpec
from coldsnap.capsule.identity import end_process, is_running
from coldsnap.capsule.makers import Begun, InitFiles, UnitMaker
from coldsnap.errors import ColdsnapError

__all__ = ["MakerGround", "UnitMakerContract"]

PATIENCE_S = 60.0
NAMESPACES = ("pid", "mnt", "ipc")
SHARED = ("net", "uts", "user", "cgroup")


class MakerGround(Protocol):
    """What the contract's tests stand on."""

    @property
    def maker(self) -> UnitMaker:
        """The maker under test."""

    @property
    def python(self) -> Path:
        """An interpreter inside the unit's root."""

    def spec(self, name: str, *, mounts: tuple[BindMount, ...] = ()) -> UnitSpec:
        """A unit on this maker's kind of root, with a log file in this test's folder."""

    def broken(self, name: str) -> UnitSpec | None:
        """A unit whose first process cannot begin; None where there is no such thing."""

    def left_over(self) -> Iterable[str]:
        """Everything of this test that outlives its units."""


class UnitMakerContract:
    """The promises of ``makers.py``."""

    @pytest.fixture
    def ground(self) -> MakerGround:
        """Provided by the subclass."""
        raise NotImplementedError

    def _begin(self, ground: MakerGround, spec: UnitSpec) -> Begun:
        log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return ground.maker.begin(spec, InitFiles(log=log), Deadline("the test", PATIENCE_S))
        finally:
            os.close(log)

    def _run(self, ground: MakerGround, begun: Begun, *command: str) -> None:
        """Tell the init to run a command, and wait until it runs."""
        config = {
            **begun.world, "command": list(command), "environment": {}, "cwd": "/", "criu": None, "private": [],
            "run_dir_bytes": 1 << 20, "shm_bytes": 1 << 20, "files": {},
        }  # fmt: skip
        begun.channel.send(config, timeout_s=PATIENCE_S)
        while (event := begun.channel.receive(timeout_s=PATIENCE_S))["event"] == "phase":
            pass
        assert event["event"] == "started", event

    def _end(self, ground: MakerGround, begun: Begun) -> None:
        begun.channel.close()
        assert end_process(begun.pid, begun.ticks, timeout_s=PATIENCE_S)
        ground.maker.clear(begun.container)

    def test_it_is_the_first_process_of_namespaces_of_its_own(self, ground: MakerGround) -> None:
        begun = self._begin(ground, ground.spec("a"))
        assert is_running(begun.pid, begun.ticks)
        inner = _numbers(begun.pid)
        assert inner[-1] == 1
        for name in NAMESPACES:
            assert _namespace(begun.pid, name) != _namespace("self", name), name
        for name in SHARED:
            assert _namespace(begun.pid, name) == _namespace("self", name), name
        self._end(ground, begun)
        assert list(ground.left_over()) == []

    def test_it_ends_with_its_channel(self, ground: MakerGround) -> None:
        begun = self._begin(ground, ground.spec("a"))
        pidfd = os.pidfd_open(begun.pid)
        begun.channel.close()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000)
        os.close(pidfd)
        ground.maker.clear(begun.container)
        assert list(ground.left_over()) == []

    def test_a_program_runs_on_its_root_with_its_mounts(self, ground: MakerGround, tmp_path: Path) -> None:
        (tmp_path / "shown").mkdir()
        (tmp_path / "shown" / "file").write_text("seen")
        mounts = (
            BindMount(source=tmp_path / "shown", target=Path("/mnt"), read_only=True),
            BindMount(source=tmp_path, target=Path("/srv")),
        )
        begun = self._begin(ground, ground.spec("a", mounts=mounts))
        text = (
            "import os\n"
            "try: open('/mnt/new', 'w'); wrote = 'wrote'\n"
            "except OSError as error: wrote = os.strerror(error.errno)\n"
            "open('/srv/said', 'w').write(open('/mnt/file').read() + ', ' + wrote)\n"
            "os.rename('/srv/said', '/srv/told')\n"
            "import signal; signal.pause()\n"
        )
        self._run(ground, begun, str(ground.python), "-I", "-S", "-c", text)
        told = tmp_path / "told"
        _wait_for(told)
        assert told.read_text() == "seen, Read-only file system"
        self._end(ground, begun)
        assert list(ground.left_over()) == []

    def test_two_do_not_see_each_other(self, ground: MakerGround) -> None:
        one, two = (self._begin(ground, ground.spec(name)) for name in ("a", "b"))
        for name in NAMESPACES:
            assert _namespace(one.pid, name) != _namespace(two.pid, name), name
        self._end(ground, one)
        assert is_running(two.pid, two.ticks)
        self._end(ground, two)
        assert list(ground.left_over()) == []

    def test_clearing_may_be_repeated(self, ground: MakerGround) -> None:
        begun = self._begin(ground, ground.spec("a"))
        self._end(ground, begun)
        ground.maker.clear(begun.container)
        ground.maker.clear(None)

    def test_a_channel_says_when_its_init_is_gone(self, ground: MakerGround) -> None:
        begun = self._begin(ground, ground.spec("a"))
        assert end_process(begun.pid, begun.ticks, timeout_s=PATIENCE_S)
        with pytest.raises(Closed):
            begun.channel.receive(timeout_s=PATIENCE_S)
        begun.channel.close()
        ground.maker.clear(begun.container)

    def test_what_cannot_begin_leaves_nothing(self, ground: MakerGround) -> None:
        spec = ground.broken("a")
        if spec is not None:
            with pytest.raises(ColdsnapError):
                self._begin(ground, spec)
        assert list(ground.left_over()) == []


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")  # noqa: PTH115 - no file


def _numbers(pid: int) -> list[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
    return [int(word) for word in line.split()[1:]]


def _wait_for(path: Path) -> None:
    from coldsnap.testing.stand import wait_for

    wait_for(f"{path} to be there", path.exists)
