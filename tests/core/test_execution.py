"""The execution graph: the layouts that must be representable, ranks from world groups alone, and every rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.drivers import DRIVERS, DriverId, required_features
from coldsnap.core.execution import (
    Execution,
    check_runtime_rank,
    global_rank,
    worker_identity,
    worker_path,
)
from coldsnap.core.parsing import check_document
from coldsnap.core.request import OperationRequest, parse_request
from coldsnap.errors import EngineError, InvalidDocument, UsageError

REQUESTS = Path(__file__).parent / "data/requests"
ALL_N610 = (
    "criu-process-tree",
    "cuda-checkpoint-api",
    "cuda-checkpoint-roundtrip",
    "cuda-classic-ipc",
    "cuda-initialized-state",
    "cuda-vmm-exact-address",
    "nccl-communicator-roundtrip",
)
N610_ALONE = tuple(f for f in ALL_N610 if f not in ("cuda-classic-ipc", "nccl-communicator-roundtrip"))


def layout(name: str) -> OperationRequest:
    return parse_request((REQUESTS / f"{name}.json").read_bytes())


def ranks(request: OperationRequest) -> dict[str, int]:
    execution = request.launch.execution
    return {worker.id: global_rank(execution, worker.id) for worker in execution.workers}


def members(request: OperationRequest, kind: str) -> list[tuple[str, ...]]:
    return [group.members for group in request.launch.execution.groups if group.kind == kind]


def test_tp2_on_two_hosts_of_one_gpu() -> None:
    request = layout("tp2-two-hosts")
    assert [unit.host for unit in request.launch.units] == ["node-a", "node-b"]
    assert ranks(request) == {"w0": 0, "w1": 1}
    assert [worker.process_slot for worker in request.launch.execution.workers] == [0, 0]
    assert required_features(DriverId.N610, request.launch.execution) == N610_ALONE


def test_tp4_on_two_hosts_of_two_gpus() -> None:
    request = layout("tp4-two-hosts")
    assert len(request.launch.units) == 2
    assert ranks(request) == {"w0": 0, "w1": 1, "w2": 2, "w3": 3}
    assert [worker.process_slot for worker in request.launch.execution.workers] == [0, 1, 0, 1]
    assert required_features(DriverId.N610, request.launch.execution) == ALL_N610


def test_tp8_on_one_host() -> None:
    request = layout("tp8-one-host")
    assert len(request.launch.units) == 1
    assert ranks(request) == {f"w{index}": index for index in range(8)}
    assert [worker.device_slots for worker in request.launch.execution.workers] == [(index,) for index in range(8)]


def test_tp4_dp2_has_two_service_domains_with_a_world_each() -> None:
    request = layout("tp4-dp2")
    assert ranks(request) == {"w0": 0, "w1": 1, "w2": 2, "w3": 3, "w4": 0, "w5": 1, "w6": 2, "w7": 3}
    assert [service.workers for service in request.launch.execution.services] == [
        ("w0", "w1", "w2", "w3"),
        ("w4", "w5", "w6", "w7"),
    ]
    assert members(request, "vllm:data") == [("w0", "w4"), ("w1", "w5"), ("w2", "w6"), ("w3", "w7")]


def test_tp4_pp2_ranks_follow_the_stated_world_and_not_the_names() -> None:
    request = layout("tp4-pp2")
    assert ranks(request) == {"w4": 0, "w5": 1, "w6": 2, "w7": 3, "w0": 4, "w1": 5, "w2": 6, "w3": 7}
    assert members(request, "vllm:tensor") == [("w4", "w5", "w6", "w7"), ("w0", "w1", "w2", "w3")]
    assert members(request, "vllm:pipeline") == [("w4", "w0"), ("w5", "w1"), ("w6", "w2"), ("w7", "w3")]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("tp4-ep2", "sglang:expert", [("w0", "w2"), ("w1", "w3")]),
        ("tp4-cp2", "vllm:context", [("w0", "w1"), ("w2", "w3")]),
    ],
)
def test_tp4_with_overlapping_groups(name: str, kind: str, expected: list[tuple[str, ...]]) -> None:
    request = layout(name)
    assert ranks(request) == {"w0": 0, "w1": 1, "w2": 2, "w3": 3}
    assert members(request, kind) == expected


def test_prefill_and_decode_services_with_transfer_groups_between_them() -> None:
    request = layout("prefill-decode")
    assert ranks(request) == {"p0": 0, "p1": 1, "d0": 0, "d1": 1}
    transfers = [group for group in request.launch.execution.groups if group.kind == "sglang:transfer"]
    assert [(group.service, group.members) for group in transfers] == [(None, ("p0", "d0")), (None, ("p1", "d1"))]


def test_two_services_of_one_engine_on_one_host() -> None:
    request = layout("two-services-one-host")
    assert [(unit.host, unit.devices) for unit in request.launch.units] == [
        ("node-a", ("GPU-a0",)),
        ("node-a", ("GPU-a1",)),
    ]
    assert ranks(request) == {"w0": 0, "w1": 0}
    assert required_features(DriverId.N610, request.launch.execution) == N610_ALONE


def test_only_n610_adds_features_for_communicating_workers() -> None:
    execution = layout("tp8-one-host").launch.execution
    for driver in (DriverId.N580, DriverId.HOST):
        assert required_features(driver, execution) == tuple(sorted(DRIVERS[driver].base_features))


def test_identity_comes_from_the_graph() -> None:
    identity = worker_identity(layout("tp4-two-hosts").launch.execution, "w2")
    assert (identity.worker, identity.unit, identity.rank, identity.process_slot, identity.world_group) == (
        "w2",
        "u1",
        2,
        0,
        "world",
    )


def test_an_unknown_worker_has_no_identity() -> None:
    with pytest.raises(InvalidDocument, match="w9"):
        worker_identity(layout("tp2-two-hosts").launch.execution, "w9")


@pytest.mark.parametrize("environ", [{}, {"RANK": "2"}, {"RANK": "2", "LOCAL_RANK": "7"}, {"LOCAL_RANK": "0"}])
def test_rank_may_be_absent_or_agree_and_local_rank_is_only_a_slot(environ: dict[str, str]) -> None:
    check_runtime_rank(worker_identity(layout("tp4-two-hosts").launch.execution, "w2"), environ)


@pytest.mark.parametrize(
    ("worker", "claimed"),
    [("w2", "0"), ("w2", ""), ("w2", "two"), ("w2", "02"), ("w2", "2.0"), ("w2", " 2"), ("w0", ""), ("w0", "1")],
)
def test_a_rank_that_disagrees_is_refused_rank_zero_too(worker: str, claimed: str) -> None:
    identity = worker_identity(layout("tp4-two-hosts").launch.execution, worker)
    with pytest.raises(EngineError, match="RANK") as caught:
        check_runtime_rank(identity, {"RANK": claimed})
    assert caught.value.facts["environment_rank"] == claimed
    assert caught.value.cure


def test_rank_zero_agrees_with_zero() -> None:
    check_runtime_rank(worker_identity(layout("tp4-two-hosts").launch.execution, "w0"), {"RANK": "0"})


def test_worker_paths_do_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = layout("tp4-two-hosts").launch.execution
    paths = []
    for environ in ({"RANK": "2", "LOCAL_RANK": "0"}, {}):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        identity = worker_identity(execution, "w2")
        check_runtime_rank(identity, environ)
        paths.append(worker_path(identity, "weights.blob"))
    assert paths == ["workers/w2/weights.blob"] * 2


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a\0"])
def test_worker_paths_stay_inside_the_workers_folder(name: str) -> None:
    with pytest.raises(UsageError):
        worker_path(worker_identity(layout("tp2-two-hosts").launch.execution, "w0"), name)


# ---- rules -----------------------------------------------------------------------------------------------------

Graph = dict[str, Any]


def graph() -> Graph:
    """Two units of two workers, a service each; one transfer group between the services."""
    payload: dict[str, Any] = {}
    return {
        "workers": [
            {"id": name, "unit": unit, "service": service, "process_slot": slot, "device_slots": [slot]}
            for name, unit, service, slot in (
                ("a0", "u0", "a", 0),
                ("a1", "u0", "a", 1),
                ("b0", "u1", "b", 0),
                ("b1", "u1", "b", 1),
            )
        ],
        "groups": [
            {"id": "wa", "kind": "e:world", "service": "a", "members": ["a0", "a1"]},
            {"id": "wb", "kind": "e:world", "service": "b", "members": ["b0", "b1"]},
            {"id": "t", "kind": "e:transfer", "members": ["a0", "b0"]},
        ],
        "services": [
            {"id": "a", "role": "prefill", "workers": ["a0", "a1"]},
            {"id": "b", "role": "decode", "workers": ["b0", "b1"]},
        ],
        "adapter": {"schema": "x", "digest": str(canonical_sha256(payload)), "payload": payload},
    }


def fields(document: Graph) -> list[str]:
    try:
        check_document(Execution, document, subject="execution")
    except InvalidDocument as error:
        found = error.problems
    else:
        return []
    assert all(problem.cure for problem in found), found
    return [problem.field for problem in found]


def edit(change: Callable[[Graph], object]) -> Graph:
    document = copy.deepcopy(graph())
    change(document)
    return document


def test_the_graph_of_these_tests_is_good() -> None:
    assert fields(graph()) == []


BROKEN: list[tuple[str, Callable[[Graph], object], list[str]]] = [
    ("no workers", lambda g: g.update(workers=[]), ["workers"]),
    ("no groups", lambda g: g.update(groups=[]), ["groups"]),
    ("no services", lambda g: g.update(services=[]), ["services"]),
    ("empty group", lambda g: g["groups"][2].update(members=[]), ["groups[2].members"]),
    ("empty service", lambda g: g["services"].append({"id": "c", "role": "r", "workers": []}), ["services[2].workers"]),
    ("group id twice", lambda g: g["groups"][2].update(id="wa"), ["groups[2].id"]),
    ("service id twice", lambda g: g["services"].append(dict(g["services"][0])), ["services[2].id"]),
    ("unqualified kind", lambda g: g["groups"][2].update(kind="transfer"), ["groups[2].kind"]),
    ("member twice", lambda g: g["groups"][2].update(members=["a0", "a0"]), ["groups[2].members[1]"]),
    ("unknown member", lambda g: g["groups"][2].update(members=["a0", "z"]), ["groups[2].members[1]"]),
    ("unknown group service", lambda g: g["groups"][2].update(service="z"), ["groups[2].service"]),
    ("member of another service", lambda g: g["groups"][2].update(service="a"), ["groups[2].members[1]"]),
    ("process slot taken", lambda g: g["workers"][1].update(process_slot=0), ["workers[1].process_slot"]),
    ("device shared", lambda g: g["workers"][1].update(device_slots=[1, 0]), ["workers[1].device_slots[1]"]),
    ("device twice", lambda g: g["workers"][1].update(device_slots=[1, 1]), ["workers[1].device_slots[1]"]),
    ("negative slot", lambda g: g["workers"][1].update(process_slot=-1), ["workers[1].process_slot"]),
    ("service lists a stranger", lambda g: g["services"][0]["workers"].append("z"), ["services[0].workers[2]"]),
    ("service lists twice", lambda g: g["services"][0]["workers"].append("a0"), ["services[0].workers[2]"]),
    ("service lists another's worker", lambda g: g["services"][0]["workers"].append("b0"), ["services[0].workers[2]"]),
    ("service forgets a worker", lambda g: g["services"][0].update(workers=["a0"]), ["workers[1].service"]),
    ("worker in no world", lambda g: g["groups"][0].update(members=["a0"]), ["workers[1].id"]),
    ("worker in two worlds", lambda g: g["groups"][2].update(kind="e:world"), ["workers[0].id", "workers[2].id"]),
    ("digest of another payload", lambda g: g["adapter"].update(payload={"a": 1}), ["adapter.digest"]),
    ("rank written down", lambda g: g["workers"][0].update(rank=0), ["workers[0].rank"]),
]


@pytest.mark.parametrize(("change", "expected"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_graph_is_refused_where_it_is_broken(change: Callable[[Graph], object], expected: list[str]) -> None:
    assert sorted(fields(edit(change))) == sorted(expected)


def test_a_worker_id_taken_twice() -> None:
    found = fields(edit(lambda g: g["workers"][1].update(id="a0")))
    # a1 is gone, so that the group and the service that name it are wrong as well
    assert found == ["workers[1].id", "groups[0].members[1]", "services[0].workers[1]"]


def test_a_worker_of_an_unknown_service() -> None:
    found = fields(edit(lambda g: g["workers"][3].update(service="z")))
    assert found == ["workers[3].service", "groups[1].members[1]", "services[1].workers[1]"]


def test_several_breaks_are_all_reported() -> None:
    def change(document: Graph) -> None:
        document["workers"][1]["process_slot"] = "1"
        document["groups"][2]["members"] = ["a0", "z", "a0"]
        document["services"][1]["role"] = ""
        document["adapter"]["payload"] = [1]

    assert fields(edit(change)) == [
        "workers[1].process_slot",
        "groups[2].members[1]",
        "groups[2].members[2]",
        "services[1].role",
        "adapter.digest",
    ]


@settings(max_examples=60)
@given(data=st.data())
def test_rank_is_the_position_in_any_stated_order(data: st.DataObject) -> None:
    names = [f"w{index}" for index in range(data.draw(st.integers(1, 12)))]
    order = data.draw(st.permutations(names))
    num_units = data.draw(st.integers(1, len(names)))
    document = graph()
    document["workers"] = [
        {"id": name, "unit": f"u{i % num_units}", "service": "s", "process_slot": i, "device_slots": [i]}
        for i, name in enumerate(names)
    ]
    document["groups"] = [{"id": "w", "kind": "e:world", "service": "s", "members": list(order)}]
    subset = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    document["groups"].append({"id": "g", "kind": "e:any", "members": subset})
    document["services"] = [{"id": "s", "role": "r", "workers": data.draw(st.permutations(names))}]
    execution = check_document(Execution, document, subject="execution")
    assert [global_rank(execution, name) for name in order] == list(range(len(names)))
    shared = any(
        len({m for m in g["members"] if names.index(m) % num_units == u}) > 1
        for g in document["groups"]
        for u in range(num_units)
    )
    assert ("cuda-classic-ipc" in required_features(DriverId.N610, execution)) is shared


@settings(max_examples=60)
@given(data=st.data())
def test_any_single_reference_to_nothing_is_refused(data: st.DataObject) -> None:
    document = graph()
    place = data.draw(st.sampled_from(["member", "listed", "service", "group-service"]))
    if place == "member":
        group = data.draw(st.sampled_from(document["groups"]))
        group["members"][data.draw(st.integers(0, len(group["members"]) - 1))] = "nobody"
    elif place == "listed":
        service = data.draw(st.sampled_from(document["services"]))
        service["workers"][data.draw(st.integers(0, 1))] = "nobody"
    elif place == "service":
        data.draw(st.sampled_from(document["workers"]))["service"] = "nobody"
    else:
        data.draw(st.sampled_from(document["groups"]))["service"] = "nobody"
    assert any("nobody" in str(problem) for problem in _problems(document))


def _problems(document: Graph) -> tuple[Any, ...]:
    with pytest.raises(InvalidDocument) as caught:
        check_document(Execution, document, subject="execution")
    return caught.value.problems
