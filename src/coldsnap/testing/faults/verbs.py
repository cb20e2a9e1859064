"""The verbs on a lane's artifact and service, as the command line calls them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldsnap.core.ladder import Rung
from coldsnap.core.request import EXTENSION_SCHEMA, Extension, OperationRequest
from coldsnap.errors import AcceptanceFailed
from coldsnap.ops.activating import activation_request, live_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.gates import restore_gates
from coldsnap.ops.live import service_status, sleep_service, stop_service, wake_service
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.preparing import prepare
from coldsnap.ops.quarantine import clear_artifact, remember_failure
from coldsnap.ops.restore import restore
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.ops.tools import Tools
from coldsnap.ops.verify import verify_artifact
from coldsnap.testing.faults.lane import HOST, NAME, PORT, Lane, new_id

__all__ = [
    "do_capture",
    "do_capture_again",
    "do_capture_third",
    "do_clear_quarantine",
    "do_cold",
    "do_delete",
    "do_explain",
    "do_gc",
    "do_materialize",
    "do_overlay",
    "do_prepare",
    "do_recover_async",
    "do_recover_required",
    "do_remember_failure",
    "do_restore",
    "do_restore_staged",
    "do_restore_third",
    "do_sleep",
    "do_status",
    "do_stop",
    "do_verify",
    "do_verify_second",
    "do_verify_third",
    "do_wake",
    "do_warm",
]

Result = Mapping[str, Any]


def do_capture(lane: Lane, tools: Tools) -> Result:
    """Capture to the lane's own artifact."""
    return _capture(lane, tools, lane.artifact)


def do_capture_again(lane: Lane, tools: Tools) -> Result:
    """Capture to the second one."""
    return _capture(lane, tools, lane.second)


def do_capture_third(lane: Lane, tools: Tools) -> Result:
    """Capture to a third."""
    return _capture(lane, tools, lane.third)


def do_prepare(lane: Lane, tools: Tools) -> Result:
    """Make the artifact ready."""
    loaded = lane.loaded()
    request = activation_request(loaded, operation_id=new_id("prepare"), name=NAME, port=PORT)
    return prepare(tools, loaded, request).document()


def do_restore(lane: Lane, tools: Tools) -> Result:
    """Bring the service up."""
    return _activate(tools, lane.artifact, cache_paths=(str(lane.cache),))


def do_restore_staged(lane: Lane, tools: Tools) -> Result:
    """Bring the service up from a copy of its pack in memory, which is made meanwhile."""
    return _activate(tools, lane.artifact, cache_paths=(str(lane.cache),), stage=True)


def do_restore_third(lane: Lane, tools: Tools) -> Result:
    """From the third artifact."""
    return _activate(tools, lane.third)


def do_recover_async(lane: Lane, tools: Tools) -> Result:
    """Bring the service up from the checkpoint, and let it write the pack beside its work."""
    return _activate(tools, lane.artifact, weights="recovery", materialize="async")


def do_recover_required(lane: Lane, tools: Tools) -> Result:
    """Bring the service up from the checkpoint, with the pack written before it serves."""
    return _activate(tools, lane.artifact, weights="recovery", materialize="required")


def do_cold(lane: Lane, tools: Tools) -> Result:
    """Bring the service up in whatever way works, a cold start included."""
    return _activate(tools, lane.artifact, cold=True)


def do_materialize(lane: Lane, tools: Tools) -> Result:
    """Write the packs that are missing."""
    return _materialize(lane, tools, overlay=False)


def do_remember_failure(lane: Lane, tools: Tools) -> Result:
    """As if a restore had failed here."""
    loaded = lane.loaded()
    error = AcceptanceFailed("injected")
    remember_failure(tools, loaded.digest, loaded.path, operation_id=new_id("restore"), rung=Rung.NATIVE, error=error)
    return {}


def do_clear_quarantine(lane: Lane, tools: Tools) -> Result:
    """Forget what failed here."""
    return {"cleared": [str(one) for one in clear_artifact(tools, lane.loaded().digest)]}


def do_overlay(lane: Lane, tools: Tools) -> Result:
    """Make this machine's overlay."""
    return _materialize(lane, tools, overlay=True)


def do_warm(lane: Lane, tools: Tools) -> Result:
    """Up to its memory."""
    return _activate(tools, lane.artifact, warm=True)


def do_sleep(lane: Lane, tools: Tools) -> Result:
    """Put the service to sleep."""
    sleep_service(tools, _live(lane, "sleep"))
    return {}


def do_wake(lane: Lane, tools: Tools) -> Result:
    """Wake it."""
    wake_service(tools, _live(lane, "wake"))
    return {}


def do_stop(lane: Lane, tools: Tools) -> Result:
    """End it."""
    return {"ended": stop_service(tools, NAME)}


def do_status(lane: Lane, tools: Tools) -> Result:
    """Look at it; an empty document when there is none."""
    return service_status(tools, NAME).document() if tools.services.load(NAME) is not None else {}


def do_explain(lane: Lane, tools: Tools) -> Result:
    """Every gate of a restore."""
    loaded = lane.loaded()
    request = activation_request(loaded, operation_id=new_id("explain"), name=NAME, port=PORT)
    gates = restore_gates(tools, loaded, request, address=(HOST, PORT))
    return {"problems": [str(problem) for gate in gates for problem in gate.problems]}


def do_verify(lane: Lane, tools: Tools) -> Result:
    """Prove the artifact; ``problems`` are what is wrong with it."""
    return _verify(tools, lane.artifact)


def do_verify_second(lane: Lane, tools: Tools) -> Result:
    """Prove the second one."""
    return _verify(tools, lane.second)


def do_verify_third(lane: Lane, tools: Tools) -> Result:
    """Prove the third."""
    return _verify(tools, lane.third)


def do_gc(lane: Lane, tools: Tools) -> Result:
    """Plan and sweep, with the leases of artifacts that are gone."""
    report = run_tidy(tools, plan_tidy(tools, forget_missing=True))
    return {"removed": len(report.removed), "spared": [f"{item.path}: {why}" for item, why in report.spared]}


def do_delete(lane: Lane, tools: Tools) -> Result:
    """Delete the artifact."""
    return {"removed": len(run_delete(tools, plan_delete(tools, lane.artifact)).removed)}


def _capture(lane: Lane, tools: Tools, output: Path) -> Result:
    planned = lane.plan(output)
    return capture(tools, planned.request, planned.model).document()


def _materialize(lane: Lane, tools: Tools, *, overlay: bool) -> Result:
    loaded = lane.loaded()
    request = materialize_request(loaded, operation_id=new_id("materialize"))
    return materialize(tools, loaded, request, overlay=overlay).document()


def _activate(tools: Tools, path: Path, *, cold: bool = False, **options: Any) -> Result:
    loaded = load_artifact(path)
    request = activation_request(loaded, operation_id=new_id("restore"), name=NAME, port=PORT, **options)
    if cold:
        extension = Extension(schema=EXTENSION_SCHEMA, cold_start=True)
        request = request.model_copy(update={"extension": extension})
    return restore(tools, loaded, request, host=HOST, port=PORT).document()


def _live(lane: Lane, verb: str) -> OperationRequest:
    return live_request(lane.loaded(), verb, operation_id=new_id(verb), name=NAME)


def _verify(tools: Tools, path: Path) -> Result:
    proofs = verify_artifact(tools, load_artifact(path))
    return {"problems": [f"{proof.subject}: {problem}" for proof in proofs for problem in proof.problems]}
