"""Service records: written whole, stamped, listed, and changed by one operation at a time."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from coldsnap.errors import InvalidDocument, ResourceBusy, UnsafePath, UserError
from coldsnap.ops.services import ServiceRecord
from coldsnap.ops.tools import Tools


def record(name: str = "svc", state: str = "restoring") -> ServiceRecord:
    return ServiceRecord(name=name, engine="fake", state=state, operation_id="op-1", port=8000)


def test_a_record_is_stamped_private_and_comes_back(tools: Tools) -> None:
    saved = tools.services.save(record())
    assert saved.controller_pid == os.getpid()
    assert saved.updated_unix_ns > 0
    assert tools.services.load("svc") == saved
    assert stat.S_IMODE((tools.services.folder("svc") / "service.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(tools.services.folder("svc").stat().st_mode) == 0o700


def test_names_are_those_with_a_record(tools: Tools) -> None:
    tools.services.save(record("b"))
    tools.services.save(record("a"))
    with tools.services.lock("locked-only"):
        assert tools.services.names() == ("a", "b")
    tools.services.forget("a")
    tools.services.forget("a")
    assert tools.services.names() == ("b",)
    assert tools.services.load("a") is None


def test_forgetting_keeps_the_logs_and_removing_does_not(tools: Tools) -> None:
    tools.services.save(record())
    log = tools.services.folder("svc") / "u0.log"
    log.write_text("last words")
    tools.services.forget("svc")
    assert log.exists()
    tools.services.remove("svc")
    assert not tools.services.folder("svc").exists()


def test_an_unknown_name_lists_the_known_ones(tools: Tools) -> None:
    with pytest.raises(UserError, match=r"no service is named 'x' here; known names: none"):
        tools.services.must_load("x")
    tools.services.save(record("a"))
    with pytest.raises(UserError, match="known names: a"):
        tools.services.must_load("x")


def test_a_name_is_locked_by_one_operation(tools: Tools) -> None:
    tools.services.save(record())
    with tools.services.lock("svc"):
        with (
            pytest.raises(ResourceBusy, match=rf"working on 'svc' \(restoring, process {os.getpid()}\)") as caught,
            tools.services.lock("svc"),
        ):
            pytest.fail("the body ran")
        assert caught.value.facts == {"name": "svc", "holder": str(os.getpid())}
        assert tools.services.is_locked("svc")
        with tools.services.lock("other"):
            pass
        assert not tools.services.is_locked("other")
    with tools.services.lock("svc"):
        pass
    assert not tools.services.is_locked("svc")
    assert not tools.services.is_locked("never-locked")


def test_who_has_a_name_is_said_and_not_who_wrote_its_record(tools: Tools) -> None:
    saved = tools.services.save(record())
    path = tools.services.folder("svc") / "service.json"
    path.write_text(path.read_text().replace(f'"controller_pid":{os.getpid()}', '"controller_pid":1'))
    with (
        tools.services.lock("svc"),
        pytest.raises(ResourceBusy, match=rf"\(restoring, process {saved.controller_pid}\)"),
        tools.services.lock("svc"),
    ):
        pytest.fail("the body ran")


@pytest.mark.parametrize("name", ["", "..", "a/b", "../../etc", ".hidden"])
def test_names_that_leave_the_folder_are_refused_by_every_way_in(tools: Tools, name: str, tmp_path: Path) -> None:
    """``stop`` and ``logs`` take a name straight from the command line."""
    with pytest.raises(UserError), tools.services.lock(name):
        pytest.fail("the body ran")
    with pytest.raises(UserError):
        tools.services.must_load(name)


def test_a_damaged_record_is_named(tools: Tools) -> None:
    tools.services.save(record())
    path = tools.services.folder("svc") / "service.json"
    path.write_bytes(path.read_bytes().replace(b'"port"', b'"prot"'))
    with pytest.raises(InvalidDocument, match=r"service\.json") as caught:
        tools.services.load("svc")
    assert f"{path}: prot" in {problem.field for problem in caught.value.problems}


def test_a_record_others_may_write_is_not_believed(tools: Tools) -> None:
    tools.services.save(record())
    (tools.services.folder("svc") / "service.json").chmod(0o666)
    with pytest.raises(UnsafePath, match="can be changed by other users"):
        tools.services.load("svc")


def test_a_folder_that_cannot_be_made_is_said_so(tools: Tools) -> None:
    shutil.rmtree(tools.state.services)
    tools.state.services.write_text("no folder")
    with pytest.raises(UnsafePath, match=r"cannot lock .*services/svc/lock"), tools.services.lock("svc"):
        raise AssertionError("the name was locked")
    with pytest.raises(UnsafePath, match=r"cannot create .*services/svc"):
        tools.services.save(record())
