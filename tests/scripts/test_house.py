"""The set-up scripts: what they read, what they refuse, what they say. No network, no root, nothing installed."""

import importlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
criu: ModuleType = importlib.import_module("house.criu")
debian: ModuleType = importlib.import_module("house.debian")
jobs: ModuleType = importlib.import_module("house.jobs")
reruns: ModuleType = importlib.import_module("house.reruns")
say: ModuleType = importlib.import_module("house.say")

DEB822 = """\
# kept by hand
Types: deb deb-src
URIs: http://mirror.example/debian/ http://second.example/debian
Suites: bookworm
 bookworm-updates
Components: main

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""


@pytest.mark.parametrize(
    ("sources", "codename", "mirror"),
    [
        ([DEB822], "bookworm", "http://mirror.example/debian"),
        ([DEB822], "bookworm-updates", "http://mirror.example/debian"),
        ([DEB822], "bookworm-security", "http://mirror.example/debian-security"),
        ([DEB822], "trixie", None),
        ([DEB822.replace("http://mirror.example/debian/", "cdrom:[x]/")], "bookworm", "http://second.example/debian"),
        ([DEB822.replace("Types: deb deb-src", "Types: deb-src")], "bookworm", None),
        (["Enabled: no\n" + DEB822], "bookworm", None),
        (["deb https://one.example/debian trixie main\n"], "trixie", "https://one.example/debian"),
        (["deb [arch=amd64 signed-by=/k] http://a.example/d/ trixie main"], "trixie", "http://a.example/d"),
        (["#deb http://a.example/d trixie main\ndeb-src http://b.example/d trixie main"], "trixie", None),
        (["deb file:/media/disc trixie main", "deb http://c.example/d trixie main"], "trixie", "http://c.example/d"),
        (["", "deb http://d.example/d trixie-backports main"], "trixie", None),
    ],
)
def test_mirror_is_the_one_that_serves_the_release(sources: list[str], codename: str, mirror: str | None) -> None:
    assert debian.mirror_in(sources, codename) == mirror


words = st.from_regex(r"[a-z0-9][a-z0-9.+~:-]{0,20}", fullmatch=True)
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


@given(packages=st.lists(st.tuples(words, words, words, digests), max_size=5), suite=words)
def test_lock_reads_what_it_writes(packages: list[tuple[str, str, str, str]], suite: str) -> None:
    lock = debian.Lock(
        suite=suite,
        snapshot="20260102T030405Z",
        packages=tuple(
            debian.Package(architecture=arch, name=name, version=version, sha256=sha256)
            for arch, name, version, sha256 in packages
        ),
    )
    assert debian.parse_lock(debian.lock_text(lock)) == lock


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("suite trixie\n", "one 'snapshot' line"),
        ("suite trixie\nsuite sid\nsnapshot x\n", "line 2.*'suite sid'"),
        ("suite a\nsnapshot b\namd64 criu 4.1.1-1 abcd\n", "line 3.*abcd"),
        ("suite a\nsnapshot b\namd64 criu " + "0" * 64 + "\n", "line 3"),
    ],
)
def test_damaged_lock_is_refused_by_line(text: str, complaint: str) -> None:
    with pytest.raises(say.Trouble, match=complaint):
        debian.parse_lock(text)


def test_the_shipped_lock_is_complete() -> None:
    lock = debian.parse_lock((ROOT / "scripts/criu.lock").read_text())
    for architecture in criu.ARCHITECTURES.values():
        pinned = {package.name: package.version for package in lock.packages if package.architecture == architecture}
        assert {"criu", "libc6", "libgnutls30t64", "libprotobuf-c1", "libnl-3-200", "libnet1"} <= pinned.keys()
        assert criu.version_of(f"Version: {pinned['criu'].partition('-')[0]}") >= criu.MINIMUM
    keys = [(package.architecture, package.name) for package in lock.packages]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("said", "numbers"),
    [("Version: 4.1.1\n", (4, 1, 1)), ("Version: 4.2\nGitID: v4.2", (4, 2)), ("criu 9", ()), ("", ())],
)
def test_version(said: str, numbers: tuple[int, ...]) -> None:
    assert criu.version_of(said) == numbers


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("Error (criu/vdso.c:1): vdso: Unexpected rt vDSO area bounds\n", ["vDSO area bounds", "newer CRIU is needed"]),
        ("Error (criu/x.c:2): needs CAP_SYS_ADMIN\nWarn  (y): z\n", ["needs CAP_SYS_ADMIN", "lacks a capability"]),
        ("Warn  (y): dirty\nError (a): no userfaultfd\n", ["no userfaultfd", "lacks something CRIU needs"]),
        ("something odd\n", ["something odd"]),
        ("", ["no reason given"]),
    ],
)
def test_a_failed_check_is_explained(said: str, wanted: list[str]) -> None:
    explained = criu.diagnosis(said)
    assert [part for part in wanted if part not in explained] == []


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


GOOD = 'case "$1" in --version) echo "Version: 4.2";; check) echo "Looks good.";; esac'


@pytest.mark.usefixtures("as_root")
def test_judging_a_program(tmp_path: Path) -> None:
    assert criu.judge([program(tmp_path / "good", GOOD)]) == ("4.2", ())
    old = criu.judge([program(tmp_path / "old", 'echo "Version: 3.17.1"')])
    assert old == ("3.17.1", ("version 3.17.1 is older than 4.1.1",))
    version, problems = criu.judge([program(tmp_path / "bad", 'echo "Version: 4.2"; [ "$1" = --version ]')])
    assert version == "4.2"
    assert "`criu check` failed" in problems[0]
    version, problems = criu.judge([program(tmp_path / "lost", "echo no such library >&2; exit 127")])
    assert version is None
    assert "exit 127" in problems[0]
    assert "no such library" in problems[0]
    assert criu.judge([tmp_path / "absent"])[0] is None
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x7fELF of another machine")
    foreign.chmod(0o755)
    assert "does not start" in criu.judge([foreign])[1][0]


def test_without_root_it_is_not_called_working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    version, problems = criu.judge([program(tmp_path / "good", GOOD)])
    assert version == "4.2"
    assert [problem for problem in problems if "not root" in problem] == list(problems) != []


@pytest.mark.usefixtures("as_root")
def test_a_prefix_that_points_to_the_system(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    assert criu.inspect(prefix).problems == (f"no CRIU of ours in {prefix}",)
    prefix.mkdir()
    criu.build_from_system(prefix, program(tmp_path / "system criu", GOOD))
    state = criu.inspect(prefix)
    assert (state.installed, state.works, state.version, state.source) == (True, True, "4.2", "system")
    assert stat.S_IMODE((prefix / "bin/criu").stat().st_mode) == 0o755
    stamp = json.loads((prefix / "coldsnap-criu.json").read_text())
    assert (stamp["version"], stamp["source"], stamp["packages"]) == ("4.2", "system", [])


def test_check_of_an_empty_prefix_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/install-criu"), "--prefix", str(tmp_path / "p"), "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    state = json.loads(done.stdout)
    assert (state["installed"], state["works"]) == (False, False)
    assert state["problems"] == [f"no CRIU of ours in {tmp_path / 'p'}"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given_words", "flags"),
    [
        (["MODEL=/a b", "--json"], ["--model", "/a b", "--json"]),
        (["MAX_TOKENS=3"], ["--max-tokens", "3"]),
        (["MODEL=x=y"], ["--model", "x=y"]),
        (["model=x", "--a=b", "c"], ["model=x", "--a=b", "c"]),
    ],
)
def test_words_become_flags(given_words: list[str], flags: list[str]) -> None:
    assert jobs._flags(given_words) == flags


def test_every_job_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(jobs.JOBS)
    assert jobs.main(["nonsense"]) == 2
    assert "choose one of setup, demo" in capsys.readouterr().err
    assert jobs.main(["help", "nonsense"]) == 1


def test_skipped_tests_are_counted_and_expected_failures_are_not(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "@pytest.mark.skip(reason='no moon')\n"
        "def test_skips(): pass\n"
        "@pytest.mark.xfail\n"
        "def test_fails(): assert False\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_three.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    cases = reruns.cases_in(report)
    assert [(str(case), case.skipped) for case in cases if case.skipped] == [("test_three.test_skips", "no moon")]
    assert (len(cases), [case for case in cases if case.error]) == (3, [])
    assert reruns.cases_in(tmp_path / "absent.xml") is None
    (tmp_path / "half.xml").write_bytes(report.read_bytes()[:-20])
    assert reruns.cases_in(tmp_path / "half.xml") is None


@pytest.mark.parametrize(
    ("words", "made", "command"),
    [
        ([], [[], ["0.6b"]], ["--model", "/m/smollm2", "--model", "/m/0.6b"]),
        (["--json"], [[], ["0.6b"]], ["--model", "/m/smollm2", "--model", "/m/0.6b", "--json"]),
        (["--quick", "--json"], [["tiny"]], ["--model", "/m/tiny", "--json"]),
        (["MODEL=/x", "--model", "/y"], [], ["--model", "/x", "--model", "/y"]),
    ],
)
def test_the_recovery_demo_makes_the_models_it_names(
    monkeypatch: pytest.MonkeyPatch, words: list[str], made: list[list[str]], command: list[str]
) -> None:
    asked: list[list[str]] = []
    became: list[str] = []

    def checkpoint(size: list[str]) -> str:
        asked.append(size)
        return f"/m/{size[0] if size else 'smollm2'}"

    def become(*words: str) -> int:
        became.extend(words)
        return 0

    monkeypatch.setattr(jobs, "setup", lambda **needs: None)
    monkeypatch.setattr(jobs, "_checkpoint", checkpoint)
    monkeypatch.setattr(jobs, "_become", become)
    assert jobs.run_demo_recovery(words) == 0
    assert (asked, became) == (made, ["coldsnap", "demo-recovery", *command])
