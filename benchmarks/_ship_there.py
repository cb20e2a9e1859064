"""Steps of the proof of shipping: published, wiped, prepared and restored elsewhere, and in a home that moved."""

from __future__ import annotations

import json
import shutil

from benchmarks._proof import Found
from benchmarks._ship_homes import MIB, TOKEN, Homes, made

from coldsnap.ops.demo_parts import UNSEEN
from coldsnap.ops.explain import explain
from coldsnap.ops.publish import publish, publish_capsules_request
from coldsnap.ops.publish_native import publish_native, publish_packs_request
from coldsnap.ship.names import parse_hub
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.stand import Stand

__all__ = [
    "ask_explain",
    "prepare_twice",
    "publish_again",
    "publish_first",
    "recover_in_moved_home",
    "restore_there",
]

_INSIDE = "/dev/shm/model"  # noqa: S108 - a place in a unit, whose /dev/shm is its own
_HEADERS_BYTES = 64 * 1024  # what a publication that moves nothing may say, in and out


def publish_first(homes: Homes) -> Found:
    """Capture, and send everything."""
    before = homes.home.loaded.path.read_bytes()
    pack_bytes, capsule_bytes = homes.home.result.pack_bytes, homes.home.result.capsule_bytes
    homes.relay.reset()
    payloads = homes.shipped.artifact.weights.model_payloads
    commit = payloads.revision if payloads is not None else ""
    return Found(
        document={**homes.sent, "pack_bytes": pack_bytes, "capsule_bytes": capsule_bytes, "hub_commit": commit},
        rows=[
            ("packs", f"{pack_bytes / MIB:.1f} MiB to the hub, commit {commit[:12]}"),
            ("capsules", f"{homes.relay.received_bytes / MIB:.1f} MiB through the relay to docker-registry"),
        ],
        aims={
            "the captured artifact is unchanged": homes.home.loaded.path.read_bytes() == before,
            "the hub received the packs once": pack_bytes <= homes.hub.received_bytes < pack_bytes * 1.05 + MIB,
            "the hub has one commit": homes.hub.num_commits("org/packs") == 1,
        },
    )


def publish_again(homes: Homes) -> Found:
    """The same once more, to new descriptors."""
    home, shipped = homes.home, homes.shipped
    homes.hub.reset()
    homes.relay.reset()
    native = publish_packs_request(
        shipped, operation_id="publish-native-2", to=parse_hub("hf://org/packs"), output=home.folder / "again.json"
    )
    packs = publish_native(home.tools, shipped, native)
    request = publish_capsules_request(
        shipped, operation_id="publish-2", to=homes.capsules_go_to(), output=home.folder / "again.json"
    )
    capsules = publish(home.tools, shipped, request)
    counted = {"hub_received_bytes": homes.hub.received_bytes, "relay_received_bytes": homes.relay.received_bytes}
    return Found(
        document=counted,
        rows=[("received by hub, relay", f"{counted['hub_received_bytes']}, {homes.relay.received_bytes} bytes")],
        aims={
            "no pack byte moved": packs.sent_bytes == 0 and homes.hub.received_bytes < 4096,
            "no capsule byte moved": capsules.sent_bytes == 0 and homes.relay.received_bytes < _HEADERS_BYTES,
            "no second commit": homes.hub.num_commits("org/packs") == 1,
            "the same descriptor": packs.artifact_digest == shipped.digest == capsules.artifact_digest,
        },
    )


def ask_explain(homes: Homes) -> Found:
    """Wipe, and ask the other home what would happen."""
    _ = homes.expected, homes.shipped
    shutil.rmtree(homes.home.tools.state.path)
    homes.hub.reset()
    homes.relay.reset()
    away = homes.away
    found = explain(away.tools, away.loaded, away.request("explain-1"))
    return Found(
        document=found.document(),
        rows=[("would restore by", found.rung.rung.value if found.rung is not None else "nothing")],
        aims={
            "explain says native": found.rung is not None and found.rung.rung.value == "native",
            "nobody was asked": homes.hub.asked == [] and homes.relay.received_bytes == 0,
            "nothing was downloaded": not any(away.tools.state.capsules.iterdir()),
        },
    )


def prepare_twice(homes: Homes) -> Found:
    """Two processes at once on one host."""
    away = homes.away
    homes.hub.reset()
    homes.relay.reset()
    words = ("prepare", away.loaded.path, "--json", "--quiet")
    both = [away.cli(*words) for _ in range(2)]
    said = [process.communicate(timeout=600) for process in both]
    if any(process.returncode for process in both):
        raise AssertionError("\n".join(err for _, err in said))
    found = [json.loads(out) for out, _ in said]
    fetched = sum(one["bytes"] for result in found for one in result["fetched"])
    pack_bytes = homes.home.result.pack_bytes
    return Found(
        document={
            "results": found,
            "hub_sent_bytes": homes.hub.sent_bytes,
            "relay_sent_bytes": homes.relay.sent_bytes,
        },
        rows=[("sent by hub, relay", f"{homes.hub.sent_bytes / MIB:.1f}, {homes.relay.sent_bytes / MIB:.1f} MiB")],
        aims={
            "one download of the pack": pack_bytes <= homes.hub.sent_bytes < pack_bytes * 1.05 + MIB,
            "one download of the capsule": homes.relay.sent_bytes < homes.home.result.capsule_bytes * 1.05 + MIB,
            "both report native": all(one["source"] == "native" for one in found),
            "what was fetched is told": fetched >= pack_bytes,
            "no token in what was printed": not any(TOKEN in text for pair in said for text in pair),
        },
    )


def restore_there(homes: Homes) -> Found:
    """Restore there, from what was prepared, and ask."""
    away = homes.away
    away.prepare("prepare-1")
    homes.hub.reset()
    homes.relay.reset()
    result = away.restore("restore-1", name="moved")
    given = away.ask(UNSEEN)
    asked = list(homes.hub.asked)
    away.stop_all()
    token = TOKEN.encode()
    kept = [path for path in away.folder.rglob("*") if path.is_file() and token in path.read_bytes()]
    return Found(
        document={"source": result.source, "rung": result.rung, "seconds": dict(result.seconds)},
        rows=[("restored from", result.source), ("seconds", f"{result.seconds['total']:.2f}")],
        aims={
            "tokens equal": given == homes.expected and len(given) == len(UNSEEN),
            "restored from the pack": result.source == "native",
            "nothing was asked of servers": asked == [] and homes.relay.received_bytes == 0,
            "another port, folder and state root": away.port != homes.home.port
            and not away.folder.is_relative_to(homes.home.folder),
            "nothing left": away.leftovers() == [],
            "no token in any file": kept == [],
        },
    )


def recover_in_moved_home(homes: Homes) -> Found:
    """No pack, and the checkpoint in another user's folder: a recovery through a mount with another source."""
    folder = made(homes.folder / "moved")
    before, after = folder / "home-of-one" / "model", folder / "home-of-another" / "models" / "m"
    shutil.copytree(homes.home.model, before)
    captured = Stand(folder=made(folder / "first"), model=before, plugin=homes.home.plugin)
    homes.stack.callback(captured.tools.host.close)
    captured.capture(model=_INSIDE, mounts=[{"source": str(before), "target": _INSIDE}])
    after.parent.mkdir(parents=True)
    before.rename(after)
    pack = captured.tools.store.path(next(iter(captured.loaded.packs().values())).sha256)
    pack.unlink()
    mounts = {_INSIDE: str(after)}
    closed = explain(captured.tools, captured.loaded, captured.request("closed-1", weights="recovery"))
    open_ = explain(captured.tools, captured.loaded, captured.request("open-1", weights="recovery", mounts=mounts))
    port = free_port()
    try:
        result = captured.restore("recovered-1", name="recovered", port=port, weights="recovery", mounts=mounts)
        given = captured.ask(UNSEEN, port)
    finally:
        captured.stop_all()
    said = [str(problem) for gate in closed.gates for problem in gate.problems]
    return Found(
        document={"source": result.source, "rung": result.rung, "refused_without": said},
        rows=[("restored from", result.source)],
        aims={
            "without the new place it is refused by name": closed.rung is None and str(before) in "".join(said),
            "explain agrees with it": open_.rung is not None and open_.rung.rung.value == "recovery",
            "tokens equal": given == homes.expected,
            "restored from the checkpoint": result.source == "recovery",
        },
    )
