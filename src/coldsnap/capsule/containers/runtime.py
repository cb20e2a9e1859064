"""Docker or podman on this machine: one method for each thing that coldsnap asks of it, each one bounded call."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coldsnap.capsule.containers.answers import is_absent, missing_program, runtime_error
from coldsnap.capsule.containers.commands import (
    ContainerPlan,
    create_command,
    find_command,
    has_image_command,
    inspect_command,
    logs_command,
    pull_command,
    remove_command,
    start_command,
    version_command,
)
from coldsnap.core.launch import Runtime
from coldsnap.errors import ColdsnapError, DeadlineExceeded, UserError

__all__ = ["ContainerRuntime", "ContainerState", "Found"]

_QUESTION_S = 60.0
_CHANGE_S = 120.0
_PULL_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerState:
    """``status`` in the runtime's own word; ``pid`` of the first process, 0 when it does not run."""

    status: str
    pid: int
    exit_code: int

    @property
    def is_alive(self) -> bool:
        """Whether its first process exists."""
        return self.pid > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A container with our labels."""

    id: str
    name: str


@dataclass(frozen=True, kw_only=True)
class ContainerRuntime:
    """``program`` None: it is not on this machine. ``environment`` is all that it gets of ours."""

    runtime: Runtime
    program: Path | None
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """Of what makes containers, which is asked for. Raises MissingCapability, HostError."""
        return self._ask("be asked for its version", version_command(self.runtime))

    def has_image(self, image: str) -> bool:
        """Whether the image is here."""
        try:
            self._ask(f"look for image {image}", has_image_command(image))
        except UserError:
            return False
        return True

    def pull(self, image: str, *, insecure: bool = False) -> None:
        """Bring the image; its digest is proved by the runtime. Raises UserError, HostError, OutOfSpace."""
        self._ask(f"pull {image}", pull_command(self.runtime, image, insecure=insecure), seconds=_PULL_S)

    def create(self, plan: ContainerPlan, *, seconds: float = _CHANGE_S) -> str:
        """Its id. Raises UserError when image or program are not there, HostError, ResourceBusy."""
        said = self._ask(
            f"make a container of {plan.image}", create_command(self.runtime, plan), seconds=min(seconds, _CHANGE_S)
        )
        return said.split()[-1] if said else plan.name

    def start(self, container: str, *, seconds: float = _CHANGE_S) -> None:
        """Raises UserError when its program cannot be executed, HostError."""
        self._ask("start the container", start_command(container), seconds=min(seconds, _CHANGE_S))

    def state(self, container: str) -> ContainerState | None:
        """None: there is no such container."""
        try:
            status, pid, code = self._ask("look at a container", inspect_command(container)).split()
        except ColdsnapError as error:
            if is_absent(error.message):
                return None
            raise
        return ContainerState(status=status, pid=int(pid), exit_code=int(code))

    def last_words(self, container: str, num_lines: int = 12) -> str:
        """What its first process printed, as far as it can be had."""
        try:
            return self._run(logs_command(container, num_lines), _QUESTION_S, both=True)
        except ColdsnapError:
            return ""

    def remove(self, container: str) -> None:
        """Remove it, whatever it does; nothing to do when it is gone. Raises HostError."""
        try:
            self._ask("remove a container", remove_command(container), seconds=_CHANGE_S)
        except ColdsnapError as error:
            if not is_absent(error.message):
                raise

    def find(self, labels: Mapping[str, str]) -> tuple[Found, ...]:
        """Every container with these labels."""
        lines = self._ask("list containers", find_command(labels)).splitlines()
        return tuple(Found(id=one, name=name) for one, _, name in (line.partition("\t") for line in lines))

    def _ask(self, doing: str, words: tuple[str, ...], *, seconds: float = _QUESTION_S) -> str:
        try:
            return self._run(words, seconds).strip()
        except subprocess.CalledProcessError as error:
            raise runtime_error(self.runtime, doing, error.stderr or error.stdout) from error
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"{self.runtime} did not {doing} within {seconds:g} s",
                cure=f"see whether `{self.runtime} info` answers",
                facts={"phase": doing, "deadline_s": seconds},
            ) from error

    def _run(self, words: tuple[str, ...], seconds: float, *, both: bool = False) -> str:
        if self.program is None:
            raise missing_program(self.runtime)
        try:
            done = subprocess.run(
                [str(self.program), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if both else subprocess.PIPE,
                env=dict(self.environment),
                timeout=seconds,
                check=not both,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise missing_program(self.runtime) from error
        except OSError as error:
            raise runtime_error(self.runtime, "be run", str(error)) from error
        return done.stdout
