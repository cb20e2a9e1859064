"""The whole way: captured, published to a real registry and a hub, wiped, prepared from there, restored."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.messages import Answer
from coldsnap.ops.artifacts import load_artifact
from coldsnap.testing.hub import HubServer
from coldsnap.testing.registry import RealRegistry, real_registry
from coldsnap.testing.stand import PATIENCE_S, UNSEEN, Stand

pytestmark = pytest.mark.criu

TOKEN = "hf_PlantedTokenOfTheWholeWay"


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where things are published to."""

    hub: HubServer
    registry: RealRegistry


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """A hub and Debian's registry, with the environment that leads the command line there."""
    folder = tmp_path_factory.mktemp("ports")
    with (
        pytest.MonkeyPatch.context() as patch,
        real_registry(folder / "registry") as registry,
        HubServer(folder / "hub", token=TOKEN) as hub,
    ):
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("DOCKER_CONFIG", str(folder / "nobody"))
        yield Ports(hub=hub, registry=registry)


def run(stand: Stand, *words: str | Path) -> dict[str, Any]:
    """A command that succeeds, and the object it prints."""
    with stand.cli(*words, "--json") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err + out
    assert TOKEN not in out + err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def shipped(stand: Stand, ports: Ports) -> Path:
    """The descriptor that names commit and references; made by the command line."""
    native, both = stand.folder / "native.json", stand.folder / "shipped.json"
    before = stand.loaded.path.read_bytes()
    packs = run(stand, "publish-native", stand.loaded.path, "--to", "hf://org/packs", "-o", native)
    assert packs["sent_bytes"] == stand.result.pack_bytes
    capsules = run(stand, "publish", native, "--to", f"oci://{ports.registry.host}/org/capsules", "-o", both)
    assert capsules["sent_bytes"] >= stand.result.capsule_bytes
    assert stand.loaded.path.read_bytes() == before
    return both


def wipe(stand: Stand) -> None:
    """Take away everything that an artifact can be restored from."""
    for folder in ("capsules", "prepared", "model-payloads/sha256", "staging"):
        shutil.rmtree(stand.tools.state.path / folder)
        (stand.tools.state.path / folder).mkdir(mode=0o700)


def test_published_wiped_prepared_restored(
    stand: Stand, ports: Ports, shipped: Path, expected: tuple[Answer, ...]
) -> None:
    wipe(stand)
    with stand.cli("prepare", shipped, "--offline", "--json", "--quiet") as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    reference = load_artifact(shipped).artifact.capsule.images[0].reference
    assert reference in json.dumps(json.loads(out)["problems"])
    assert run(stand, "explain", shipped)["by"] == "native"
    assert list(stand.tools.state.capsules.iterdir()) == []
    prepared = run(stand, "prepare", shipped)
    assert (prepared["source"], prepared["from_record"]) == ("native", False)
    assert sorted(one["kind"] for one in prepared["fetched"]) == ["manifest", "pack"]
    ports.hub.reset()
    result = stand.restore("shipped-1", load_artifact(shipped))
    assert result.source == "native"
    assert stand.ask(UNSEEN) == expected
    assert ports.hub.asked == []
    assert run(stand, "prepare", shipped)["from_record"]


def test_a_second_publication_moves_nothing(stand: Stand, ports: Ports, shipped: Path) -> None:
    run(stand, "prepare", shipped)  # a capsule that was wiped is here again
    ports.hub.reset()
    packs = run(stand, "publish-native", shipped, "--to", "hf://org/packs", "-o", stand.folder / "again.json")
    to = f"oci://{ports.registry.host}/org/capsules"
    capsules = run(stand, "publish", shipped, "--to", to, "-o", stand.folder / "again.json")
    assert (packs["sent_bytes"], capsules["sent_bytes"]) == (0, 0)
    assert ports.hub.received_bytes < 4096
    assert ports.hub.num_commits("org/packs") == 1
    assert {one["outcome"] for one in capsules["objects"]} == {"already there"}


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def test_outside_judges_agree_with_the_published_capsule(stand: Stand, ports: Ports, shipped: Path) -> None:
    run(stand, "prepare", shipped)
    loaded = load_artifact(shipped)
    reference = loaded.artifact.capsule.images[0].reference
    facts = json.loads(output("skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"))
    assert facts["Digest"] == str(loaded.capsule_digest("u0"))
    copy = stand.folder / "judged"
    words = ("--preserve-digests", "--src-tls-verify=false", f"docker://{reference}", f"oci:{copy}:u0")
    output("skopeo", "copy", *words)
    output("umoci", "unpack", "--rootless", "--image", f"{copy}:u0", str(stand.folder / "bundle"))
    unpacked = stand.folder / "bundle" / "rootfs" / "coldsnap"
    prepared = stand.tools.state.prepared / loaded.capsule_digest("u0").hex
    for path, (size, _) in loaded.expected_files("u0").items():
        parts = sorted(unpacked.glob(f"{path}.zst*")) or [unpacked / path]
        data = b"".join(part.read_bytes() for part in parts)
        if parts[0].name != Path(path).name:
            data = subprocess.run(["zstd", "-dc"], input=data, check=True, capture_output=True, timeout=60).stdout
        assert len(data) == size
        assert data == (prepared / path).read_bytes()
    shutil.rmtree(stand.folder / "bundle")


def test_nothing_secret_is_kept(stand: Stand, shipped: Path) -> None:
    kept = [stand.tools.state.path, shipped, stand.folder / "native.json"]
    files = [path for one in kept for path in (one.rglob("*") if one.is_dir() else [one]) if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
