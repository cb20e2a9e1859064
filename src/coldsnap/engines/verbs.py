"""A request against the table of a worker's life, and its body against the record of its verb."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from coldsnap.core.messages import TRANSITIONS, Verb, WorkerState
from coldsnap.engines.control import Call
from coldsnap.engines.frames import first_problem
from coldsnap.errors import UsageError

__all__ = ["body_of", "state_after"]

B = TypeVar("B", bound=BaseModel)


def state_after(state: WorkerState, verb: Verb) -> WorkerState:
    """The state after `verb` in `state`. Raises UsageError for a verb that the table refuses there."""
    allowed = TRANSITIONS[state]
    if verb not in allowed:
        raise UsageError(
            f"a worker that is {state.value} cannot {verb.value}",
            cure=f"in this state it takes {', '.join(sorted(one.value for one in allowed))}",
            facts={"state": state.value, "verb": verb.value},
        )
    return allowed[verb]


def body_of(kind: type[B], call: Call) -> B:
    """The call's body as a record. Raises UsageError naming the first thing wrong with it."""
    try:
        return kind.model_validate_json(json.dumps(call.request.body))
    except ValidationError as error:
        raise UsageError(f"the body of {call.request.verb.value!r} is malformed: {first_problem(error)}") from error
