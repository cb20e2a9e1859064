"""The program that is PID 1 of a unit: it makes the unit's world, starts or restores the tree, reaps, ends.

Why it exists: a tree dumped as PID 1 of its own namespaces cannot be restored by CRIU, so somebody else must
be PID 1, and killing PID 1 is the one way to end a process tree of which nothing can escape. Rules it obeys:

- Standard library only (``python -I -S``): it starts in tens of milliseconds and reads no user's files.
- Until the controller says ``confirm``, its end of the channel closing means "controller gone": the init exits
  and the kernel ends everything it started, CRIU included. Afterwards it depends on nobody.
- It is never dumped. Stdout and stderr of the tree are one pipe whose reader is here, so the tree's image names
  a pipe, not a file of some host; a restore gives CRIU the new unit's pipe in its place.
- The tree's PIDs start above ``FIRST_PID``: at a restore CRIU itself runs in the new PID namespace and gets
  the low ones, which therefore never collide with the tree's.

The init's life: namespaces -> config -> mounts -> files -> (exec | criu -> memory) -> started -> confirm -> reap
until the root process ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from binascii import a2b_base64
from typing import Any, Final, NoReturn

from coldsnap.capsule import inside, linux, privatefiles, rootfs
from coldsnap.capsule.channel import Channel, Closed
from coldsnap.capsule.thaw import NotBack, Thaw

__all__ = ["FIRST_PID", "be_init", "main"]

FIRST_PID: Final = 1000
_PUMP_BYTES = 65536
_PUMP_TURNS = 64
_LAST_PID = "/proc/sys/kernel/ns_last_pid"


def main(channel_fd: int, log_fd: int, images_fd: int, criu_log_fd: int) -> NoReturn:
    """Enter new namespaces and fork the init there; this process ends at once, so nobody is its parent."""
    for descriptor in (channel_fd, log_fd, images_fd, criu_log_fd):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    try:
        linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        pid = os.fork()
    except OSError as error:
        _say(channel, {"event": "error", "phase": "namespaces", "errno": error.errno, "message": str(error)})
        os._exit(1)
    if pid:
        _say(channel, {"event": "init", "pid": pid})
        os._exit(0)
    try:
        be_init(channel, log_fd, images_fd, criu_log_fd)
    finally:
        os._exit(1)


def be_init(channel: Channel, log_fd: int, images_fd: int, criu_log_fd: int) -> NoReturn:
    """Be the init of a PID namespace that this process is the first one of."""
    _Init(channel, log_fd, images_fd, criu_log_fd).run()


def _say(channel: Channel, message: dict[str, Any]) -> None:
    with contextlib.suppress(Closed):
        channel.send(message)


class _Init:
    def __init__(self, channel: Channel, log_fd: int, images_fd: int, criu_log_fd: int) -> None:
        self.channel: Channel | None = channel
        self.log_fd = log_fd
        self.images_fd = images_fd
        self.criu_log_fd = criu_log_fd
        self.phase = "config"
        self.thaw: Thaw | None = None
        self.root_pid = 0
        self.output_read, self.output_write = os.pipe2(os.O_CLOEXEC)
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.output_read, False)
        self.pumping = True
        self.ending = False

    def run(self) -> NoReturn:
        linux.set_name("coldsnap-init")
        if os.getsid(0) != os.getpid():  # a container's first process leads its session already
            os.setsid()
        os.umask(0o077)
        os.chdir("/")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._asked_to_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write)
        try:
            config = self._channel().receive()
            self._prepare(config)
            if config["criu"]:
                self._start_thaw(config)
            else:
                self._start_engine(config)
            self._serve()
        except Closed:
            os._exit(1)
        except NotBack as error:
            self._tell({"event": "error", "phase": "memory", **error.said})
            os._exit(1)
        except (OSError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) else None
            self._tell({"event": "error", "phase": self.phase, "errno": number, "message": str(error)})
            os._exit(1)

    # -- making the unit's world ------------------------------------------------------------------

    def _prepare(self, config: dict[str, Any]) -> None:
        self._enter("mounts")
        linux.make_private()
        # Every source is pinned before anything is mounted, so no target can hide a later source.
        trees = [(linux.clone_tree(one["source"]), one) for one in config["mounts"]]
        if config["root"]:
            rootfs.enter(config["root"], rootfs.pin(config["root"]))
        linux.mount_proc("/proc")
        os.makedirs(inside.RUN_ROOT, mode=0o755, exist_ok=True)
        linux.mount_tmpfs(inside.RUN_ROOT, size_bytes=config["run_dir_bytes"], mode=0o700)
        if os.path.isdir(inside.PRIVATE_ROOTS["shm"]):
            linux.mount_tmpfs(inside.PRIVATE_ROOTS["shm"], size_bytes=config["shm_bytes"], mode=0o1777)
        for tree, one in trees:
            if one["read_only"]:
                linux.make_read_only(tree)
            if config["root"] or one["target"].startswith(inside.PRIVATE_ROOTS["shm"] + "/"):
                inside.make_target(tree, one["target"])  # in a file system of the unit's own, empty until now
            linux.attach_tree(tree, one["target"])
            os.close(tree)
        self._enter("files")
        files = config["files"]
        privatefiles.load_private(config["private"], self.images_fd, skip=frozenset(files))
        for name, data in files.items():
            with open(os.open(f"{inside.RUN_ROOT}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(a2b_base64(data))

    def _set_last_pid(self, pid: int) -> None:
        with open(_LAST_PID, "w") as file:
            file.write(str(pid))

    # -- starting the tree ------------------------------------------------------------------------

    def _start_engine(self, config: dict[str, Any]) -> None:
        self._enter("pids")
        self._set_last_pid(FIRST_PID)
        # A clock of its own: CRIU brings it back with the tree, so that no timer sees time jump on another machine
        # or after a restart. Only the init's children enter it; CRIU must stay outside.
        self._enter("clock")
        linux.unshare(linux.CLONE_NEWTIME)
        self._enter("exec")
        failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            self._become_engine(config, failure_write)
        os.close(failure_write)
        with open(failure_read, "rb") as failure:
            reason = failure.read()
        if reason:
            number, _, path = reason.decode().partition(" ")
            raise OSError(int(number), os.strerror(int(number)), path)
        self.root_pid = pid
        self._started()

    def _become_engine(self, config: dict[str, Any], failure_write: int) -> NoReturn:
        try:
            os.setsid()
            # A descriptor from before the mount namespace would name a mount that CRIU cannot find.
            null = os.open("/dev/null", os.O_RDONLY)
            failure = inside.FAILURE_FD
            inside.become_child({0: null, 1: self.output_write, 2: self.output_write, failure: failure_write})
            os.set_inheritable(failure, False)
            failure_write = failure
            os.umask(0o022)
            os.chdir(config["cwd"])
            os.execvpe(config["command"][0], config["command"], config["environment"])
        except OSError as error:
            os.write(failure_write, f"{error.errno} {error.filename or config['command'][0]}".encode())
        finally:
            os._exit(127)

    def _start_thaw(self, config: dict[str, Any]) -> None:
        self.thaw = Thaw(config, self.images_fd, self._enter)
        self.root_pid = self.thaw.root_pid
        self.thaw.start(self.output_write, self.criu_log_fd)

    def _thawed(self, thaw: Thaw) -> None:
        """All of the tree is there and stands still."""
        self.thaw = None
        self._enter("pids")
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        # New processes of the tree must again stay out of the range that a later CRIU will use.
        self._set_last_pid(max(FIRST_PID, *pids))
        thaw.let_run(pids)
        self._started()

    def _started(self) -> None:
        os.close(self.output_write)
        for descriptor in (self.images_fd, self.criu_log_fd):
            if descriptor >= 0:
                os.close(descriptor)
        pipe = os.fstat(self.output_read).st_ino
        self._tell({"event": "started", "root_pid": self.root_pid, "log_pipe": pipe, "at": time.monotonic()})

    # -- living -----------------------------------------------------------------------------------

    def _serve(self) -> NoReturn:
        while True:
            poll = select.poll()
            poll.register(self.wake_read, select.POLLIN)
            if self.pumping:
                poll.register(self.output_read, select.POLLIN)
            if self.channel is not None:
                poll.register(self.channel, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.output_read in ready:
                self._pump()
            if self.channel is not None and self.channel.fileno() in ready:
                self._listen(self.channel)
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
                if self.ending:
                    self._end()
                self._reap()

    def _asked_to_end(self, *_: object) -> None:
        self.ending = True

    def _end(self) -> NoReturn:
        """Kill everything, and keep what it printed before that: somebody may need to know why."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        self._pump()
        os._exit(0)

    def _listen(self, channel: Channel) -> None:
        if channel.receive()["verb"] == "confirm":
            self._tell({"event": "confirmed"})
            channel.close()
            self.channel = None

    def _pump(self) -> None:
        """Move what the tree printed to the host's file. A full disk loses lines, it never stops the tree."""
        for _ in range(_PUMP_TURNS):  # and then the rest of the loop's work, however much it prints
            try:
                piece = os.read(self.output_read, _PUMP_BYTES)
            except BlockingIOError:
                return
            if not piece:
                self.pumping = False
                return
            with contextlib.suppress(OSError):
                os.write(self.log_fd, piece)

    def _reap(self) -> None:
        root_status: int | None = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if self.thaw is not None and self.thaw.ended(pid, status):
                if self.thaw.done:
                    self._thawed(self.thaw)
            elif pid == self.root_pid:
                root_status = status
        if root_status is not None and self.thaw is None:
            self._root_ended(os.waitstatus_to_exitcode(root_status))

    def _root_ended(self, code: int) -> NoReturn:
        self._pump()
        how = f"exit status {code}" if code >= 0 else f"signal {-code}"
        with contextlib.suppress(OSError):
            os.write(self.log_fd, f"coldsnap: the unit's root process ended with {how}\n".encode())
        self._tell({"event": "ended", "code": code})
        os._exit(0)

    # -- reporting --------------------------------------------------------------------------------

    def _channel(self) -> Channel:
        if self.channel is None:
            raise Closed
        return self.channel

    def _tell(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._tell({"event": "phase", "phase": phase, "at": time.monotonic()})
