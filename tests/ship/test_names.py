"""Addresses, credentials and what is struck out of texts: pure decisions."""

from __future__ import annotations

import base64
import email.utils
import json
import pickle
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.errors import HostError, MissingCapability, OperationInterrupted, RemoteError, UsageError
from coldsnap.ship.access import HubAccess
from coldsnap.ship.base import Item, Kind
from coldsnap.ship.directory import item_of, relative_path
from coldsnap.ship.faults import REASONS, TRANSIENT, remote_error
from coldsnap.ship.limits import Limits, asked_to_wait_s, retried
from coldsnap.ship.logins import find_login
from coldsnap.ship.names import HubName, RegistryName, parse_hub, parse_reference, parse_registry
from coldsnap.ship.secret import Secret, public_url, scrub

HEX = "ab" * 32
DIGEST = Digest.from_hex(HEX)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf://org/repo", HubName(repository="org/repo")),
        ("hf://org/repo@v2", HubName(repository="org/repo", branch="v2")),
        ("hf://o-g/r.e_p-o@feature/x", HubName(repository="o-g/r.e_p-o", branch="feature/x")),
    ],
)
def test_hub_names(text: str, name: HubName) -> None:
    assert parse_hub(text) == name
    assert str(parse_hub(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "org/repo", "hf://repo", "hf://org/repo/sub", "hf://org/../repo", "hf://org/repo@", "hf://org/repo@a b",
        f"hf://org/repo@{'0' * 40}", "hf://org/repo@../main", "https://huggingface.co/org/repo", "hf://-org/repo",
        "hf://org/re--po", "hf://org/repo.git", "hf://org/repo.", "hf://org-/repo", f"hf://org/{'x' * 97}",
        "hf://org/repo@x/", "hf://org/repo@x//y", "hf://org/repo@x.lock", "hf://org/repo@x.", "hf://org/repo@x/.y",
    ],
)  # fmt: skip
def test_what_is_no_hub_name(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hub(text)
    assert caught.value.cure


@pytest.mark.parametrize(
    ("text", "url", "reference"),
    [
        ("oci://ghcr.io/org/x", "https://ghcr.io", f"ghcr.io/org/x@sha256:{HEX}"),
        ("oci://127.0.0.1:5000/x", "http://127.0.0.1:5000", f"127.0.0.1:5000/x@sha256:{HEX}"),
        ("oci://localhost:5000/x", "http://localhost:5000", f"localhost:5000/x@sha256:{HEX}"),
        ("oci://[::1]:5000/x", "http://[::1]:5000", f"[::1]:5000/x@sha256:{HEX}"),
        ("oci://10.0.0.7:5000/x", "https://10.0.0.7:5000", f"10.0.0.7:5000/x@sha256:{HEX}"),
        ("oci+http://10.0.0.7:5000/x", "http://10.0.0.7:5000", f"oci+http://10.0.0.7:5000/x@sha256:{HEX}"),
        ("oci://docker.io/me/x", "https://registry-1.docker.io", f"docker.io/me/x@sha256:{HEX}"),
    ],
)
def test_registry_names(text: str, url: str, reference: str) -> None:
    name = parse_registry(text)
    assert (name.url, name.reference(DIGEST), str(name)) == (url, reference, text)
    parsed = parse_reference(reference)
    assert parsed is not None
    assert (parsed.repository, parsed.digest) == (name, DIGEST)


@pytest.mark.parametrize(
    "text",
    ["ghcr.io/x", "oci://ghcr.io", "oci://ghcr.io/", "oci://ghcr.io/X", "oci://ghcr.io/x:tag", "oci:///x",
     f"oci://ghcr.io/x@sha256:{HEX}", "oci://ghcr.io/../x", "oci://me:secret@ghcr.io/x", "oci://ghcr.io/x?y",
     "oci://ghcr.io:65536/x", "oci://ghcr.io:0/x", "oci://ghcr..io/x", f"oci://{'x' * 64}.io/x", "oci://[1:2]/x",
     "oci://[::::]:5000/x"],
)  # fmt: skip
def test_what_is_no_registry_name(text: str) -> None:
    with pytest.raises(UsageError):
        parse_registry(text)


@pytest.mark.parametrize("login", ["me:planted@", "planted@", "me:pl/planted@", ":planted@", "me:p@planted@"])
def test_a_login_in_an_address_is_refused_and_not_said(login: str) -> None:
    for parse, text in ((parse_registry, f"oci://{login}ghcr.io/x/y"), (parse_hub, f"hf://{login}org/repo")):
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert "planted" not in f"{caught.value} {caught.value.facts}"
        assert "docker login" in (caught.value.cure or "")


@pytest.mark.parametrize("token", ["pla nted", "pla\nnted", "plant\u00e9d"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_said(token: str) -> None:
    with pytest.raises(UsageError) as caught:
        HubAccess(token=Secret(token)).check()
    assert "pla" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    ["http://x:99999", "http://[", "ftp://x", "http://", "https://me:planted@x", "http://h\u00fcb.example", "http://a..b",
     f"http://{'x' * 64}.example"],
)  # fmt: skip
def test_what_is_no_address_of_a_hub(endpoint: str) -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT") as caught:
        HubAccess(endpoint=endpoint).check()
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"main@sha256:{HEX}",
        f"ghcr.io:65536/x@sha256:{HEX}",
        f"u0@sha256:{HEX}",
        f"org/x@sha256:{HEX}",
        "ghcr.io/x",
        "ghcr.io/x@sha256:12",
        f"ghcr.io/x:t@sha256:{HEX}",
        f"ghcr..io/x@sha256:{HEX}",
        f"[1:2]/x@sha256:{HEX}",
    ],
)
def test_a_reference_that_names_no_registry(text: str) -> None:
    assert parse_reference(text) is None


@given(st.sampled_from(sorted(Kind)), st.binary(max_size=8))
def test_a_path_follows_from_the_item_and_back(kind: Kind, data: bytes) -> None:
    item = Item(kind, Digest.of(data))
    assert item_of(relative_path(item)) == item


@given(st.text(max_size=80))
def test_no_other_path_is_an_items(text: str) -> None:
    item = item_of(text)
    assert item is None or relative_path(item) == text


def test_every_reason_has_a_cure_and_transient_ones_are_reasons() -> None:
    assert all(REASONS.values())
    assert set(REASONS) >= TRANSIENT


@given(st.text(min_size=1, max_size=20), st.text(max_size=40), st.text(max_size=40))
def test_scrubbed_text_never_holds_the_secret(secret: str, before: str, after: str) -> None:
    text = scrub(f"{before}{secret}{after}", [Secret(secret)])
    if "*" not in secret and secret == " ".join(secret.split()) and secret.isprintable():
        assert secret not in text.replace("***", "").replace("...", "") or secret in before + after
    assert len(text) <= 303
    assert text.isprintable()


def test_queries_and_users_are_struck_out() -> None:
    url = "https://me:pw@cdn.example.org/x/y?X-Amz-Signature=abc&z=1#f"
    assert public_url(url) == "https://cdn.example.org/x/y"
    assert scrub(f"cannot get {url} now") == "cannot get https://cdn.example.org/x/y now"


def test_a_secret_cannot_be_printed_or_pickled() -> None:
    secret = Secret("planted")
    assert "planted" not in f"{secret} {secret!r} {[secret]} {secret:>5}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)


class TestLogins:
    """Docker's and podman's credential files."""

    def write(self, folder: Path, document: object) -> Path:
        path = folder / "config.json"
        path.write_text(json.dumps(document))
        return path

    def test_forms_of_an_entry(self, tmp_path: Path) -> None:
        auth = base64.b64encode(b"me:pass:word").decode()
        entries = {
            "a.example": {"auth": auth},
            "https://b.example": {"username": "me", "password": "pw"},
            "c.example": {"identitytoken": "tok"},
            "https://index.docker.io/v1/": {"auth": auth},
            "d.example": {},
        }
        path = self.write(tmp_path, {"auths": entries})
        hosts = ("a.example", "b.example", "c.example", "docker.io", "d.example", "e.example")
        found = {host: find_login(host, [tmp_path / "none", path]) for host in hosts}
        assert found["a.example"] is not None
        assert (found["a.example"].user, found["a.example"].password.reveal()) == ("me", "pass:word")
        assert found["a.example"].basic().reveal() == f"Basic {auth}"
        assert found["b.example"] is not None
        assert found["c.example"] is not None
        assert found["c.example"].identity_token == Secret("tok")
        assert found["docker.io"] is not None
        assert found["d.example"] is None
        assert found["e.example"] is None

    def test_a_helper_is_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "docker-credential-test"
        program.write_text('#!/bin/sh\nread name\necho "{\\"Username\\": \\"me\\", \\"Secret\\": \\"for $name\\"}"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        for document in ({"credHelpers": {"a.example": "test"}}, {"credsStore": "test"}):
            found = find_login("a.example", [self.write(tmp_path, document)])
            assert found is not None
            assert found.password.reveal() == "for a.example"
        assert find_login("a.example", [self.write(tmp_path, {"credsStore": "../evil"})]) is None

    def test_a_helper_that_is_not_here_is_named(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, {"credHelpers": {"a.example": "absent"}})
        with pytest.raises(MissingCapability, match=r"docker-credential-absent has the login for a\.example"):
            find_login("a.example", [path])
        assert find_login("b.example", [path]) is None

    def test_an_empty_name_switches_the_store_off_for_a_host(self, tmp_path: Path) -> None:
        auth = base64.b64encode(b"me:pass").decode()
        document = {"credsStore": "absent", "credHelpers": {"a.example": ""}, "auths": {"a.example": {"auth": auth}}}
        found = find_login("a.example", [self.write(tmp_path, document)])
        assert found is not None
        assert found.password.reveal() == "pass"

    @pytest.mark.parametrize("text", ["[]", "{", '{"auths": {"a.example": {"auth": "!"}}}', '{"auths": [1]}'])
    def test_a_damaged_file_is_named_without_its_text(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(HostError) as caught:
            find_login("a.example", [path])
        assert str(path) in str(caught.value)


class TestRetried:
    """The one loop that tries again."""

    LIMITS = Limits(attempts=3, first_pause_s=0.0, longest_pause_s=0.0, retry_after_s=5)

    def failing(self, reason: str, times: int, **facts: float) -> tuple[list[int], object]:
        calls = [0]

        def work() -> str:
            calls[0] += 1
            if calls[0] <= times:
                raise remote_error(reason, "no", place="x", cure=None, **facts)
            return "done"

        return calls, work

    @pytest.mark.parametrize("reason", sorted(REASONS))
    def test_only_transient_reasons_are_tried_again(self, reason: str) -> None:
        calls, work = self.failing(reason, 2)
        if reason in TRANSIENT:
            assert retried(self.LIMITS, work) == "done"  # type: ignore[arg-type]
            assert calls == [3]
            return
        with pytest.raises(RemoteError):
            retried(self.LIMITS, work)  # type: ignore[arg-type]
        assert calls == [1]

    def test_attempts_are_bounded_and_told(self) -> None:
        calls, work = self.failing("broken", 99)
        with pytest.raises(RemoteError) as caught:
            retried(self.LIMITS, work)  # type: ignore[arg-type]
        assert (calls, caught.value.facts["attempts"]) == ([3], 3)

    def test_a_long_retry_after_is_not_waited_for(self) -> None:
        calls, work = self.failing("rate_limited", 99, retry_after_s=6.0)
        with pytest.raises(RemoteError):
            retried(self.LIMITS, work)  # type: ignore[arg-type]
        assert calls == [1]

    def test_a_cancelled_wait_ends(self) -> None:
        import threading

        cancel = threading.Event()
        cancel.set()
        with pytest.raises(OperationInterrupted):
            retried(self.LIMITS, lambda: None, cancel=cancel)


@pytest.mark.parametrize(
    "names",
    [
        ["oci://ghcr.io/x", "oci+http://ghcr.io/x", "oci://GHCR.io:443/x", "oci+http://ghcr.io:80/x"],
        ["oci://127.0.0.1:5000/x", "oci+http://127.0.0.1:5000/x", "oci://localhost:5000/x", "oci://[::1]:5000/x"],
        ["oci://docker.io/me/x", "oci://index.docker.io/me/x", "oci://registry-1.docker.io/me/x"],
    ],
)
def test_names_of_one_place(names: list[str]) -> None:
    assert len({parse_registry(name).place for name in names}) == 1


def test_names_of_other_places() -> None:
    names = ["ghcr.io/x", "ghcr.io/y", "ghcr.io:5000/x", "ghcr.io:5001/x", "localhost:5000/x", "localhost:5001/x"]
    assert len({parse_registry(f"oci://{name}").place for name in names}) == len(names)
    assert parse_hub("hf://Org/Repo").place == parse_hub("hf://org/repo@b").place != parse_hub("hf://org/other").place


def test_a_registry_name_knows_its_scheme() -> None:
    assert RegistryName(host="LOCALHOST.example", path="x").url == "https://LOCALHOST.example"


def test_what_a_retry_after_asks_for_is_a_number_within_bounds() -> None:
    soon = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 60 < (asked_to_wait_s(soon) or 0.0) <= 90
    assert asked_to_wait_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert asked_to_wait_s(" 7 ") == 7.0
    assert asked_to_wait_s("9" * 400) == asked_to_wait_s("Fri, 31 Dec 9999 23:59:59 GMT") == 1e9
    nonsense = ["", "-1", "1.5", "inf", "nan", "\u0663", "soon", "Fri, 31 Dec 99999 23:59:59 GMT", "x, 1 Jan", "\0"]
    assert [asked_to_wait_s(one) for one in nonsense] == [None] * len(nonsense)
