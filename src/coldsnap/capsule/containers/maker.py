"""Root and namespaces by docker or podman: ``makers.UnitMaker``.

    create -> start -> the first process connects -> it is who the runtime says -> our descriptors go to it -> Begun

The init asks for them at an abstract Unix socket whose name is a random number, because nothing can be inherited
through a daemon. So log, images and CRIU's log are the very files they are natively, and no bind is made for them.
Beside the unit's own mounts the container is given what ``ContainerRoot.visible`` says, and coldsnap's code, read-only.

Names of containers are random too: a leftover is never in the way of another start, and is found by its labels.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import coldsnap
from coldsnap.capsule.channel import Channel, Closed
from coldsnap.capsule.contained import ASK, address_of
from coldsnap.capsule.containers.answers import missing_program
from coldsnap.capsule.containers.commands import UNIT_LABEL, ContainerPlan
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import BindMount, ContainerMark, ContainerRoot, UnitSpec
from coldsnap.capsule.identity import start_ticks
from coldsnap.capsule.makers import Begun, InitFiles
from coldsnap.capsule.programs import boot_words
from coldsnap.capsule.starting import ended_early, init_error
from coldsnap.core.launch import Runtime
from coldsnap.core.points import reached
from coldsnap.errors import ColdsnapError, PeerError

__all__ = ["CODE_INSIDE", "ContainerMaker"]

CODE_INSIDE: Final = Path("/run/coldsnap-code")
_LOOK_S = 0.5
_PEER = struct.Struct("3i")


class ContainerMaker:
    """Makes the containers of ``runtimes``; for a unit whose root names one of them."""

    def __init__(self, runtimes: Mapping[Runtime, ContainerRuntime]) -> None:
        self._runtimes = runtimes

    def begin(self, spec: UnitSpec, files: InitFiles, deadline: Deadline) -> Begun:
        """Make and start the container, and pass its init what it works with."""
        root = spec.root
        if not isinstance(root, ContainerRoot):
            raise TypeError(f"unit {spec.unit} has no image for a container")
        runtime = self._runtime(root.runtime)
        number = secrets.randbits(128)
        plan = _plan(spec, root, number)
        with _listening(number) as listener:
            container = plan.name
            try:
                container = runtime.create(plan, seconds=deadline.remaining("create"))
                mark = ContainerMark(runtime=root.runtime, id=container)
                runtime.start(container, seconds=deadline.remaining("start"))
                return _passed(spec, runtime, mark, listener, files, deadline)
            except BaseException:
                with contextlib.suppress(ColdsnapError):  # what went wrong first is what is told
                    runtime.remove(container)
                raise

    def clear(self, mark: ContainerMark | None) -> None:
        """Remove the container."""
        if mark is not None:
            self._runtime(mark.runtime).remove(mark.id)

    def _runtime(self, runtime: Runtime) -> ContainerRuntime:
        if runtime not in self._runtimes:
            raise missing_program(runtime)
        return self._runtimes[runtime]


def _plan(spec: UnitSpec, root: ContainerRoot, number: int) -> ContainerPlan:
    code = Path(coldsnap.__file__).parent
    own = (BindMount(source=code, target=CODE_INSIDE / "coldsnap", read_only=True),)
    seen = tuple(BindMount(source=path, target=path, read_only=read_only) for path, read_only in root.visible)
    return ContainerPlan(
        name=f"coldsnap-{spec.unit}-{number:032x}"[:128],
        image=root.image,
        command=(root.python, *boot_words("contained", str(CODE_INSIDE), spec.unit, (number,))),
        mounts=(*own, *seen, *spec.mounts),
        devices=root.devices,
        labels={**root.labels, UNIT_LABEL: spec.unit},
    )


@contextlib.contextmanager
def _listening(number: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address_of(number))
        listener.listen(4)
        listener.settimeout(_LOOK_S)
        yield listener


def _passed(
    spec: UnitSpec,
    runtime: ContainerRuntime,
    mark: ContainerMark,
    listener: socket.socket,
    files: InitFiles,
    deadline: Deadline,
) -> Begun:
    """Wait for the first process of the container, and for nobody else; give it the descriptors."""
    phase = "start"
    while True:
        deadline.remaining(phase)
        state = runtime.state(mark.id)
        if state is None or not state.is_alive:
            words = runtime.last_words(mark.id).strip()
            code = "" if state is None else f" with exit status {state.exit_code}"
            raise PeerError(
                f"the container of unit {spec.unit} ended at once{code}: {words or 'it printed nothing'}",
                cure="the image needs Python 3.11 or newer where the recipe's `python` says",
                facts={"runtime": mark.runtime.value, "phase": phase, "log": words.splitlines()},
            )
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            pid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
            ticks = start_ticks(pid) if pid else None
            state = runtime.state(mark.id)
            if state is None or state.pid != pid or ticks is None:
                sock.close()  # somebody else who guessed, or who is gone already
                continue
            return _give(spec, mark, sock, pid, ticks, files, deadline)


def _give(
    spec: UnitSpec,
    mark: ContainerMark,
    sock: socket.socket,
    pid: int,
    ticks: int,
    files: InitFiles,
    deadline: Deadline,
) -> Begun:
    phase = "start"
    channel = Channel(sock)
    try:
        sock.settimeout(deadline.remaining(phase))
        asked = b""
        while len(asked) < len(ASK):
            piece = sock.recv(len(ASK) - len(asked))
            if not piece:
                raise Closed
            asked += piece
        present = [number for number in files.numbers if number >= 0]
        socket.send_fds(sock, [b"".join(b"-" if number < 0 else b"+" for number in files.numbers)], present)
        message = channel.receive(timeout_s=deadline.remaining(phase))
        if message["event"] != "init":
            raise init_error(spec.unit, phase, message)
        reached("unit.init")
    except TimeoutError as error:
        channel.close()
        raise deadline.exceeded(phase) from error
    except (Closed, OSError) as error:
        channel.close()
        raise ended_early(spec, phase) from error
    except BaseException:
        channel.close()
        raise
    return Begun(channel=channel, pid=pid, ticks=ticks, world={"mounts": [], "root": None}, container=mark)
