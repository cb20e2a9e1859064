"""Runtimes for tests: the shipped stand-in for docker and podman, and the real ones that ``ASKED`` names.

shop = FakeContainers(folder, Runtime.DOCKER)
shop.has("registry.example.com/root@sha256:...", root)
shop.fails("start", "no space left on device")

for name in runtime_names():
    with open_runtime(name, folder) as runtime: ...
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import coldsnap
from coldsnap.capsule import linux
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.core.launch import Runtime
from coldsnap.ship.http import Http
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_registry
from coldsnap.ship.registry import Registry
from coldsnap.testing.registry import RegistryServer
from coldsnap.testing.rootimage import build_root, publish_root

__all__ = ["ASKED", "FakeContainers", "Image", "open_runtime", "published_image", "runtime_names", "with_image"]

ASKED = "COLDSNAP_TEST_RUNTIMES"
"""The real runtimes to be tested, as ``docker,podman``."""


@dataclass(frozen=True)
class FakeContainers:
    """One fake installation: its program, its images, what it was told."""

    folder: Path
    kind: Runtime

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "coldsnap.testing.container_program", str(self.folder), self.kind.value]
        source = Path(coldsnap.__file__).parent.parent
        quoted = " ".join(f"'{word}'" for word in words)
        self.program.write_text(f"#!/bin/sh\nexec env PYTHONPATH='{source}' {quoted} \"$@\"\n")
        self.program.chmod(0o755)

    @property
    def program(self) -> Path:
        """What is called instead of the real one."""
        return self.folder / self.kind.value

    @property
    def runtime(self) -> ContainerRuntime:
        """As the verbs use it."""
        return ContainerRuntime(runtime=self.kind, program=self.program, environment={"PATH": "/usr/bin:/bin"})

    def offers(self, reference: str, root: Path) -> None:
        """Let a pull find an image whose root is a folder."""
        self._say("registry.json", reference, str(root))

    def has(self, reference: str, root: Path) -> None:
        """Have an image."""
        self._say("images.json", reference, str(root))

    def fails(self, verb: str, said: str) -> None:
        """Let a verb fail with these words from now on; with none it works again."""
        self._say("faults.json", verb, said or None)

    @property
    def calls(self) -> tuple[tuple[str, ...], ...]:
        """Every command line, in order."""
        path = self.folder / "calls.jsonl"
        return tuple(tuple(json.loads(line)) for line in path.read_text().splitlines()) if path.exists() else ()

    @property
    def containers(self) -> tuple[str, ...]:
        """The ids of those that exist, whatever they do."""
        place = self.folder / "containers"
        return tuple(sorted(path.name for path in place.iterdir())) if place.is_dir() else ()

    def _say(self, name: str, key: str, value: str | None) -> None:
        path = self.folder / name
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        found.pop(key, None)
        path.write_text(json.dumps(found if value is None else {**found, key: value}))


def runtime_names() -> tuple[str, ...]:
    """The stand-ins, always, and each real one that ``ASKED`` names, which then has to answer.

    Not whatever happens to be installed: a suite is the same on every machine, and nobody's daemon is used unasked.
    """
    asked = [Runtime(word) for word in os.environ.get(ASKED, "").split(",") if word]
    for kind in asked:
        _real(kind, {}).version()
    return (*(f"fake-{kind}" for kind in Runtime), *(f"real-{kind}" for kind in asked))


@contextmanager
def open_runtime(name: str, folder: Path) -> Iterator[ContainerRuntime]:
    """The one of this name. A podman has a store of its own below ``folder``, which goes with the block."""
    how, _, word = name.partition("-")
    kind = Runtime(word)
    if how == "fake":
        yield FakeContainers(folder / name, kind).runtime
    elif kind is Runtime.DOCKER:
        yield _real(kind, {})
    else:
        store = folder / name
        runtime = _real(kind, _podman_settings(store))
        try:
            yield runtime
        finally:
            subprocess.run(
                [str(runtime.program), "system", "reset", "--force"],
                env=dict(runtime.environment),
                capture_output=True,
                check=False,
            )
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                if (target := line.split()[4]).startswith(f"{store}/"):
                    linux.unmount(target)
            shutil.rmtree(store, ignore_errors=True)


@contextmanager
def with_image(runtime: ContainerRuntime, image: Image) -> Iterator[None]:
    """Have an image, which its registry still offers, for the block."""
    program = runtime.program
    assert program is not None
    if program.parent.name.startswith("fake-"):
        FakeContainers(program.parent, runtime.runtime).offers(image.reference, image.root)
    runtime.pull(image.reference, insecure=True)
    try:
        yield
    finally:
        words = [str(program), "image", "rm", "--force", image.reference]
        subprocess.run(words, env=dict(runtime.environment), capture_output=True, check=False)


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image in a registry, and its files. ``python`` is where its interpreter is inside."""

    reference: str
    root: Path
    python: Path


@contextmanager
def published_image(folder: Path) -> Iterator[Image]:
    """A small image that runs the fake engine, in a registry of its own for the block."""
    python = build_root(folder / "root")
    with RegistryServer(folder / "registry") as server:
        name = parse_registry(f"oci://{server.host}/org/root")
        with Http(Limits()) as http:
            reference = publish_root(folder / "root", Registry(name, http), name, folder / "work")
        shutil.rmtree(folder / "work")
        yield Image(reference=reference, root=folder / "root", python=python)
    shutil.rmtree(folder)


def _real(kind: Runtime, settings: Mapping[str, str]) -> ContainerRuntime:
    environment = {name: os.environ[name] for name in ("HOME", "PATH", "DOCKER_HOST") if name in os.environ}
    found = shutil.which(kind.value)
    return ContainerRuntime(
        runtime=kind, program=Path(found) if found is not None else None, environment={**environment, **settings}
    )


def _podman_settings(store: Path) -> Mapping[str, str]:
    """A store of its own, and limits that a machine without CAP_SYS_RESOURCE may give."""
    store.mkdir(parents=True)
    storage, containers = store / "storage.conf", store / "containers.conf"
    storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{store}/graph"\nrunroot = "{store}/run"\n')
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lines = ["[containers]", f'default_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]']
    lines += ["[engine]", 'events_logger = "file"']
    if shutil.which("runc") is not None:  # crun wants no mixture of both versions of cgroups
        lines.append('runtime = "runc"')
    containers.write_text("\n".join(lines) + "\n")
    return {"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(containers)}
