"""The records between controller and worker: their bytes, what they refuse, and the table of a worker's life."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from coldsnap.core.canonical import canonical_json
from coldsnap.core.messages import (
    TRANSITIONS,
    PackSource,
    PlaceBody,
    Placed,
    Verb,
    WakeBody,
    WakeReport,
    WorkerSettings,
    WorkerState,
)

S, V = WorkerState, Verb
ALLOWED: dict[tuple[WorkerState, Verb], WorkerState] = {
    **{(state, V.STATUS): state for state in S},
    **{(state, verb): state for state in (S.IDLE, S.SERVING) for verb in (V.ANSWER, V.MATERIALIZE)},
    **{(state, V.STOP_SERVING): S.IDLE for state in (S.IDLE, S.SERVING)},
    **{(state, V.SLEEP): S.ASLEEP for state in (S.IDLE, S.SERVING)},
    (S.IDLE, V.EXPORT): S.IDLE,
    (S.IDLE, V.SERVE): S.SERVING,
    (S.ASLEEP, V.WAKE): S.IDLE,
    (S.TEMPLATE, V.PLACE): S.IDLE,
}

WAKE = WakeBody(source=PackSource.NONE, native_manifest="/n.json", recovery_manifest="/r.json")
GOLDEN: dict[str, tuple[BaseModel, bytes]] = {
    "template settings": (
        WorkerSettings(worker="w0", unit="u0", rank=0, socket="/run/coldsnap/w.sock", template=True),
        b'{"rank":0,"socket":"/run/coldsnap/w.sock","template":true,"unit":"u0","worker":"w0"}',
    ),
    "place": (PlaceBody(), b"{}"),
    "place somewhere": (
        PlaceBody(environment={"CUDA_VISIBLE_DEVICES": "GPU-1"}, wake=WAKE),
        (
            b'{"environment":{"CUDA_VISIBLE_DEVICES":"GPU-1"},"wake":{"native_manifest":"/n.json",'
            b'"recovery_manifest":"/r.json","source":"none"}}'
        ),
    ),
    "placed": (Placed(seconds={"load": 1.5}), b'{"seconds":{"load":1.5}}'),
    "placed and filled": (
        Placed(
            seconds={},
            wake=WakeReport(source=PackSource.NONE, model_bytes=0, residual_bytes=0, seconds={}, transfer_path={}),
        ),
        b'{"seconds":{},"wake":{"model_bytes":0,"residual_bytes":0,"seconds":{},"source":"none","transfer_path":{}}}',
    ),
}


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(S, V)))
def test_every_pair(state: WorkerState, verb: Verb) -> None:
    assert TRANSITIONS[state].get(verb) is ALLOWED.get((state, verb))


def test_a_template_is_left_by_place_alone() -> None:
    into = {(state, verb) for state in S for verb, after in TRANSITIONS[state].items() if after is S.TEMPLATE}
    assert into == {(S.TEMPLATE, V.STATUS)}
    assert set(TRANSITIONS[S.TEMPLATE].values()) == {S.TEMPLATE, S.IDLE}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_a_record(name: str) -> None:
    record, data = GOLDEN[name]
    assert canonical_json(record.model_dump(mode="json", exclude_defaults=True)) == data
    assert type(record).model_validate_json(data) == record


@pytest.mark.parametrize("name", GOLDEN)
def test_an_unknown_field_is_refused(name: str) -> None:
    record, data = GOLDEN[name]
    changed = {**json.loads(data), "surplus": 1}
    with pytest.raises(ValidationError, match="surplus"):
        type(record).model_validate_json(json.dumps(changed))


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"environment": {"1ST": "x"}}, "environment"),
        ({"environment": {"A": "x\0y"}}, "environment.A"),
        ({"environment": {"A": 1}}, "environment.A"),
        ({"environment": {"": ""}}, "environment"),
        ({"wake": {"source": "nowhere", "native_manifest": "", "recovery_manifest": ""}}, "wake.source"),
        ({"wake": {"source": "none"}}, "wake.native_manifest"),
    ],
)
def test_a_wrong_place_body_is_refused(body: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PlaceBody.model_validate_json(json.dumps(body))
    assert ".".join(map(str, caught.value.errors()[0]["loc"])).startswith(where)


def test_a_template_with_a_port_is_refused() -> None:
    with pytest.raises(ValidationError, match="a template has no port"):
        WorkerSettings(worker="w0", unit="u0", rank=0, socket="/s", template=True, port=8000)
