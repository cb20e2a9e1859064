"""The offline commands as people and programs use them: tables, JSON, help that teaches, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from coldsnap.cli.commands import diff, explain, inspect, predict, tidy, usage
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.desk import plan
from coldsnap.testing.synthetic import SyntheticSpec, make_synthetic, tensor_name

from .conftest import Shop  # isort: skip

SPEC = SyntheticSpec(num_units=1, workers_per_unit=2, num_extents=60, num_images=2)
Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state root ``state`` and three artifacts: base, the same again, and a twin."""
    made = tmp_path_factory.mktemp("offline")
    state = StateRoot.open(made / "state")
    make_synthetic(state, made / "base.json", SPEC)
    make_synthetic(state, made / "again.json", replace(SPEC, capture_id="capture-2"))
    make_synthetic(state, made / "twin.json", replace(SPEC, changed={"w1": frozenset({7})}))
    return made


@pytest.fixture
def cli(folder: Path) -> Cli:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    for module in (diff, explain, inspect, predict, tidy, usage):
        module.add_to(app)

    def run(*words: str) -> Result:
        root = () if "--help" in words else ("--state-root", str(folder / "state"))
        names = [str(folder / word) if word.endswith(".json") else word for word in words]
        return CliRunner().invoke(app, [*names, *root])

    return run


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def test_diff_of_the_same(cli: Cli) -> None:
    result = cli("diff", "base.json", "again.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("the same\n")
    assert "2 workers: same but for the capture's id" in " ".join(result.stdout.split())


def test_diff_of_a_twin_names_the_tensor(cli: Cli) -> None:
    result = cli("diff", "base.json", "twin.json")
    assert result.exit_code == 1
    assert f"changed {tensor_name(7)} (64 B -> 64 B)" in result.stdout
    assert result.stdout.endswith("they differ\n")
    as_json = cli("diff", "base.json", "twin.json", "--json")
    assert as_json.exit_code == 1
    found = document(as_json)
    assert found["same"] is False
    assert found["a"]["path"].endswith("base.json")
    assert [one["tensors"] for worker in found["workers"] for one in worker.get("changes", [])] == [[tensor_name(7)]]


def test_diff_shows_no_more_than_it_is_asked_for(cli: Cli) -> None:
    result = cli("diff", "base.json", "twin.json", "--limit", "0")
    assert tensor_name(7) not in result.stdout
    assert "1 more workers; --limit or --json shows them" in result.stdout


def test_du(cli: Cli) -> None:
    result = cli("du", "base.json", "again.json")
    assert result.exit_code == 0, result.output
    assert "worker/w1" in result.stdout
    found = document(cli("du", "base.json", "again.json", "--json"))
    packs = {one["digest"]: one["bytes"] for one in found["packs"]}
    assert len(packs) == 2
    assert found["saved_bytes"] == sum(packs.values()), "each pack is named twice and stored once"
    assert found["state_root"]["folders"]["capsules"]["files"] > 0


def test_verify_cover(cli: Cli) -> None:
    result = cli("verify", "base.json", "--cover", "-q")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("every preserved byte is kept exactly once\n")
    found = document(cli("verify", "base.json", "--cover", "-q", "--json"))
    assert found["proved"] is True
    assert found["scope"] == "cover"
    assert [proof["cover"]["model_extents"] for proof in found["proofs"]] == [60, 60]


def test_verify_says_that_packs_are_missing(cli: Cli) -> None:
    result = cli("verify", "base.json", "-q", "--json")
    assert result.exit_code == 5
    wrong = [proof["subject"] for proof in document(result)["proofs"] if proof["problems"]]
    assert wrong == ["pack of w0", "pack of w1"]


def test_explain(cli: Cli) -> None:
    found = document(cli("explain", "base.json", "--json"))
    assert {"gates", "ladder", "to_do", "restorable", "by"} == set(found)
    names = {gate["name"] for gate in found["gates"]}
    assert {"engine", "launch", "machine", "host files", "capsule", "weights", "port", "space"} <= names
    grouped = [problem for group in found["to_do"] for problem in group["problems"]]
    assert len(grouped) == sum(len(gate["problems"]) for gate in found["gates"])
    result = cli("explain", "base.json")
    assert result.exit_code == (0 if found["restorable"] else 3)
    for group in found["to_do"]:
        assert f"to be done by {group['who_must_act']}:" in result.stdout


def test_predict(cli: Cli) -> None:
    result = cli("predict", "base.json", "--no-calibrate", "-q")
    assert result.exit_code == 0, result.output
    assert "restore: at least" in result.stdout
    assert "no rate is known here" in result.stdout
    found = document(cli("predict", "base.json", "--no-calibrate", "-q", "--json"))
    assert found["source"] == "recovery"
    assert found["phases"]["prepare"]["bytes"] > 0
    assert found["phases"]["prepare"]["whole"] is False


def test_gc_takes_only_what_no_lease_names(cli: Cli, folder: Path) -> None:
    """The synthetic artifacts were never leased here, so their capsules are garbage: shown, and left by a dry run."""
    before = sorted((folder / "state" / "capsules").iterdir())
    found = document(cli("gc", "--dry-run", "--json"))
    assert found["dry_run"] is True
    assert {item["path"] for item in found["items"] if item["kind"] == "capsule"} == {str(path) for path in before}
    assert sorted((folder / "state" / "capsules").iterdir()) == before
    assert found["kept"] == []


def test_gc_says_who_needs_what_stays(shop: Shop, model: Path, tmp_path: Path) -> None:
    """A second capture of one model, loaded in another order, has the same pack and a capsule of its own."""
    planned = plan(model, tmp_path / "second.json", operation_id="capture-2", serve={"shuffle": 2})
    capture(shop.tools, planned.request, planned.model)
    second = load_artifact(tmp_path / "second.json")
    kept = plan_tidy(shop.tools).sweep.kept_objects()
    both = tuple(sorted((str(shop.loaded.path), str(second.path))))
    assert {(one.kind, one.digest, one.needed_by) for one in kept} == {
        ("pack", shop.result.pack_digests[0], both),
        ("capsule", shop.loaded.capsule_digest("u0"), (str(shop.loaded.path),)),
        ("capsule", second.capsule_digest("u0"), (str(second.path),)),
    }
    run_delete(shop.tools, plan_delete(shop.tools, second.path))
    (pack,) = (one for one in plan_tidy(shop.tools).sweep.kept_objects() if one.kind == "pack")
    assert pack.needed_by == (str(shop.loaded.path),)
    assert shop.tools.store.exists(pack.digest)


@pytest.mark.parametrize("command", ["diff", "du", "explain", "gc", "predict", "verify"])
def test_help_teaches_and_documents_the_exit_codes(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "Exit code 0:" in text
    assert "--json" in text
    assert len(text) > 500
