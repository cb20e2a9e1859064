"""The second demo: the pack is deleted, and nobody who asks the model can tell.

    capture -> the pack is deleted -> restore from the pinned checkpoint -> the same tokens
            -> the pack is written again beside the service, with the identical digest -> the next restore reads it

Expected answers come from a separate cold process that was never captured, to prompts that the capture never saw. The
rebuilt file is hashed here once more, whole, by nothing of what wrote it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, MaterializationState, WorkerStatus
from coldsnap.core.policy import Materialize
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import DeadlineExceeded, EngineError
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import CaptureResult, capture
from coldsnap.ops.choosing import choose_driver
from coldsnap.ops.coldstart import cold_engine
from coldsnap.ops.demo_parts import ACCEPTANCE, UNSEEN, free_port
from coldsnap.ops.live import service_status, stop_service
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.planning import PlannedCapture, plan_capture
from coldsnap.ops.recipe import Recipe, RecipeValidation
from coldsnap.ops.restore import RestoreResult, restore
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import record_path

__all__ = ["RecoveryDemoResult", "run_recovery_demo"]

NAME = "coldsnap-demo-recovery"
_HOST = "127.0.0.1"
_DEADLINE_S = 900.0
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RecoveryDemoResult:
    """What was seen with one model. Times in seconds, sizes in bytes."""

    model: str
    num_prompts: int
    captured: CaptureResult
    recovery: RestoreResult
    native: RestoreResult
    recovery_equal: bool
    native_equal: bool
    rebuilt: Digest | None
    rebuild_s: float
    answer: str

    @property
    def pack(self) -> Digest:
        """The pack that was deleted."""
        return self.captured.pack_digests[0]

    @property
    def tokens_equal(self) -> bool:
        """Whether every token was the cold process's own, without and with the pack."""
        return self.recovery_equal and self.native_equal

    @property
    def passed(self) -> bool:
        """Whether every claim held."""
        sources = (self.recovery.source, self.native.source)
        return self.tokens_equal and sources == ("recovery", "native") and self.rebuilt == self.pack

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "passed": self.passed,
            "tokens_equal": self.tokens_equal,
            "recovery_tokens_equal": self.recovery_equal,
            "native_tokens_equal": self.native_equal,
            "num_prompts": self.num_prompts,
            "answer": self.answer,
            "recovery_source": self.recovery.source,
            "recovery_reason": self.recovery.reason,
            "recovery_ladder": [step.document() for step in self.recovery.ladder],
            "pack_digest": str(self.pack),
            "rebuilt_pack_digest": str(self.rebuilt) if self.rebuilt is not None else None,
            "pack_digest_identical": self.rebuilt == self.pack,
            "pack_bytes": self.captured.pack_bytes,
            "next_restore_source": self.native.source,
            "recovery_restore_s": self.recovery.seconds["total"],
            "native_restore_s": self.native.seconds["total"],
            "rebuild_s": self.rebuild_s,
        }


def run_recovery_demo(tools: Tools, plugin: EnginePlugin, model: Path, folder: Path) -> RecoveryDemoResult:
    """Run it all below ``folder`` (new files only) with the state root of ``tools``.

    Raises what the verbs raise, DeadlineExceeded when the pack is not rebuilt in time; nothing it started is left.
    """
    say = tools.reporter
    port = free_port()
    planned = _plan(tools, plugin, model, folder / "demo.json", port)
    with say.phase("a separate cold process gives the expected answers"):
        expected = _cold(plugin, planned, port)
    captured = capture(tools, planned.request, planned.model)
    loaded = load_artifact(captured.artifact_path)
    with say.phase("delete the pack"):
        for digest in captured.pack_digests:
            record_path(tools.store.path(digest)).unlink(missing_ok=True)
            tools.store.path(digest).unlink()
    client = OutsideClient(host=_HOST, port=port)
    try:
        recovery = _restore(tools, loaded, port)
        given = client.complete(UNSEEN, timeout_s=_DEADLINE_S)
        with say.phase("the pack is written again beside the service"):
            rebuild_s = _wait_for_the_pack(tools)
    finally:
        _stop(tools)
    rebuilt = _digest_of(tools.store.path(captured.pack_digests[0]))
    try:
        native = _restore(tools, loaded, port)
        again = client.complete(UNSEEN, timeout_s=_DEADLINE_S)
    finally:
        _stop(tools)
    return RecoveryDemoResult(
        model=planned.model.id,
        num_prompts=len(UNSEEN),
        captured=captured,
        recovery=recovery,
        native=native,
        recovery_equal=given == expected,
        native_equal=again == expected,
        rebuilt=rebuilt,
        rebuild_s=rebuild_s,
        answer=given[0].text,
    )


def _plan(tools: Tools, plugin: EnginePlugin, model: Path, output: Path, port: int) -> PlannedCapture:
    recipe = Recipe(
        name=NAME, engine=plugin.name, model=str(model.absolute()), validation=RecipeValidation(prompts=ACCEPTANCE)
    )
    driver = choose_driver(tools, plugin, plugin.execution(plugin.options({})))
    with tools.reporter.phase("pin the model"):
        return plan_capture(recipe, plugin, operation_id=_id("capture"), output=output, driver=driver, port=port)


def _cold(plugin: EnginePlugin, planned: PlannedCapture, port: int) -> Sequence[Answer]:
    with cold_engine(
        planned.request,
        plugin,
        planned.model,
        host=_HOST,
        port=port,
        first_prompt="Hello",
        deadline_s=_DEADLINE_S,
    ) as engine:
        return engine.client.complete(UNSEEN, timeout_s=_DEADLINE_S)


def _restore(tools: Tools, loaded: LoadedArtifact, port: int) -> RestoreResult:
    request = activation_request(
        loaded, operation_id=_id("restore"), name=NAME, port=port, materialize=Materialize.ASYNC.value
    )
    return restore(tools, loaded, request, host=_HOST, port=port)


def _wait_for_the_pack(tools: Tools) -> float:
    """Until every worker has written its pack; returns the seconds that took from now."""
    began = time.monotonic()
    while True:
        workers = service_status(tools, NAME).workers.values()
        states = [one.materialization for one in workers if isinstance(one, WorkerStatus)]
        failed = next((one for one in states if one is not None and one.state is MaterializationState.FAILED), None)
        if failed is not None:
            raise EngineError(f"the pack was not written: {failed.reason}", cure="see `coldsnap logs`")
        if states and all(one is not None and one.state is MaterializationState.DONE for one in states):
            return time.monotonic() - began
        if time.monotonic() - began > _DEADLINE_S:
            raise DeadlineExceeded(
                f"the pack was not written in {_DEADLINE_S:g} s",
                cure="see `coldsnap status` and `coldsnap logs`",
                facts={"phase": "materialize", "deadline_s": _DEADLINE_S},
            )
        time.sleep(_POLL_S)


def _digest_of(path: Path) -> Digest | None:
    """The SHA-256 of the file that is there now, by the standard library alone; None when there is none."""
    if not path.is_file():
        return None
    state = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            state.update(data)
    return Digest.from_hash(state)


def _stop(tools: Tools) -> None:
    if tools.services.load(NAME) is not None:
        stop_service(tools, NAME)


def _id(verb: str) -> str:
    return f"demo-recovery-{verb}-{time.time_ns()}"
