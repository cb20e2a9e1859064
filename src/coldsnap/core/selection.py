"""Which provider brings the model bytes: packs (``native``) or pinned safetensors (``recovery``).

    mode               every pack here   some missing, may be fetched   some missing   artifact without native
    native             native            native, fetch                  refused        refused
    auto               native            native, fetch                  recovery       recovery
    cache-only-auto    native            recovery                       recovery       recovery
    recovery           recovery          recovery                       recovery       recovery

A staged pack that is not the artifact's is refused in every mode: somebody meant other bytes. Recovery that the
policy switched off is refused too. "May be fetched": the caller allows it and a repository is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coldsnap.core.digest import Digest
from coldsnap.core.objects import ModelPayloads, ObjectRecord, Weights
from coldsnap.core.paths import show
from coldsnap.core.policy import WeightsMode, WeightsPolicy
from coldsnap.errors import Problem, Refused

__all__ = ["Provider", "ProviderDecision", "select_provider"]

_SUBJECT = "the choice of a weight provider"


class Provider(StrEnum):
    """Where model bytes come from at restore."""

    NATIVE = "native"
    RECOVERY = "recovery"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderDecision:
    """The provider, why, and the packs to fetch first (each once, none for recovery)."""

    provider: Provider
    reason: str
    fetch: tuple[ObjectRecord, ...] = ()
    repository: str = ""
    revision: str = ""


def select_provider(
    weights: Weights,
    policy: WeightsPolicy,
    *,
    present: Collection[Digest],
    may_fetch: bool = True,
    why_not: str = "fetching is not allowed",
    rejected: Mapping[str, str] | None = None,
) -> ProviderDecision:
    """Decide by the table above.

    ``present``: digests of packs that are here (in the store, or staged and proved). ``why_not``: what is in the way of
    fetching, unless they ``may_fetch``. ``rejected``: worker -> why
    a staged pack failed its proof. Raises Refused with every reason.
    """
    wrong = _wrong_packs(weights.model_payloads, policy, rejected or {})
    if wrong:
        raise Refused(_SUBJECT, wrong)
    if policy.mode is WeightsMode.RECOVERY:
        return _recovery(policy, "policy.weights.mode is recovery")
    payloads = weights.model_payloads
    if weights.native is None or payloads is None:
        if policy.mode is WeightsMode.NATIVE:
            raise _refused("mode", "is native, and the artifact has no packs", "native", "use mode auto or recovery")
        return _recovery(policy, "the artifact has no packs")
    missing = _missing(payloads, policy, present)
    if not missing:
        return ProviderDecision(provider=Provider.NATIVE, reason="every pack is here")
    names = ", ".join(str(entry.owner) for entry in missing[:8])
    if policy.mode is WeightsMode.CACHE_ONLY_AUTO:
        return _recovery(policy, f"packs are missing for {names}, and mode cache-only-auto never fetches")
    repository = policy.native.repository or payloads.repository
    revision = policy.native.revision if policy.native.repository else payloads.revision
    if may_fetch and repository:
        return ProviderDecision(
            provider=Provider.NATIVE,
            reason=f"packs are missing for {names} and are fetched from {repository}",
            fetch=missing,
            repository=repository,
            revision=revision,
        )
    why = "no repository is named" if may_fetch else why_not
    if policy.mode is WeightsMode.NATIVE:
        raise _refused(
            "mode", f"is native, packs are missing for {names}, and {why}", "native", "stage them, or use mode auto"
        )
    return _recovery(policy, f"packs are missing for {names}, and {why}")


def _wrong_packs(payloads: ModelPayloads | None, policy: WeightsPolicy, rejected: Mapping[str, str]) -> list[Problem]:
    expected = {entry.owner.id: entry for entry in payloads.objects} if payloads is not None else {}
    problems = []
    for index, staged in enumerate(policy.native.staged):
        place = f"policy.weights.native.staged[{index}]"
        pack = expected.get(staged.worker)
        if pack is None:
            problems.append(
                Problem(
                    field=f"{place}.worker",
                    message="has no pack in the artifact",
                    value=show(staged.worker),
                    cure="stage only what the artifact names",
                )
            )
            continue
        if staged.sha256 != pack.sha256:
            problems.append(_wrong(f"{place}.sha256", str(staged.sha256), str(pack.sha256)))
        elif staged.bytes != pack.bytes:
            problems.append(_wrong(f"{place}.bytes", str(staged.bytes), str(pack.bytes)))
    problems.extend(
        Problem(
            field=f"worker/{worker}",
            message=f"has a staged pack that failed its proof: {reason}",
            value=show(worker),
            cure="remove it and stage the right file",
        )
        for worker, reason in sorted(rejected.items())
    )
    return problems


def _wrong(field: str, found: str, expected: str) -> Problem:
    return Problem(
        field=field, message="is not the artifact's pack", value=found, cure=f"the artifact names {expected}"
    )


def _missing(payloads: ModelPayloads, policy: WeightsPolicy, present: Collection[Digest]) -> tuple[ObjectRecord, ...]:
    here = {*present, *(staged.sha256 for staged in policy.native.staged)}
    by_digest: dict[Digest, ObjectRecord] = {}
    for entry in payloads.objects:
        if entry.sha256 not in here:
            by_digest.setdefault(entry.sha256, entry)
    return tuple(by_digest.values())


def _recovery(policy: WeightsPolicy, reason: str) -> ProviderDecision:
    if not policy.recovery.enabled:
        raise _refused("recovery.enabled", f"is off, and {reason}", "false", "enable recovery, or stage the packs")
    return ProviderDecision(provider=Provider.RECOVERY, reason=reason)


def _refused(field: str, message: str, value: str, cure: str) -> Refused:
    return Refused(_SUBJECT, [Problem(field=f"policy.weights.{field}", message=message, value=value, cure=cure)])
