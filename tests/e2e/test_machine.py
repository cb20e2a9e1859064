"""What the machine lacks or holds: a port of somebody else, no root, no CRIU, a full disk, secrets in the recipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule import criu as criu_module
from coldsnap.cli.exits import exit_code
from coldsnap.core.bindings import hygiene_of
from coldsnap.core.messages import Answer
from coldsnap.core.points import install
from coldsnap.errors import ColdsnapError, InvalidDocument, OutOfSpace, Refused
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.live import service_status
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.disks import small_disk
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.stand import PATIENCE_S, UNSEEN, Stand, plugin_path

from .conftest import TENSORS  # isort: skip

pytestmark = pytest.mark.criu

SECRET = "hf_" + "Zq9fK2" * 5 + "wX3y"


def fails(stand: Stand, error: type[ColdsnapError], code: int, act: Any) -> ColdsnapError:
    with pytest.raises(error) as caught:
        act()
    assert exit_code(caught.value) == code
    return caught.value


LISTEN = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""

# -- ports and names ----------------------------------------------------------------------------------


def test_a_port_of_a_foreign_process_names_it(stand: Stand) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        error = fails(stand, Refused, 3, lambda: stand.restore("foreign-1", port=port))
        owner.kill()
    assert isinstance(error, Refused)
    (problem,) = error.problems
    assert (problem.field, problem.value) == ("port", str(port))
    assert f"process {owner.pid}" in problem.message
    assert problem.cure is not None
    assert "--port" in problem.cure
    stand.assert_nothing_left()


def test_the_same_name_evicts_and_another_with_that_port_is_refused(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("same-1")
    first = service_status(stand.tools, "svc").pids
    error = fails(stand, Refused, 3, lambda: stand.restore("same-2", name="other"))
    assert "service svc" in str(error)
    assert service_status(stand.tools, "svc").pids == first
    assert stand.ask(UNSEEN) == expected
    assert stand.restore("same-3").evicted
    assert stand.ask(UNSEEN) == expected
    stand.assert_nothing_left(but_for=["svc"])


# -- the machine --------------------------------------------------------------------------------------


def test_without_criu_nothing_starts_and_the_way_out_is_named(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_module, "_PREFERRED", Path("/nonexistent/criu"))
    monkeypatch.setenv("PATH", "")
    planned = stand.plan_unchecked("no-criu", "no-criu.json")
    error = fails(stand, Refused, 3, lambda: capture(stand.tools, planned.request, planned.model))
    assert "no usable CRIU" in str(error)
    assert "scripts/install-criu" in str(error)
    assert not (stand.folder / "no-criu.json").exists()
    error = fails(stand, Refused, 3, lambda: stand.restore("no-criu-restore"))
    assert "scripts/install-criu" in str(error)
    stand.assert_nothing_left()


AS_NOBODY = """
import os, sys
import coldsnap.cli.main, coldsnap.cli.commands, coldsnap.cli.wiring, coldsnap.cli.output, coldsnap.cli.planned
import coldsnap.cli.progress, coldsnap.cli.recording, coldsnap.ops.capture, coldsnap.ops.gates, coldsnap.capsule.unit
import coldsnap.capsule.probes, coldsnap.capsule.hostfacts, coldsnap.testing.engine, coldsnap.cli.activation
import coldsnap.engines.transformers.plugin, coldsnap.ops.restore
import encodings.idna, urllib.request, rich.console, rich.table, rich._unicode_data
coldsnap.cli.commands.register(__import__("typer").Typer())
coldsnap.cli.wiring.installed_engines()
os.chdir("/")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.argv = ["coldsnap", *sys.argv[1:]]
coldsnap.cli.main.run()
"""


def test_without_root_a_capture_is_refused_by_name(stand: Stand) -> None:
    """As nobody, with a state root of nobody's own. What it needs is loaded before root is given up."""
    folder = Path(tempfile.mkdtemp(prefix="coldsnap-nobody-"))
    try:
        shutil.copytree(stand.model, folder / "model")
        (folder / "r.yaml").write_text("engine: fake\nmodel: ./model\ndriver: host\n")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
        words = ["capture", folder / "r.yaml", "-o", folder / "a.json", "--state-root", folder / "state", "--json"]
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(plugin_path(folder / "plugins"))},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        said = json.loads(done.stdout)
        assert said["error"] == "Refused"
        assert any("root" in str(problem) for problem in said["problems"])
        assert not (folder / "a.json").exists()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("during", ["pack", "images", "capsule"])
def test_a_disk_that_is_full_in_the_middle_of_a_capture(stand: Stand, tmp_path: Path, during: str) -> None:
    """A disk with half of the room that this step needs beside what comes before it.

    While a tree is dumped its images are larger than in the end, so the disk shrinks before the last step.
    """
    made = stand.result
    room = {
        "pack": made.pack_bytes // 2,
        "images": made.pack_bytes + made.image_bytes // 2,
        "capsule": 2 * (made.pack_bytes + made.image_bytes + made.capsule_bytes),
    }[during]
    with small_disk(tmp_path / "small", room) as disk:

        def shrink(point: str) -> None:
            if (during, point) == ("capsule", "capture.scanned"):
                with open(disk / "filler", "wb") as filler:
                    os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(disk).free - made.capsule_bytes // 2)

        install(shrink)
        model = write_checkpoint(tmp_path / "model", tensors=TENSORS)
        (disk / "state").mkdir(mode=0o700)
        full = Stand(folder=tmp_path, model=model, state_root=disk / "state")
        try:
            error = fails(full, OutOfSpace, 4, full.capture)
        finally:
            install(None)
        assert str(disk) in str(error)
        assert error.cure is not None
        assert [step for step in ("images-u0", "capsule-u0") if step in str(error)] == (
            [] if during == "pack" else [f"{during}-u0"]
        )
        assert not (tmp_path / "artifact.json").exists()
        full.assert_nothing_left()
        subprocess.run(["mount", "-o", f"remount,size={200 << 20}", str(disk)], check=True)
        full.capture()
        full.restore("after-1")
        full.stop_all()
        full.tools.host.close()


# -- secrets ------------------------------------------------------------------------------------------


def test_a_token_in_the_environment_stops_the_capture(stand: Stand) -> None:
    error = fails(
        stand,
        Refused,
        3,
        lambda: stand.capture("secret-1", "secret-1.json", environment={"HF_TOKEN": SECRET}),
    )
    assert isinstance(error, Refused)
    assert any("HF_TOKEN" in str(problem) for problem in error.problems)
    assert SECRET not in f"{error} {error.facts}"
    assert any("allow_secrets" in str(problem) for problem in error.problems)
    assert not (stand.folder / "secret-1.json").exists()
    stand.assert_nothing_left()


def test_an_allowed_token_makes_an_artifact_that_is_not_publishable(stand: Stand, expected: tuple[Answer, ...]) -> None:
    result = stand.capture("secret-2", "secret-2.json", environment={"HF_TOKEN": SECRET}, allow_secrets=["HF_TOKEN"])
    assert result.document()["publishable"] is False
    loaded = load_artifact(result.artifact_path)
    (report,) = hygiene_of(loaded.artifact.runtime.bindings)
    assert (report.allowed_secrets, report.publishable) == (("HF_TOKEN",), False)
    assert SECRET.encode() not in loaded.path.read_bytes(), "the descriptor names the secret and never shows it"
    stand.prepare("secret-3", loaded)
    images = stand.tools.state.prepared / loaded.capsule_digest("u0").hex / "process"
    assert any(SECRET.encode() in path.read_bytes() for path in images.iterdir()), "and the image holds it, as said"
    stand.restore("secret-4", loaded)
    assert stand.ask(UNSEEN) == expected


def test_allowing_one_secret_allows_no_other(stand: Stand) -> None:
    error = fails(
        stand,
        Refused,
        3,
        lambda: stand.capture(
            "secret-5",
            "secret-5.json",
            environment={"HF_TOKEN": SECRET, "OPENAI_API_KEY": "sk-" + "Ab3dE6gH" * 5},
            allow_secrets=["HF_TOKEN"],
        ),
    )
    assert isinstance(error, Refused)
    assert any("OPENAI_API_KEY" in str(problem) for problem in error.problems)
    assert not any(problem.field.endswith("HF_TOKEN") for problem in error.problems)
    stand.assert_nothing_left()


def test_a_wrong_revision_in_a_strict_request(stand: Stand, folder: Path) -> None:
    """Through the command line, as somebody who keeps strict requests would."""
    document = json.loads((stand.cli_plan()).read_text())
    document["launch"]["model"]["revision"] = "sha256:" + "0" * 64
    document["id"], document["output"] = "strict-1", str(folder / "a.json")
    path = folder / "request.json"
    path.write_text(json.dumps(document))
    with stand.cli("capture", "--request-json", path, "--json") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    said = json.loads(out)
    assert (process.returncode, said["error"]) == (3, "Refused"), err
    (problem,) = said["problems"]
    assert problem["field"] == "launch.model.revision"
    assert problem["value"] == "sha256:" + "0" * 64
    assert stand.planned.model.revision in problem["cure"]
    assert not (folder / "a.json").exists()


def test_a_plan_is_a_request_that_can_be_captured(stand: Stand, folder: Path, expected: tuple[Answer, ...]) -> None:
    document = json.loads((stand.cli_plan()).read_text())
    document["id"], document["output"] = "strict-2", str(folder / "a.json")
    with stand.cli("capture", "--request-json", "-", "--json", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(json.dumps(document), timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out)["pack_shared"] is True
    stand.restore("strict-3", load_artifact(folder / "a.json"))
    assert stand.ask(UNSEEN) == expected


def test_a_request_with_a_mutable_tag_is_refused_with_its_path(stand: Stand, folder: Path) -> None:
    document = json.loads((stand.cli_plan()).read_text())
    document["launch"]["units"][0]["image"] = "registry.example/engine:latest"
    document["launch"]["colour"] = "red"
    path = folder / "request.json"
    path.write_text(json.dumps(document))
    with stand.cli("capture", "--request-json", path, "--json") as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    said = json.loads(out)
    assert (process.returncode, said["error"]) == (2, InvalidDocument.__name__)
    assert {"launch.units[0].image", "launch.colour"} <= {problem["field"] for problem in said["problems"]}


def test_ports_can_be_chosen_at_restore(stand: Stand, expected: tuple[Answer, ...]) -> None:
    port = free_port()
    assert stand.restore("port-1", port=port).port == port
    assert stand.ask(UNSEEN, port) == expected
