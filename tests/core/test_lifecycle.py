"""The table of a service's life: which verbs each state has, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from coldsnap.core.lifecycle import SERVICE_TRANSITIONS, ServiceState, ServiceVerb, next_state
from coldsnap.errors import UsageError

S, V = ServiceState, ServiceVerb
ALLOWED: dict[tuple[ServiceState, ServiceVerb], ServiceState] = {
    (S.ABSENT, V.CAPTURE): S.CAPTURING,
    (S.ABSENT, V.PREPARE): S.PREPARING,
    (S.ABSENT, V.RESTORE): S.RESTORING,
    (S.ABSENT, V.DELETE): S.ABSENT,
    (S.CAPTURING, V.DONE): S.ABSENT,
    (S.PREPARING, V.DONE): S.ABSENT,
    (S.RESTORING, V.DONE): S.READY,
    (S.RESTORING, V.DONE_WARM): S.WARM,
    (S.WARM, V.WAKE): S.READY,
    (S.READY, V.SLEEP): S.ASLEEP,
    (S.ASLEEP, V.WAKE): S.READY,
    (S.STOPPING, V.DONE): S.ABSENT,
    (S.FAILED, V.CAPTURE): S.CAPTURING,
    (S.FAILED, V.RESTORE): S.RESTORING,
    (S.FAILED, V.STOP): S.STOPPING,
    (S.FAILED, V.DELETE): S.ABSENT,
    # prepare never disturbs what is there
    (S.WARM, V.PREPARE): S.WARM,
    (S.READY, V.PREPARE): S.READY,
    (S.ASLEEP, V.PREPARE): S.ASLEEP,
    (S.FAILED, V.PREPARE): S.FAILED,
    **{(state, V.RESTORE): S.RESTORING for state in (S.WARM, S.READY, S.ASLEEP)},
    **{(state, V.STOP): S.STOPPING for state in S if state is not S.ABSENT},
    **{(state, V.FAIL): S.FAILED for state in S if state not in (S.ABSENT, S.FAILED)},
    **{(state, V.STATUS): state for state in S},
}


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(S, V)))
def test_every_pair(state: ServiceState, verb: ServiceVerb) -> None:
    if (state, verb) in ALLOWED:
        assert next_state(state, verb) is ALLOWED[state, verb]
        return
    with pytest.raises(UsageError) as caught:
        next_state(state, verb)
    assert state.value in caught.value.message
    assert verb.value in caught.value.message
    assert caught.value.cure
    assert caught.value.facts == {"state": state.value, "verb": verb.value}


def test_every_state_can_come_to_an_end_without_a_failure() -> None:
    for start in S:
        reached, frontier = {start}, [start]
        while frontier:
            for after in SERVICE_TRANSITIONS[frontier.pop()].values():
                if after not in reached:
                    reached.add(after)
                    frontier.append(after)
        assert S.ABSENT in reached
        assert S.READY in reached


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SERVICE_TRANSITIONS[S.READY][V.CAPTURE] = S.CAPTURING  # type: ignore[index] # that is the point
