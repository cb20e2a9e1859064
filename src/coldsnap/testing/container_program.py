"""A stand-in for the programs ``docker`` and ``podman``: the few words that coldsnap says, really carried out as root.

    python -m coldsnap.testing.container_program FOLDER docker|podman WORDS...

A container is a process in PID, mount and IPC namespaces of its own on an overlay of its image, with its binds, under a
small process that waits for its end. There is no daemon; everything is files below FOLDER (``containers.py`` beside
this writes them): ``images.json`` and ``registry.json`` (reference -> folder), ``faults.json`` (verb -> what to fail
with), ``calls.jsonl`` (every command line), ``containers/ID/``. Words that the real program does not know are refused.
"""

# It stands for a program of somebody else's, so it prints.
# ruff: noqa: T201, S606

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from coldsnap.capsule import linux, rootfs
from coldsnap.capsule.identity import end_process, is_running, start_ticks

_ONE_WORD = frozenset(
    {"--name", "--pull", "--network", "--uts", "--ipc", "--cgroupns", "--userns", "--user", "--workdir", "--cap-drop",
     "--pids-limit", "--restart", "--stop-signal", "--entrypoint"}
)  # fmt: skip
_MANY = frozenset({"--label", "--cap-add", "--security-opt", "--mount"})
_ALONE = frozenset({"--no-healthcheck"})
_ONLY = {"docker": frozenset({"--gpus"}), "podman": frozenset({"--systemd", "--device"})}
_PATIENCE_S = 60.0


class Failed(Exception):
    """What the program prints, and its exit status."""

    def __init__(self, said: str, status: int = 1) -> None:
        super().__init__(said)
        self.status = status


class Program:
    """One call."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind

    def run(self, words: list[str]) -> None:
        """Do what the words say. Raises Failed."""
        with (self.folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps(words) + "\n")
        verb = " ".join(words[:2]) if words[0] in ("container", "image") else words[0]
        if (said := self._read("faults.json").get(verb)) is not None:
            raise Failed(said)
        rest = words[len(verb.split()) :]
        match verb:
            case "version":
                print("99.0")
            case "image inspect":
                self._image(rest[-1])
                print("sha256:" + "0" * 64)
            case "pull":
                self._pull(rest)
            case "create":
                self._create(rest)
            case "start":
                self._start(rest[0])
            case "container inspect":
                self._inspect(rest[-1])
            case "logs":
                lines = (self._container(rest[-1]) / "log").read_text().splitlines()
                print("\n".join(lines[-int(rest[rest.index("--tail") + 1]) :]))
            case "ps":
                self._list(rest)
            case "rm":
                self._remove(rest[-1])
            case _:
                raise Failed(f"unknown command: {verb}", 125)

    def _read(self, name: str) -> dict[str, str]:
        path = self.folder / name
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def _image(self, reference: str) -> str:
        root = self._read("images.json").get(reference)
        if root is None:
            raise Failed(f"Error: No such image: {reference}" if self.kind == "docker" else f"Error: {reference}: image not known", 125)  # fmt: skip # noqa: E501
        return root

    def _pull(self, words: list[str]) -> None:
        unknown = [word for word in words[:-1] if word not in ("--quiet", "--tls-verify=false")]
        if unknown or (self.kind == "docker" and "--tls-verify=false" in words):
            raise Failed(f"unknown flag: {unknown or '--tls-verify'}", 125)
        root = self._read("registry.json").get(words[-1])
        if root is None:
            raise Failed(f"Error response from daemon: manifest unknown: {words[-1]}")
        images = {**self._read("images.json"), words[-1]: root}
        aside = self.folder / f"images.{os.getpid()}"
        aside.write_text(json.dumps(images))
        aside.rename(self.folder / "images.json")

    def _create(self, words: list[str]) -> None:
        options: dict[str, list[str]] = {}
        index = 0
        while words[index].startswith("-"):
            name = words[index]
            if name in _ALONE:
                index += 1
            elif name in _ONE_WORD | _MANY | _ONLY[self.kind]:
                options.setdefault(name, []).append(words[index + 1])
                index += 2
            else:
                raise Failed(f"unknown flag: {name}", 125)
        root, (name,) = self._image(words[index]), options["--name"]
        for other in self._containers():
            if self._state(other)["name"] == name:
                raise Failed(f'Conflict. The container name "/{name}" is already in use by container "{other.name}".', 125)  # fmt: skip # noqa: E501
        container = self.folder / "containers" / secrets.token_hex(32)
        container.mkdir(parents=True)
        (container / "log").touch()
        mounts = [dict(part.partition("=")[::2] for part in mount.split(",")) for mount in options.get("--mount", [])]
        labels = dict(label.partition("=")[::2] for label in options.get("--label", []))
        command = [options["--entrypoint"][0], *words[index + 1 :]]
        state = {"name": name, "root": root, "mounts": mounts, "labels": labels, "command": command}
        (container / "state.json").write_text(json.dumps(state))
        print(container.name)

    def _containers(self) -> list[Path]:
        place = self.folder / "containers"
        return sorted(path for path in place.iterdir() if (path / "state.json").exists()) if place.is_dir() else []

    def _container(self, word: str) -> Path:
        for one in self._containers():
            if word in (one.name, self._state(one)["name"]):
                return one
        raise Failed(f"Error: No such container: {word}" if self.kind == "docker" else f'Error: no container with name or ID "{word}" found: no such container')  # fmt: skip # noqa: E501

    def _state(self, container: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((container / "state.json").read_text())
        return found

    def _inspect(self, word: str) -> None:
        container = self._container(word)
        try:
            pid, ticks = map(int, (container / "pid").read_text().split())
        except FileNotFoundError:
            print("created 0 0")
            return
        if is_running(pid, ticks):
            print(f"running {pid} 0")
        else:
            ended = container / "ended"
            print(f"exited 0 {ended.read_text() if ended.exists() else 137}")

    def _list(self, words: list[str]) -> None:
        wanted = [words[at + 1].removeprefix("label=") for at, word in enumerate(words) if word == "--filter"]
        for one in self._containers():
            state = self._state(one)
            if set(wanted) <= {f"{key}={value}" for key, value in state["labels"].items()}:
                print(f"{one.name}\t{state['name']}")

    def _remove(self, word: str) -> None:
        container = self._container(word)
        for name in ("pid", "keeper"):  # the keeper ends by itself when the first process has
            if (container / name).exists():
                pid, ticks = map(int, (container / name).read_text().split())
                if name == "pid":
                    end_process(pid, ticks, timeout_s=_PATIENCE_S)
                _wait_gone(pid, ticks)
        shutil.rmtree(container, ignore_errors=True)

    def _start(self, word: str) -> None:
        container = self._container(word)
        told, tell = os.pipe()
        if os.fork() == 0:
            os.close(told)
            _keep(container, self._state(container), tell)
        os.close(tell)
        with open(told, "rb") as file:
            said = file.read().decode()
        if said:
            raise Failed(said, 127)
        print(word)


def _keep(container: Path, state: dict[str, Any], tell: int) -> NoReturn:
    """Be the process above a container: make its namespaces, start its first process, wait, write down how it ended."""
    try:
        os.setsid()
        log = os.open(container / "log", os.O_WRONLY | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in ((0, null), (1, log), (2, log)):
            os.dup2(descriptor, number)
        _write(container / "keeper", os.getpid())
        linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            _be_first(state, tell)
        _write(container / "pid", pid)
        os.close(tell)
        _, status = os.waitpid(pid, 0)
        (container / "ended").write_text(str(os.waitstatus_to_exitcode(status) % 256))
    except OSError as error:
        os.write(tell, f"runtime error: {error!r}".encode())
    finally:
        os._exit(0)


def _be_first(state: dict[str, Any], tell: int) -> NoReturn:
    try:
        os.setsid()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)  # not the keeper: a new root would be its root as well
        linux.make_private()
        trees = []
        for mount in state["mounts"]:
            tree = linux.clone_tree(mount["source"])
            if "readonly" in mount:
                linux.make_read_only(tree)
            trees.append((tree, mount["target"]))
        root = {"lower": state["root"], "visible": [], "upper_bytes": 0}
        rootfs.enter(root, [*rootfs.pin(root), *trees])
        linux.mount_proc("/proc")
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.set_inheritable(tell, False)
        os.execve(state["command"][0], state["command"], {"PATH": "/usr/bin:/bin"})
    except FileNotFoundError as error:
        os.write(tell, f'exec: "{state["command"][0]}": {error.strerror}: no such file or directory'.encode())
    except OSError as error:
        os.write(tell, f"OCI runtime error: {error}".encode())
    finally:
        os._exit(127)


def _write(path: Path, pid: int) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(f"{pid} {start_ticks(pid) or 0}")
    aside.rename(path)


def _wait_gone(pid: int, ticks: int) -> None:
    ends = time.monotonic() + _PATIENCE_S
    while is_running(pid, ticks) and time.monotonic() < ends:
        time.sleep(0.005)


if __name__ == "__main__":
    try:
        Program(Path(sys.argv[1]), sys.argv[2]).run(sys.argv[3:])
    except Failed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.status)
