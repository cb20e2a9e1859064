"""Steps of the proof of shipping: several publishers with one pack, and servers that lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks._proof import Found
from benchmarks._ship_homes import TOKEN, Homes, made

from coldsnap.errors import ColdsnapError
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.publish import publish, publish_capsules_request
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_registry
from coldsnap.ship.remotes import Remotes
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.registry import RegistryServer
from coldsnap.testing.shipping import Errand, start_errand
from coldsnap.testing.stand import Stand
from coldsnap.testing.synthetic import SyntheticSpec, make_synthetic
from coldsnap.testing.web import Lie, Web

__all__ = ["hear_lies", "publish_one_pack"]

_QUICK = Limits(
    connect_s=5.0, idle_s=1.0, answer_s=4.0, slow_s=1.0, slow_bytes=64 << 10, attempts=3, first_pause_s=0.01,
    longest_pause_s=0.05, range_bytes=1 << 20, request_bytes=1 << 20,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Deceit:
    """A lie of a server, and the reason by which it must be refused."""

    server: str
    lie: Lie
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Met:
    """What became of a deceit: the reason that was given, and in how many requests."""

    server: str
    lie: str
    to: str
    expected: str
    reason: str
    requests: int
    nothing_eligible: bool


DECEITS = (
    Deceit(server="hub", lie=Lie(what="wrong-bytes", to="GET /cdn/"), reason="digest_mismatch"),
    Deceit(server="hub", lie=Lie(what="wrong-length", to="GET /cdn/"), reason="wrong_length"),
    Deceit(server="hub", lie=Lie(what="truncate", to="GET /cdn/"), reason="truncated"),
    Deceit(server="hub", lie=Lie(what="drip", to="GET /cdn/"), reason="too_slow"),
    Deceit(server="hub", lie=Lie(what="redirect-loop", to="GET /org/packs"), reason="redirect_loop"),
    Deceit(server="hub", lie=Lie(what="status", to="GET /cdn/", status=500), reason="server_error"),
    Deceit(server="hub", lie=Lie(what="status", to="POST .*paths-info", status=429), reason="rate_limited"),
    Deceit(server="hub", lie=Lie(what="status", to="GET /org/packs", status=403), reason="forbidden"),
    Deceit(server="registry", lie=Lie(what="wrong-bytes", to="GET .*/manifests/"), reason="digest_mismatch"),
    Deceit(server="registry", lie=Lie(what="wrong-bytes", to="GET .*/blobs/"), reason="digest_mismatch"),
    Deceit(server="registry", lie=Lie(what="truncate", to="GET .*/blobs/"), reason="truncated"),
    Deceit(server="registry", lie=Lie(what="redirect-loop", to="GET .*/blobs/"), reason="redirect_loop"),
    Deceit(server="registry", lie=Lie(what="status", to="GET .*/blobs/", status=503), reason="server_error"),
    Deceit(server="registry", lie=Lie(what="drip", to="GET .*/blobs/"), reason="too_slow"),
)


def publish_one_pack(homes: Homes) -> Found:
    """Two publishing processes and two workers, one pack."""
    folder = made(homes.folder / "replicas")
    state = StateRoot.open(folder / "state")
    spec = SyntheticSpec(workers_per_unit=2, num_extents=3000, replicas=True, payloads=True)
    loaded = make_synthetic(state, folder / "artifact.json", spec)
    packs = loaded.packs()
    (pack,) = {(one.sha256, one.bytes) for one in packs.values()}
    homes.hub.reset()
    errands = [
        Errand(
            verb="publish-native",
            operation_id=f"replicas-{number}",
            state_root=folder / "state",
            artifact=loaded.path,
            limits=Limits(),
            hub_url=homes.hub.url,
            token=TOKEN,
            to="hf://org/replicas",
            output=folder / f"published-{number}.json",
        )
        for number in range(2)
    ]
    processes = [start_errand(one) for one in errands]
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise AssertionError(f"the publishers ended with {[process.exitcode for process in processes]}")
    digests = {load_artifact(one.output).digest for one in errands}
    return Found(
        document={"workers": len(packs), "pack_bytes": pack[1], "hub_received_bytes": homes.hub.received_bytes},
        rows=[("received", f"{homes.hub.received_bytes / pack[1]:.2f} packs")],
        aims={
            "two workers, one pack": len(packs) == 2,
            "one upload": pack[1] <= homes.hub.received_bytes < 1.5 * pack[1],
            "one commit": homes.hub.num_commits("org/replicas") == 1,
            "the same descriptor": len(digests) == 1,
        },
    )


def hear_lies(homes: Homes) -> Found:
    """Every deceit is refused by its name and leaves nothing eligible; then honesty is enough."""
    homes.away.prepare("prepare-3")
    folder = made(homes.folder / "deceived")
    registry = homes.stack.enter_context(RegistryServer(folder / "registry"))
    to = parse_registry(f"oci://{registry.host}/org/capsules")
    request = publish_capsules_request(homes.shipped, operation_id="publish-lies", to=to, output=folder / "a.json")
    publish(homes.away.tools, homes.away.loaded, request)
    one = Stand(folder=folder, model=homes.home.model, plugin=homes.home.plugin)
    homes.stack.callback(one.tools.host.close)
    known = one.tools.remotes
    one.tools = replace(one.tools, remotes=Remotes(limits=_QUICK, hub_access=known.hub_access))
    loaded = load_artifact(folder / "a.json")
    pack = one.tools.store.path(next(iter(loaded.packs().values())).sha256)
    capsule = one.tools.state.capsules / loaded.capsule_digest("u0").hex
    servers: Mapping[str, Web] = {"hub": homes.hub, "registry": registry}
    table: list[_Met] = []
    for number, deceit in enumerate(DECEITS):
        for server in servers.values():
            server.reset()
        servers[deceit.server].lies.append(deceit.lie)
        met = _reason(partial(one.prepare, f"deceived-{number}", loaded, weights="native"))
        clean = not capsule.exists() and (deceit.server == "registry" or not pack.exists())
        table.append(
            _Met(
                server=deceit.server,
                lie=deceit.lie.what,
                to=deceit.lie.to,
                expected=deceit.reason,
                reason=met,
                requests=len(servers[deceit.server].asked),
                nothing_eligible=clean,
            )
        )
        pack.unlink(missing_ok=True)
    for server in servers.values():
        server.reset()
    honest = one.prepare("honest", loaded, weights="native").source
    num_ranges = sum(-(-pack.bytes // _QUICK.range_bytes) for pack in loaded.packs().values())
    most = 200 + _QUICK.attempts * 2 * num_ranges  # each range is asked for, and then at the place it is said to be
    wrong = [entry for entry in table if entry.reason != entry.expected]
    return Found(
        document={"deceits": [asdict(entry) for entry in table], "honest": honest},
        rows=[(f"{entry.server} {entry.lie} {entry.to}", entry.reason) for entry in table],
        aims={
            "each is refused by its name": wrong == [],
            "nothing eligible is left": all(entry.nothing_eligible for entry in table),
            "tries are bounded": all(entry.requests < most for entry in table),
            "then an honest server is enough": honest == "native",
        },
    )


def _reason(work: Callable[[], object]) -> str:
    """The reason in the facts of what ``work`` raises."""
    try:
        work()
    except ColdsnapError as error:
        return str(error.facts.get("reason", type(error).__name__))
    return "nothing was refused"
