"""Every record below the state root, damaged in every way: what is a cache is made anew, what is not is named.

No verb ends in a bug, no running service ends with an error, nothing else changes; and once the record is as it was,
everything goes on.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from coldsnap.capsule.cuda.inventory import CACHE_NAME as INVENTORY_NAME
from coldsnap.capsule.cuda.inventory import read_inventory
from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.capsule.hostfiles import PROOFS_NAME, check_host_files
from coldsnap.capsule.probes.remembered import CACHE_NAME as PASSES_NAME
from coldsnap.capsule.probes.remembered import Ground, Passes
from coldsnap.core.bindings import HostFile, HostFilesBinding
from coldsnap.core.digest import Digest
from coldsnap.core.ladder import Rung
from coldsnap.errors import ColdsnapError, CriuError, InternalError, InvalidDocument, Problem, Refused, UsageError
from coldsnap.ops.calibration import CALIBRATION_NAME, calibrate, known_calibration
from coldsnap.ops.live import service_status, service_statuses, sleep_service, stop_service, wake_service
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.predict import predict
from coldsnap.ops.quarantine import quarantined, remember_failure
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_tidy
from coldsnap.ops.usage import find_usage
from coldsnap.ops.verify import verify_artifact
from coldsnap.store.admission import record_path
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.desk import EngineProcess

from .conftest import HOST, Shop  # isort: skip

MIB = 1024 * 1024
NOBODY = 65534


# -- the records --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kind:
    """``path``: where it is, once ``make`` has seen to it. ``cache``: it only saves time, and no verb may miss it."""

    path: Callable[[Shop], Path]
    make: Callable[[Shop], object] = lambda shop: None
    cache: bool = False


def one_below(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def overlay(shop: Shop) -> None:
    request = materialize_request(shop.loaded, operation_id="overlay-1")
    made = materialize(shop.tools, shop.loaded, request, overlay=True).overlay
    assert made is not None
    assert made.outcome == "made", made.reason


def failure(shop: Shop) -> None:
    error = CriuError("it did not come back")
    remember_failure(
        shop.tools, shop.loaded.digest, shop.loaded.path, operation_id="r-0", rung=Rung.NATIVE, error=error
    )


KINDS: Mapping[str, Kind] = {
    "service": Kind(path=lambda shop: shop.tools.services.folder("svc") / "service.json"),
    "lease": Kind(path=lambda shop: one_below(shop.tools.state.artifacts, "*.json")),
    "receipt": Kind(path=lambda shop: shop.tools.state.receipts / "restore-1.json"),
    "failures": Kind(path=lambda shop: shop.tools.state.failures / f"{shop.loaded.digest.hex}.json", make=failure),
    "overlay": Kind(path=lambda shop: shop.tools.state.overlays / f"{shop.loaded.digest.hex}.json", make=overlay),
    "validation": Kind(path=lambda shop: record_path(shop.tools.store.path(shop.result.pack_digests[0])), cache=True),
    "prepared": Kind(
        path=lambda shop: shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex / "prepared.json",
        cache=True,
    ),
    "calibration": Kind(
        path=lambda shop: shop.tools.state.path / CALIBRATION_NAME,
        make=lambda shop: calibrate(shop.tools.state, num_bytes=MIB),
        cache=True,
    ),
}


# -- the ways -----------------------------------------------------------------------------------------


def newer(path: Path) -> None:
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "format": document.get("format", 1) + 1, "later": True}))


def extra(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "prot": 1}))


def in_place_of(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def link(path: Path) -> None:
    """To the very same bytes, elsewhere: right, and not to be trusted."""
    other = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(other)
    path.symlink_to(other)


def folder(path: Path) -> None:
    (path / "of-somebody").mkdir(parents=True)


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "no-json": lambda path: path.write_bytes(b"\x00coldsnap\xff"),
    "deep": lambda path: path.write_bytes(b"[" * (MIB // 2)),
    "huge": lambda path: path.write_bytes(b"[" * (100 * MIB)),
    "list": lambda path: path.write_bytes(b"[]"),
    "newer": newer,
    "extra": extra,
    "folder": lambda path: in_place_of(path, folder),
    "empty-folder": lambda path: in_place_of(path, Path.mkdir),
    "pipe": lambda path: in_place_of(path, os.mkfifo),
    "link": link,
    "dangling": lambda path: in_place_of(path, lambda place: place.symlink_to("/nowhere")),
    "public": lambda path: path.chmod(0o666),
    "foreign": lambda path: os.chown(path, NOBODY, NOBODY),
}


@dataclass(frozen=True, kw_only=True)
class Aside:
    """The record as it was, to be put back."""

    path: Path
    data: bytes

    def put_back(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            for inside in self.path.iterdir():
                inside.rmdir()
            self.path.rmdir()
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(self.data)
        self.path.chmod(0o600)


# -- the verbs ----------------------------------------------------------------------------------------


def verbs(shop: Shop) -> Iterator[tuple[str, Callable[[], object]]]:
    """In an order in which each can be done when those before it were."""
    yield "status", lambda: raised(service_statuses(shop.tools)[1])
    yield "status of one", lambda: service_status(shop.tools, "svc")
    yield "quarantined", lambda: quarantined(shop.tools)
    yield "usage", lambda: find_usage(shop.tools.state.path)
    yield "verify", lambda: verify_artifact(shop.tools, shop.loaded)
    yield "predict", lambda: predict(shop.tools, shop.loaded, shop.request("predict-1"), measure=False)
    yield "gc", lambda: run_tidy(shop.tools, plan_tidy(shop.tools))
    yield "gc that forgets", lambda: run_tidy(shop.tools, plan_tidy(shop.tools, forget_missing=True))
    yield "same operation", lambda: sleep_service(shop.tools, shop.live("sleep", "restore-1"))
    yield "sleep", lambda: sleep_service(shop.tools, shop.live("sleep"))
    yield "wake", lambda: wake_service(shop.tools, shop.live("wake"))
    yield "restore", lambda: shop.restore("restore-2")
    yield "stop", lambda: stop_service(shop.tools, "svc")
    yield "delete", lambda: plan_delete(shop.tools, shop.loaded.path)


def failed(act: Callable[[], object]) -> ColdsnapError | None:
    """How it failed. What is no error of ours is a bug, and goes on."""
    try:
        act()
    except ColdsnapError as error:
        return error
    return None


def problems_of(error: ColdsnapError) -> tuple[Problem, ...]:
    return error.problems if isinstance(error, InvalidDocument | Refused) else ()


def raised(unknown: Mapping[str, ColdsnapError]) -> None:
    for error in unknown.values():
        raise error


def told(error: ColdsnapError) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def answers_are_right(shop: Shop) -> bool:
    prompts, expected = shop.loaded.acceptance()
    return OutsideClient(host=HOST, port=shop.port).complete(prompts, timeout_s=60) == expected


def committed(shop: Shop) -> dict[Path, Digest]:
    """What nobody may touch: the pack, the capsule, the artifact."""
    state = shop.tools.state
    files = [path for place in (state.payloads, state.capsules) for path in place.rglob("*") if path.is_file()]
    packs = [path for path in (*files, shop.loaded.path) if not path.name.endswith("validation.json")]
    return {path: Digest.of(path.read_bytes()) for path in packs}


@pytest.fixture(autouse=True)
def _each_freeze_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real tree that was frozen twice has two images, so its overlay is worth keeping; so has the fake one here."""
    frozen, count = EngineProcess.freeze, iter(range(1000))
    monkeypatch.setattr(
        EngineProcess,
        "freeze",
        lambda process: json.dumps({**json.loads(frozen(process)), "times": next(count)}).encode(),
    )


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_of_every_record(shop: Shop, kind: str, damage: str) -> None:
    shop.restore("restore-1")
    KINDS[kind].make(shop)
    path = KINDS[kind].path(shop)
    aside = Aside(path=path, data=path.read_bytes())
    before = committed(shop)
    DAMAGES[damage](path)

    named: list[str] = []
    for verb, act in verbs(shop):
        error = failed(act)
        if isinstance(error, UsageError) and "sleep" in named:
            continue  # it could not be put to sleep, so it cannot be woken
        if verb == "same operation" and isinstance(error, Refused) and kind != "receipt":
            continue  # another request had that id
        if error is not None:
            assert not isinstance(error, InternalError)
            assert not KINDS[kind].cache, f"{verb}: {told(error)}"
            assert str(path) in told(error), verb
            assert error.cure or problems_of(error), f"{verb} says no way out: {told(error)}"
            named.append(verb)
        if verb != "stop" and "stop" not in named:
            assert shop.kit.units.running() or verb == "delete", f"{verb} ended the service"
    assert committed(shop) == before
    if KINDS[kind].cache:
        return
    aside.put_back()
    shop.restore("restore-3")
    assert answers_are_right(shop)
    assert stop_service(shop.tools, "svc") == 1


# -- caches that no verb of the fakes reads -----------------------------------------------------------


class Helper:
    """A driver with one GPU."""

    def ask(self, call: str) -> object:
        gpu = {"index": 0, "uuid": "GPU-0", "name": "Fake GPU", "compute_capability": "9.0"}
        return {"version": 13000, "devices": [gpu]}[call]

    def close(self) -> None: ...


def use_host_files(folder: Path) -> Path:
    library = folder / "library.so"
    library.write_bytes(b"code")
    file = HostFile(path=str(library), bytes=4, sha256=Digest.of(b"code"))
    binding = HostFilesBinding(kind="coldsnap-host-files", unit="u0", files=(file,))
    assert check_host_files(binding, proofs=folder / PROOFS_NAME) == ()
    return folder / PROOFS_NAME


def use_passes(folder: Path) -> Path:
    passes, ground = Passes(folder), Ground(boot_id="this")
    passes.remember("a-feature", ground, "it works")
    assert passes.reason("a-feature", ground) in ("it works", None)
    return folder / PASSES_NAME


def use_inventory(folder: Path) -> Path:
    found = read_inventory("580.1", open_helper=lambda: cast(HelperApi, Helper()), cache_dir=folder)
    assert [gpu.name for gpu in found.gpus] == ["Fake GPU"]
    return folder / INVENTORY_NAME


def use_calibration(folder: Path) -> Path:
    state = StateRoot.open(folder / "state")
    found = known_calibration(state) or calibrate(state, num_bytes=MIB)
    assert found.rates()
    return state.path / CALIBRATION_NAME


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("use", [use_host_files, use_passes, use_inventory, use_calibration])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, use: Callable[[Path], Path], damage: str) -> None:
    """What somebody put in a folder of its name stays there, and nothing is remembered; that is all."""
    path = use(tmp_path)
    DAMAGES[damage](path)
    use(tmp_path)
    if damage == "folder":
        assert (path / "of-somebody").is_dir()
    else:
        assert stat.S_ISREG(path.lstat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_bytes())
