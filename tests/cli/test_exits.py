"""Every error has its exit code, tells people what to do, and is one JSON object with ``--json``."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from coldsnap import errors
from coldsnap.cli.__main__ import main
from coldsnap.cli.exits import EXIT_CODES, exit_code
from coldsnap.cli.output import print_error
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.errors import ColdsnapError, CriuError, Problem
from coldsnap.ops.artifacts import load_artifact
from coldsnap.testing.desk import Desk

from .conftest import Coldsnap, Ran  # isort: skip

EXPECTED = {
    "UserError": 2,
    "UsageError": 2,
    "InvalidDocument": 2,
    "Refused": 3,
    "HostError": 4,
    "MissingCapability": 4,
    "ResourceBusy": 4,
    "OutOfSpace": 4,
    "UnsafePath": 4,
    "IntegrityError": 5,
    "PayloadRejected": 5,
    "SignatureRejected": 5,
    "PeerError": 6,
    "EngineError": 6,
    "CriuError": 6,
    "CudaError": 6,
    "HelperLost": 6,
    "DeadlineExceeded": 6,
    "RemoteError": 6,
    "AcceptanceFailed": 7,
    "OperationInterrupted": 130,
    "InternalError": 70,
    "ColdsnapError": 70,
}


def made(kind: type[ColdsnapError]) -> ColdsnapError:
    if issubclass(kind, errors.InvalidDocument | errors.Refused):
        return kind("thing", [Problem(field="f", message="m")])
    if issubclass(kind, errors.PayloadRejected | errors.SignatureRejected):
        return kind("digest_mismatch", "m")
    if issubclass(kind, errors.RemoteError):
        return kind("broken", "m", place="p")
    return kind("m")


def test_every_class_of_the_tree_has_its_code() -> None:
    classes = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, ColdsnapError) and name in errors.__all__
    }
    assert set(classes) == set(EXPECTED)
    assert {name: exit_code(made(kind)) for name, kind in classes.items()} == EXPECTED
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(ZeroDivisionError()) == 70


def test_help_lists_every_code(coldsnap: Coldsnap) -> None:
    ran = coldsnap("--help")
    assert ran.code == 0
    for _, code, _ in EXIT_CODES:
        assert f"{code} " in ran.out, code


def ended(ran: Ran, code: int, kind: str) -> dict[str, object]:
    """The error as an object; the same words go to people on stderr."""
    assert ran.code == code, ran.err
    said = ran.said
    assert (said["error"], said["exit_code"]) == (kind, code)
    assert said["message"]
    assert ran.err.startswith(f"coldsnap: {said['message']}")
    assert "Traceback" not in ran.err or code == 70
    return dict(said)


@pytest.mark.parametrize(
    "words",
    [
        ["capture", "--colour", "red"],
        ["captrue"],
        ["restore", "a.json", "--port", "0"],
        ["restore", "a.json", "--port", "x"],
        ["stop"],
        ["restore", "a.json", "b.json"],
        ["schema", "--verbose"],
    ],
    ids=["flag", "command", "range", "kind", "missing argument", "too many", "unknown flag"],
)
def test_words_that_make_no_sense(coldsnap: Coldsnap, kit: Desk, words: list[str]) -> None:
    said = ended(coldsnap(*words, "--json"), 2, "UsageError")
    assert said["cure"] == "`coldsnap COMMAND --help` shows what it takes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["capture"], "name either a RECIPE.yaml or --request-json"),
        (["capture", "r.yaml", "--request-json", "x"], "name either a RECIPE.yaml or --request-json"),
        (["capture", "r.yaml"], "--output is missing"),
        (["capture", "--request-json", "x", "-o", "a"], "--output, --port and --driver belong to a recipe"),
        (["restore"], "name either an ARTIFACT.json or --request-json"),
        (["restore", "--request-json", "x", "--name", "n"], "belong to an ARTIFACT.json"),
        (["sleep"], "give either a NAME or --request-json"),
        (["wake", "n", "--request-json", "x"], "give either a NAME or --request-json"),
        (["schema", "requets"], "no document is called 'requets'"),
    ],
)
def test_words_that_do_not_go_together(coldsnap: Coldsnap, kit: Desk, words: list[str], message: str) -> None:
    ran = coldsnap(*words)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_a_recipe_with_problems_lists_them_all(coldsnap: Coldsnap, kit: Desk, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("engine: 3\nmodle: x\n")
    said = ended(coldsnap("capture", path, "-o", "a.json", "--json"), 2, "InvalidDocument")
    problems = said["problems"]
    assert isinstance(problems, list)
    assert {problem["field"] for problem in problems} == {"engine", "modle", "model"}
    assert all(problem["cure"] for problem in problems)


def test_a_closed_gate_is_3(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    kit.failed["criu-process-tree"] = "no CRIU here"
    said = ended(coldsnap("restore", artifact, "--json", "--quiet"), 3, "Refused")
    assert "no CRIU here" in str(said["problems"])


def test_a_name_somebody_works_on_is_4(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    with kit.tools.services.lock("svc"):
        said = ended(coldsnap("restore", artifact, "--json", "--quiet"), 4, "ResourceBusy")
    assert said["facts"] == {"name": "svc", "holder": str(os.getpid())}


def test_damaged_bytes_are_5(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    (pack,) = kit.tools.state.payloads.glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(data)
    said = ended(coldsnap("restore", artifact, "--json", "--quiet"), 5, "PayloadRejected")
    assert isinstance(said["facts"], dict)
    assert said["facts"]["reason"] == "digest_mismatch"


def test_a_peer_that_fails_is_6_with_its_log(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    kit.units.fail_next("restore", CriuError("it did not come back", facts={"log": ["Error (x): y"]}))
    ran = coldsnap("restore", artifact, "--json", "--quiet")
    said = ended(ran, 6, "CriuError")
    assert "forgot the unfinished service record" in str(said["notes"])
    assert "    | Error (x): y" in ran.err


def test_wrong_answers_are_7(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    document = artifact_document(load_artifact(artifact).artifact)
    for binding in document["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-acceptance":
            binding["answers"][0]["token_ids"][0] ^= 1
    artifact.write_bytes(artifact_bytes(artifact_from(document)))
    ended(coldsnap("restore", artifact, "--json", "--quiet"), 7, "AcceptanceFailed")
    assert kit.units.running() == ()


def test_a_bug_is_70_and_asks_to_be_reported(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    kit.units.fail_next("restore", ZeroDivisionError("division by zero"))
    ran = coldsnap("restore", artifact, "--json", "--quiet")
    said = ended(ran, 70, "InternalError")
    assert "ZeroDivisionError" in str(said["message"])
    assert "report" in str(said["cure"])
    assert "test_exits" not in str(said["message"])
    assert "Traceback" in ran.err


def test_ctrl_c_is_130_and_says_what_was_undone(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    kit.units.fail_next("restore", KeyboardInterrupt())
    said = ended(coldsnap("restore", artifact, "--json", "--quiet"), 130, "OperationInterrupted")
    assert said["notes"] == ["forgot the unfinished service record"]


def test_ctrl_c_outside_an_operation_is_130(coldsnap: Coldsnap, kit: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coldsnap.ops.tidy.plan_tidy", stop)
    ran = coldsnap("gc")
    assert (ran.code, ran.err) == (130, "coldsnap: interrupted\n")


def test_an_unknown_service_lists_the_known_ones(coldsnap: Coldsnap, kit: Desk) -> None:
    for words in (["status", "x"], ["stop", "x"], ["sleep", "x"], ["wake", "x"]):
        said = ended(coldsnap(*words, "--json"), 2, "UserError")
        assert said["cure"] == "known names: none"
    assert coldsnap("logs", "x").code == 2
    assert list(kit.tools.state.services.iterdir()) == []


def test_a_port_of_somebody_else_is_refused_before_anything(coldsnap: Coldsnap, kit: Desk, artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = ended(coldsnap("restore", artifact, "--port", port, "--json", "--quiet"), 3, "Refused")
    assert [problem["field"] for problem in said["problems"]] == ["port"]  # type: ignore[attr-defined]


def test_the_program_itself(tmp_path: Path) -> None:
    """One process for what only a process shows: its exit code, its streams, and a reader that went away."""
    command = [sys.executable, "-m", "coldsnap.cli", "inspect", str(tmp_path / "absent.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert '"error": "UserError"' in done.stdout
    assert done.stderr.startswith("coldsnap: cannot read the artifact")


def test_an_interrupt_that_says_nothing_is_still_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(KeyboardInterrupt(), as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": "KeyboardInterrupt", "message": "interrupted", "exit_code": 130}
    assert said.err == "coldsnap: interrupted\n"


INTERRUPTED_IMPORT = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, *more):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from coldsnap.cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "module", ["coldsnap.cli.main", "typer", "rich.console", "coldsnap.errors", "coldsnap.cli.commands", "pydantic"]
)
def test_ctrl_c_while_it_is_imported_is_130_and_shows_no_trace_of_the_import(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "coldsnap: interrupted\n")


def test_the_console_script_is_the_module_that_is_ready_for_that() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="coldsnap")
    assert script.load() is main
    imported = "import sys, coldsnap.cli.__main__; print(*[n for n in sys.modules if n.startswith('coldsnap')])"
    done = subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["coldsnap", "coldsnap.cli", "coldsnap.cli.__main__"]
