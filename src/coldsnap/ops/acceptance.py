"""Acceptance: a restored engine must give the answers its capture gave, token for token, before it serves.

Asked over the private worker socket, so no outside client can be answered by an engine that has not
passed. Token ids and text are both compared; nothing is approximate.
"""

from __future__ import annotations

from collections.abc import Sequence

from coldsnap.core.messages import Answer, Prompt
from coldsnap.errors import AcceptanceFailed

__all__ = ["check_answers"]


def check_answers(prompts: Sequence[Prompt], expected: Sequence[Answer], given: Sequence[Answer]) -> None:
    """Raise AcceptanceFailed naming the first differing prompt and token; both sides are in the facts."""
    if not prompts:
        raise AcceptanceFailed(
            "the artifact has no acceptance answers to compare with", cure="capture again with at least one prompt"
        )
    if len(expected) != len(prompts) or len(given) != len(prompts):
        raise AcceptanceFailed(
            f"{len(prompts)} prompts, {len(expected)} captured answers and {len(given)} given answers do not pair up",
            cure="the capture is damaged: capture again",
        )
    for index, (prompt, want, got) in enumerate(zip(prompts, expected, given, strict=True)):
        if want == got:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(want.token_ids, got.token_ids, strict=False)) if a != b),
            min(len(want.token_ids), len(got.token_ids)),
        )
        raise AcceptanceFailed(
            f"prompt {index} ({prompt.text[:40]!r}) was answered differently from token {at} on: "
            f"captured {want.text[:60]!r}, restored {got.text[:60]!r}",
            cure="the service was stopped; check the pack with `coldsnap verify`, then restore again or capture anew",
            facts={
                "prompt": prompt.text,
                "expected_token_ids": list(want.token_ids),
                "given_token_ids": list(got.token_ids),
            },
        )
