"""The choice of a weight provider, row by row of its table."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from coldsnap.core.artifact import artifact_from
from coldsnap.core.digest import Digest
from coldsnap.core.objects import Weights, payload_path
from coldsnap.core.parsing import check_document
from coldsnap.core.policy import WeightsPolicy
from coldsnap.core.selection import Provider, ProviderDecision, select_provider
from coldsnap.errors import Refused
from coldsnap.testing.documents import artifact_example

A, B = Digest.of(b"a"), Digest.of(b"b")
REPOSITORY = {"repository": "me/packs", "revision": "main"}


def weights(*, native: bool = True, payloads: bool = True, published: bool = False, packs: Any = (A, B)) -> Weights:
    document = copy.deepcopy(artifact_example(workers_per_unit=2))
    entries = document["weights"]["model_payloads"]["objects"]
    for entry, digest in zip(entries, packs, strict=True):
        entry.update(sha256=str(digest), path=payload_path(digest))
    if published:
        document["weights"]["model_payloads"].update(repository="artifact/packs", revision="v1")
    if not native:
        del document["weights"]["native"]
    if not payloads:
        del document["weights"]["model_payloads"]
    return artifact_from(document).weights


def policy(mode: str, **fields: Any) -> WeightsPolicy:
    return check_document(WeightsPolicy, {"mode": mode, **fields}, subject="weights")


def outcome(mode: str, *, here: set[Digest], may_fetch: bool = True, of: Weights | None = None, **fields: Any) -> str:
    """native, fetch, recovery or refused."""
    try:
        decision = select_provider(of or weights(), policy(mode, **fields), present=here, may_fetch=may_fetch)
    except Refused as refusal:
        problems = refusal.problems
    else:
        assert decision.reason
        if decision.fetch:
            assert decision.provider is Provider.NATIVE
            return "fetch"
        return decision.provider.value
    assert all(problem.cure and problem.value for problem in problems)
    return "refused"


TABLE = [
    # mode, everything here, missing + fetchable, missing + no repository, missing + not allowed, no native
    ("native", "native", "fetch", "refused", "refused", "refused"),
    ("auto", "native", "fetch", "recovery", "recovery", "recovery"),
    ("cache-only-auto", "native", "recovery", "recovery", "recovery", "recovery"),
    ("recovery", "recovery", "recovery", "recovery", "recovery", "recovery"),
]


@pytest.mark.parametrize(("mode", "whole", "fetchable", "nowhere", "forbidden", "without"), TABLE)
def test_the_table(mode: str, whole: str, fetchable: str, nowhere: str, forbidden: str, without: str) -> None:
    assert outcome(mode, here={A, B}) == whole
    assert outcome(mode, here={A}, native=REPOSITORY) == fetchable
    assert outcome(mode, here={A}, of=weights(published=True)) == fetchable
    assert outcome(mode, here={A}) == nowhere
    assert outcome(mode, here=set(), may_fetch=False, native=REPOSITORY) == forbidden
    assert outcome(mode, here={A, B}, of=weights(native=False)) == without
    assert outcome(mode, here={A, B}, of=weights(native=False, payloads=False)) == without


def decide(mode: str, here: set[Digest], of: Weights, **fields: Any) -> ProviderDecision:
    return select_provider(of, policy(mode, **fields), present=here)


def test_only_missing_packs_are_fetched_each_once() -> None:
    assert [entry.sha256 for entry in decide("auto", {A}, weights(), native=REPOSITORY).fetch] == [B]
    assert [entry.sha256 for entry in decide("auto", set(), weights(packs=(A, A)), native=REPOSITORY).fetch] == [A]
    assert [entry.sha256 for entry in decide("auto", set(), weights(), native=REPOSITORY).fetch] == [A, B]


def test_the_requests_repository_goes_before_the_artifacts() -> None:
    own = decide("auto", set(), weights(published=True), native=REPOSITORY)
    assert (own.repository, own.revision) == ("me/packs", "main")
    theirs = decide("auto", set(), weights(published=True))
    assert (theirs.repository, theirs.revision) == ("artifact/packs", "v1")


def staged(**change: Any) -> list[dict[str, Any]]:
    first = {"worker": "w0", "path": "/p/a", "bytes": 8192, "sha256": str(A), **change}
    return [first, {"worker": "w1", "path": "/p/b", "bytes": 8192, "sha256": str(B)}]


def test_staged_packs_count_as_here() -> None:
    assert outcome("native", here=set(), native={"staged": staged()}) == "native"


@pytest.mark.parametrize("mode", ["native", "auto", "cache-only-auto", "recovery"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sha256": str(Digest.of(b"other"))}, "policy.weights.native.staged[0].sha256"),
        ({"bytes": 4096}, "policy.weights.native.staged[0].bytes"),
        ({"worker": "w9"}, "policy.weights.native.staged[0].worker"),
    ],
)
def test_a_staged_pack_with_a_wrong_identity_is_always_an_error(mode: str, change: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        decide(mode, {A, B}, weights(), native={"staged": staged(**change)})
    assert [problem.field for problem in caught.value.problems] == [field]


@pytest.mark.parametrize("mode", ["native", "auto", "cache-only-auto", "recovery"])
def test_a_staged_pack_that_failed_its_proof_is_always_an_error(mode: str) -> None:
    with pytest.raises(Refused) as caught:
        select_provider(
            weights(),
            policy(mode, native={"staged": staged()}),
            present={A, B},
            rejected={"w1": "digest_mismatch", "w0": "size_mismatch"},
        )
    assert [problem.field for problem in caught.value.problems] == ["worker/w0", "worker/w1"]
    assert "size_mismatch" in caught.value.problems[0].message


def test_staged_packs_for_an_artifact_that_has_none_are_refused() -> None:
    assert (
        outcome("auto", here=set(), of=weights(native=False, payloads=False), native={"staged": staged()}) == "refused"
    )


@pytest.mark.parametrize("mode", ["auto", "cache-only-auto"])
def test_recovery_that_is_switched_off_is_no_way_out(mode: str) -> None:
    off = {"enabled": False}
    assert outcome(mode, here={A, B}, recovery=off) == "native"
    assert outcome(mode, here={A}, recovery=off) == "refused"
    assert outcome(mode, here={A, B}, of=weights(native=False), recovery=off) == "refused"


def test_a_reason_names_the_workers_and_why() -> None:
    assert "worker/w1" in decide("auto", {A}, weights()).reason
    assert "no repository" in decide("auto", {A}, weights()).reason
    assert "cache-only-auto" in decide("cache-only-auto", {A}, weights()).reason
    with pytest.raises(Refused, match="no repository is named"):
        decide("native", {A}, weights())
