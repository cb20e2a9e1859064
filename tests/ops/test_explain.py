"""Explain gives a restore's own answer, groups what is to be done by who must do it, and opens no manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coldsnap.capsule import member
from coldsnap.core import manifest_fields
from coldsnap.core.ladder import Rung
from coldsnap.ops.assembly import capsule_folder
from coldsnap.ops.explain import Explanation, explain
from coldsnap.ops.gates import Actor

from .conftest import Shop  # isort: skip


def ask(shop: Shop, **changes: Any) -> Explanation:
    tools = changes.pop("tools", shop.tools)
    return explain(tools, shop.loaded, shop.request("explain-1", **changes))


def test_an_artifact_that_would_restore(shop: Shop) -> None:
    found = ask(shop)
    assert found.to_do() == {}
    assert found.rung is not None
    assert found.rung.rung is Rung.NATIVE
    shop.restore()


def test_everything_wrong_is_grouped_by_who_must_act(shop: Shop) -> None:
    shop.kit.failed["criu-process-tree"] = "no CRIU here"
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    folder = capsule_folder(shop.tools, shop.loaded.capsule_digest("u0"))
    folder.rename(folder.with_name("moved"))
    found = ask(shop, weights="native")
    assert found.rung is None
    todo = found.to_do()
    assert set(todo) == {Actor.HOST, Actor.ARTIFACT}
    assert any("no CRIU here" in problem.message for problem in todo[Actor.HOST])
    assert {problem.field.partition("[")[0] for problem in todo[Actor.ARTIFACT]} == {
        "capsule.images",
        "policy.weights.mode",
    }
    assert all(problem.cure for problems in todo.values() for problem in problems)
    with pytest.raises(Exception, match="would not restore here") as caught:
        shop.restore(weights="native")
    refused = {str(problem) for problem in caught.value.problems}  # type: ignore[attr-defined]
    assert refused == {str(problem) for problems in todo.values() for problem in problems}


def test_a_missing_pack_leaves_the_recovery(shop: Shop) -> None:
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    found = ask(shop)
    assert found.rung is not None
    assert found.rung.rung is Rung.RECOVERY
    assert found.to_do() == {}


def test_a_missing_engine_is_one_gate_of_many(shop: Shop) -> None:
    shop.kit.failed["criu-process-tree"] = "no CRIU here"
    found = ask(shop, tools=replace(shop.tools, engines={}))
    closed = {gate.name for gate in found.gates if gate.problems}
    assert {"engine", "machine"} <= closed
    assert next(gate for gate in found.gates if gate.name == "port").detail == "not looked at"
    assert found.rung is None


def test_no_manifest_is_opened(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a manifest was opened")

    monkeypatch.setattr(manifest_fields, "ManifestReader", never)
    monkeypatch.setattr(member, "read_member", never)
    assert ask(shop).rung is not None


def test_the_document(shop: Shop) -> None:
    shop.kit.failed["criu-process-tree"] = "no CRIU here"
    document = json.loads(json.dumps(ask(shop).document()))
    assert document["restorable"] is False
    assert document["by"] is None
    assert [one["who_must_act"] for one in document["to_do"]] == [Actor.HOST.value]
    assert {gate["name"] for gate in document["gates"] if not gate["open"]} == {"machine"}
