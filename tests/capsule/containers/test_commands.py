"""The words for docker and podman, and what theirs mean. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.capsule.containers.answers import is_absent, missing_program, runtime_error
from coldsnap.capsule.containers.commands import (
    CAPABILITIES,
    ContainerPlan,
    bind_fault,
    create_command,
    find_command,
    pull_command,
)
from coldsnap.capsule.driver import BindMount
from coldsnap.core.launch import Runtime
from coldsnap.errors import (
    ColdsnapError,
    HostError,
    MissingCapability,
    OutOfSpace,
    ResourceBusy,
    UserError,
)

IMAGE = "registry.example.com/org/root@sha256:" + "0" * 64
PLAN = ContainerPlan(
    name="n",
    image=IMAGE,
    command=("/usr/bin/python3", "-I", "-c", "text", "7"),
    mounts=(
        BindMount(source=Path("/a"), target=Path("/b"), read_only=True),
        BindMount(source=Path("/c d"), target=Path("/e")),
    ),
    labels={"coldsnap.unit": "u0", "coldsnap.service": "svc"},
)


def values(words: tuple[str, ...], name: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == name]


@pytest.mark.parametrize("runtime", Runtime)
def test_the_image_stands_between_options_and_words(runtime: Runtime) -> None:
    words = create_command(runtime, PLAN)
    at = words.index(IMAGE)
    assert words[at + 1 :] == PLAN.command[1:]
    assert values(words[:at], "--entrypoint") == [PLAN.command[0]]
    assert values(words[:at], "--pull") == ["never"]
    assert values(words, "--mount") == ["type=bind,source=/a,target=/b,readonly", "type=bind,source=/c d,target=/e"]
    assert values(words, "--label") == ["coldsnap.service=svc", "coldsnap.unit=u0"]


@pytest.mark.parametrize("runtime", Runtime)
def test_capabilities_are_those_of_the_list_and_no_more(runtime: Runtime) -> None:
    words = create_command(runtime, PLAN)
    assert values(words, "--cap-drop") == ["ALL"]
    assert tuple(values(words, "--cap-add")) == CAPABILITIES
    assert "--privileged" not in words
    assert {"SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME"} <= set(CAPABILITIES)
    assert set(values(words, "--security-opt")) == {"seccomp=unconfined", "apparmor=unconfined", "label=disable"}


@pytest.mark.parametrize("runtime", Runtime)
def test_what_is_shared_with_the_host_and_what_is_not(runtime: Runtime) -> None:
    words = create_command(runtime, PLAN)
    for name in ("--network", "--uts", "--cgroupns", "--userns"):
        assert values(words, name) == ["host"], name
    assert values(words, "--ipc") == ["private"]
    assert "--pid" not in words, "one of its own is what both make when nothing is said"
    assert "--rm" not in words, "its last words are read after its end"


def test_gpus_are_asked_for_in_each_ones_own_way() -> None:
    plan = ContainerPlan(name="n", image=IMAGE, command=("p",), devices=("GPU-1", "GPU-2"))
    assert values(create_command(Runtime.DOCKER, plan), "--gpus") == ['"device=GPU-1,GPU-2"']
    podman = create_command(Runtime.PODMAN, plan)
    assert values(podman, "--device") == ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2"]
    assert "--gpus" not in podman
    for runtime in Runtime:
        assert {"--gpus", "--device"}.isdisjoint(create_command(runtime, PLAN))


def test_a_registry_without_tls_is_said_to_podman_only() -> None:
    assert "--tls-verify=false" in pull_command(Runtime.PODMAN, IMAGE, insecure=True)
    assert "--tls-verify=false" not in pull_command(Runtime.PODMAN, IMAGE, insecure=False)
    assert "--tls-verify=false" not in pull_command(Runtime.DOCKER, IMAGE, insecure=True)


def test_every_label_must_match() -> None:
    assert values(find_command({"b": "2", "a": "1"}), "--filter") == ["label=a=1", "label=b=2"]


@pytest.mark.parametrize(("path", "fault"), [("/a b", False), ("/a,b", True), ('/a"b', True), ("/a\nb", True)])
def test_paths_that_a_bind_cannot_name(path: str, fault: bool) -> None:
    assert bool(bind_fault(Path(path))) is fault


SAID: list[tuple[str, type[ColdsnapError], str]] = [
    # as Docker 20.10 and 28.2, and podman 4.3, say it
    ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
     MissingCapability, "start its daemon"),
    ("failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct",
     MissingCapability, "start its daemon"),
    ("Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
     MissingCapability, "run as root"),
    ('permission denied while trying to connect: Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.41/version": dial unix',
     MissingCapability, "run as root"),
    (f"Error response from daemon: No such image: {IMAGE}", UserError, "coldsnap prepare"),
    (f"Error: {IMAGE}: image not known", UserError, "coldsnap prepare"),
    ("Error response from daemon: manifest unknown: manifest unknown", UserError, "coldsnap prepare"),
    ('Error response from daemon: Conflict. The container name "/n" is already in use by container "ab".',
     ResourceBusy, "ps --all"),
    ('Error: creating container storage: the container name "n" is already in use by ab. You have to remove',
     ResourceBusy, "ps --all"),
    ("write /var/lib/docker/tmp/x: no space left on device", OutOfSpace, "free some space"),
    ("unauthorized: authentication required", UserError, "login"),
    ('runc create failed: unable to start container process: exec: "/no/python": stat /no/python: no such file',
     UserError, "python"),
    ('Error: runc: exec failed: exec: "/no/python": stat /no/python: no such file or directory', UserError, "python"),
    ('Error response from daemon: Get "https://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused',
     HostError, "registry"),
    ("something new", HostError, "info"),
    ("", HostError, "info"),
]  # fmt: skip


@pytest.mark.parametrize("runtime", Runtime)
@pytest.mark.parametrize(("said", "kind", "cure"), SAID, ids=range(len(SAID)))
def test_what_they_say_names_who_must_act(runtime: Runtime, said: str, kind: type[ColdsnapError], cure: str) -> None:
    error = runtime_error(runtime, "do it", said)
    assert type(error) is kind
    assert cure in (error.cure or "")
    assert f"{runtime} cannot do it" in error.message
    assert (said[-60:] or "it said nothing") in error.message


def test_a_container_that_is_gone_is_recognised() -> None:
    assert is_absent("Error response from daemon: No such container: abc")
    assert is_absent('Error: no container with name or ID "abc" found: no such container')
    assert not is_absent("Error response from daemon: No such image: abc")
    assert not is_absent("Cannot connect to the Docker daemon")


def test_a_program_that_is_missing_says_how_to_go_on() -> None:
    error = missing_program(Runtime.PODMAN)
    assert "podman is not on this machine" in error.message
    assert "install podman" in (error.cure or "")
