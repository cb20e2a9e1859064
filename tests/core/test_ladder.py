"""The ladder's table: what failed decides where to go on, and every way down can be argued for."""

from __future__ import annotations

import pytest

from coldsnap.core.ladder import (
    COUNTED,
    TRY_AFTER,
    Blame,
    LadderStep,
    Outcome,
    PlannedRung,
    Rung,
    after_failure,
    blame,
    plan_rungs,
    unavoidable,
)
from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    CriuError,
    CudaError,
    DeadlineExceeded,
    EngineError,
    HelperLost,
    IntegrityError,
    InternalError,
    MissingCapability,
    OperationInterrupted,
    OutOfSpace,
    PayloadRejected,
    Problem,
    Refused,
    ResourceBusy,
    UnsafePath,
    UserError,
)

YES, NO = (True, "allowed"), (False, "not allowed")
PACK = "/state/model-payloads/sha256/ab.pack"
RESIDUAL = "/state/prepared/ab/workers/w0/weights.blob"


def rejected(reason: str, path: str, **facts: object) -> PayloadRejected:
    return PayloadRejected(reason, "no", facts={"path": path, **facts})


def plan(**changes: object) -> tuple[PlannedRung, ...]:
    whole: dict[str, object] = {
        "provider": Rung.NATIVE,
        "provider_reason": "every pack is here",
        "overlay": (True, "made here"),
        "closed": None,
        "may_recover": YES,
        "may_start_cold": YES,
    }
    return plan_rungs(**{**whole, **changes})  # type: ignore[arg-type]


def opened(rungs: tuple[PlannedRung, ...]) -> list[Rung]:
    return [one.rung for one in rungs if one.open]


def test_every_blame_has_a_row() -> None:
    assert set(TRY_AFTER) == set(Blame)


def test_the_rungs_in_their_order() -> None:
    assert opened(plan()) == [Rung.OVERLAY, Rung.NATIVE, Rung.RECOVERY, Rung.COLD]
    assert [one.rung for one in plan(overlay=None)] == [Rung.NATIVE, Rung.RECOVERY, Rung.COLD]


def test_recovery_leaves_native_out_with_its_reason_and_takes_no_overlay() -> None:
    rungs = plan(provider=Rung.RECOVERY, provider_reason="packs are missing for worker/w0")
    assert opened(rungs) == [Rung.RECOVERY, Rung.COLD]
    assert [one.reason for one in rungs[:2]] == [
        "it goes with the packs, and packs are missing for worker/w0",
        "packs are missing for worker/w0",
    ]


def test_what_policy_forbids_is_planned_and_closed() -> None:
    rungs = plan(overlay=None, may_recover=NO, may_start_cold=NO)
    assert opened(rungs) == [Rung.NATIVE]
    assert {one.reason for one in rungs[1:]} == {"not allowed"}


def test_a_closed_tree_leaves_the_overlay_and_a_cold_start() -> None:
    rungs = plan(closed="quarantine: failed 2 times here")
    assert opened(rungs) == [Rung.OVERLAY, Rung.COLD]
    assert opened(plan(closed="x", overlay=None, may_start_cold=NO)) == []


@pytest.mark.parametrize(
    ("about", "failed", "following"),
    [
        (Blame.OVERLAY, Rung.OVERLAY, Rung.NATIVE),
        (Blame.PACK_MISSING, Rung.OVERLAY, Rung.RECOVERY),
        (Blame.PACK_MISSING, Rung.NATIVE, Rung.RECOVERY),
        (Blame.CAPSULE, Rung.NATIVE, Rung.COLD),
        (Blame.ANSWERS, Rung.NATIVE, Rung.COLD),
        (Blame.CAPSULE, Rung.RECOVERY, Rung.COLD),
        (Blame.FEATURE, Rung.OVERLAY, Rung.COLD),
        (Blame.PACK_WRONG, Rung.OVERLAY, None),
        (Blame.PACK_WRONG, Rung.NATIVE, None),
        (Blame.CHECKPOINT, Rung.RECOVERY, None),
        (Blame.HOST, Rung.OVERLAY, None),
        (Blame.HOST, Rung.NATIVE, None),
        (Blame.REQUEST, Rung.NATIVE, None),
        (Blame.STOPPED, Rung.OVERLAY, None),
        (Blame.OURS, Rung.NATIVE, None),
        (Blame.ANSWERS, Rung.COLD, None),
    ],
)
def test_the_way_down(about: Blame, failed: Rung, following: Rung | None) -> None:
    assert after_failure(plan(), failed, about) is following


def test_no_way_leads_up_or_to_the_same_rung() -> None:
    order = list(Rung)
    for about in Blame:
        for failed in Rung:
            following = after_failure(plan(), failed, about)
            assert following is None or order.index(following) > order.index(failed)


def test_a_closed_rung_is_passed_over() -> None:
    assert after_failure(plan(may_start_cold=NO), Rung.NATIVE, Blame.CAPSULE) is None
    assert after_failure(plan(may_recover=NO), Rung.NATIVE, Blame.PACK_MISSING) is None


def test_what_is_passed_over_says_why() -> None:
    rungs = plan(may_recover=NO)
    steps = list(unavoidable(rungs, Rung.OVERLAY, Blame.FEATURE, until=Rung.COLD))
    assert [(one.rung, one.outcome, one.reason) for one in steps] == [
        (Rung.NATIVE, Outcome.SKIPPED, "it would not help against a feature of the machine"),
        (Rung.RECOVERY, Outcome.SKIPPED, "not allowed"),
    ]
    assert [one.rung for one in unavoidable(rungs, Rung.NATIVE, Blame.HOST, until=None)] == [Rung.RECOVERY, Rung.COLD]


@pytest.mark.parametrize(
    ("error", "rung", "phase", "about"),
    [
        (OperationInterrupted("x"), Rung.NATIVE, "hydrate", Blame.STOPPED),
        (InternalError("x"), Rung.NATIVE, "accept", Blame.OURS),
        (MissingCapability("no CRIU"), Rung.NATIVE, "thaw", Blame.FEATURE),
        (ResourceBusy("port"), Rung.NATIVE, "serve", Blame.HOST),
        (OutOfSpace("disk"), Rung.NATIVE, "unpack", Blame.HOST),
        (UnsafePath("link"), Rung.NATIVE, "unpack", Blame.HOST),
        (OutOfSpace("memory"), Rung.NATIVE, "hydrate", Blame.HOST),
        (ResourceBusy("address"), Rung.NATIVE, "hydrate", Blame.CAPSULE),
        (rejected("digest_mismatch", PACK), Rung.NATIVE, "unpack", Blame.CAPSULE),
        (rejected("digest_mismatch", PACK), Rung.NATIVE, "admit", Blame.PACK_WRONG),
        (rejected("size_mismatch", PACK), Rung.NATIVE, "admit", Blame.PACK_WRONG),
        (rejected("unusable_path", PACK, errno="ELOOP"), Rung.NATIVE, "admit", Blame.PACK_WRONG),
        (rejected("unusable_path", PACK, errno="ENOENT"), Rung.NATIVE, "admit", Blame.PACK_MISSING),
        (rejected("digest_mismatch", PACK), Rung.OVERLAY, "admit", Blame.PACK_WRONG),
        (rejected("digest_mismatch", PACK), Rung.NATIVE, "hydrate", Blame.PACK_WRONG),
        (rejected("unusable_path", PACK, errno="ENOENT"), Rung.NATIVE, "hydrate", Blame.PACK_MISSING),
        (rejected("digest_mismatch", RESIDUAL), Rung.NATIVE, "hydrate", Blame.CAPSULE),
        (rejected("digest_mismatch", RESIDUAL), Rung.RECOVERY, "hydrate", Blame.CAPSULE),
        (IntegrityError("headers"), Rung.RECOVERY, "hydrate", Blame.CHECKPOINT),
        (UserError("no such file"), Rung.RECOVERY, "hydrate", Blame.CHECKPOINT),
        (Refused("checkpoint", [Problem(field="t", message="changed")]), Rung.RECOVERY, "hydrate", Blame.CHECKPOINT),
        (IntegrityError("another pack"), Rung.NATIVE, "hydrate", Blame.CAPSULE),
        (Refused("wake", [Problem(field="e", message="x")]), Rung.NATIVE, "hydrate", Blame.CAPSULE),
        (EngineError("died"), Rung.NATIVE, "hydrate", Blame.CAPSULE),
        (EngineError("died"), Rung.RECOVERY, "hydrate", Blame.CAPSULE),
        (DeadlineExceeded("slow"), Rung.NATIVE, "thaw", Blame.CAPSULE),
        (CriuError("no"), Rung.NATIVE, "thaw", Blame.CAPSULE),
        (CudaError("no"), Rung.NATIVE, "resume", Blame.CAPSULE),
        (HelperLost("killed"), Rung.NATIVE, "resume", Blame.HOST),
        (OutOfSpace("device"), Rung.OVERLAY, "resume", Blame.HOST),
        (AcceptanceFailed("no"), Rung.NATIVE, "accept", Blame.ANSWERS),
        (UserError("prompt"), Rung.NATIVE, "accept", Blame.REQUEST),
        (CriuError("no"), Rung.OVERLAY, "thaw", Blame.OVERLAY),
        (AcceptanceFailed("no"), Rung.OVERLAY, "accept", Blame.OVERLAY),
        (rejected("digest_mismatch", RESIDUAL), Rung.OVERLAY, "hydrate", Blame.OVERLAY),
        (OutOfSpace("disk"), Rung.OVERLAY, "unpack", Blame.HOST),
        (Refused("model", [Problem(field="m", message="x")]), Rung.COLD, "pin", Blame.CHECKPOINT),
        (EngineError("died"), Rung.COLD, "load", Blame.CAPSULE),
        (AcceptanceFailed("no"), Rung.COLD, "accept", Blame.ANSWERS),
    ],
)
def test_what_an_error_was_about(error: ColdsnapError, rung: Rung, phase: str, about: Blame) -> None:
    assert blame(error, rung=rung, phase=phase) is about


def test_what_the_machine_the_request_or_the_store_did_does_not_count() -> None:
    not_counted = {
        Blame.REQUEST,
        Blame.HOST,
        Blame.FEATURE,
        Blame.PACK_MISSING,
        Blame.PACK_WRONG,
        Blame.CHECKPOINT,
        Blame.REMOTE,
        Blame.QUARANTINE,
        Blame.STOPPED,
    }
    assert set(Blame) - COUNTED == not_counted


def test_a_step_reads_well_and_leaves_out_what_it_has_not() -> None:
    step = LadderStep(rung=Rung.NATIVE, outcome=Outcome.FAILED, reason="CRIU said no", error="CriuError")
    assert str(step) == "native failed: CRIU said no"
    assert step.document() == {
        "rung": "native",
        "outcome": "failed",
        "reason": "CRIU said no",
        "error": "CriuError",
    }
    assert "error" not in LadderStep(rung=Rung.COLD, outcome=Outcome.USED, reason="x").document()
