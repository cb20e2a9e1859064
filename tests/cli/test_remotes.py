"""Where the command line finds hubs, registries and credentials: environment and files, and nothing printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.cli.remotes import make_remotes
from coldsnap.errors import UsageError
from coldsnap.ship.access import DEFAULT_ENDPOINT
from coldsnap.ship.names import HubName
from coldsnap.ship.secret import Secret

NAMES = (
    "HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE",
    "XDG_RUNTIME_DIR", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_anything_the_public_hub_is_asked_without_a_token(tmp_path: Path) -> None:
    found = make_remotes()
    assert (found.hub_access.endpoint, found.hub_access.token, found.offline) == (DEFAULT_ENDPOINT, None, "")
    assert list(found.login_files) == [tmp_path / ".docker" / "config.json"]


def test_the_token_is_the_variable_else_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text("hf_file\n")
    assert make_remotes().hub_access.token == Secret("hf_file")
    (tmp_path / "other").write_text("hf_other")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "other"))
    assert make_remotes().hub_access.token == Secret("hf_other")
    monkeypatch.setenv("HF_TOKEN", " hf_variable ")
    assert make_remotes().hub_access.token == Secret("hf_variable")
    assert "hf_variable" not in repr(make_remotes())


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_offline_says_why(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert bool(make_remotes().offline) is offline
    assert make_remotes(offline=True).offline == "--offline was given"


@pytest.mark.parametrize("value", ["huggingface.co", "ftp://x", "https://me:secret@hub.example", "https://"])
def test_an_unusable_endpoint_is_refused_when_it_is_used(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", value)
    found = make_remotes()
    with pytest.raises(UsageError) as caught:
        found.hub(HubName(repository="a/b"))
    assert "secret" not in str(caught.value)


def test_login_files_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/a/auth.json")
    monkeypatch.setenv("DOCKER_CONFIG", "/b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/c")
    assert [str(path) for path in make_remotes().login_files] == [
        "/a/auth.json",
        "/b/config.json",
        "/c/containers/auth.json",
    ]


def test_proxies_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    proxy = make_remotes().proxy
    assert proxy is not None
    assert proxy("https://huggingface.co/x") == "http://proxy.example:3128"
    assert proxy("https://inside.example/x") is None
    assert proxy("http://huggingface.co/x") is None


def test_peers_that_need_a_network_are_left_out_offline(tmp_path: Path) -> None:
    (tmp_path / "capsules").mkdir()
    peers = (str(tmp_path), "memory://peer")
    assert [peer.name for peer in make_remotes(peers=peers).near()] == [str(tmp_path), "memory://peer"]
    assert [peer.name for peer in make_remotes(peers=peers, offline=True).near()] == [str(tmp_path)]


@pytest.mark.parametrize("what", ["empty", "absent", "a file", "a broken link", "a folder of something else"])
@pytest.mark.parametrize("offline", [True, False])
def test_a_peer_that_is_none_is_refused_by_name(tmp_path: Path, what: str, offline: bool) -> None:
    peer = tmp_path / "peer"
    if what == "a file":
        peer.write_text("x")
    elif what == "a broken link":
        peer.symlink_to(tmp_path / "gone")
    elif what == "a folder of something else":
        (peer / "models").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"^--peer") as caught:
        make_remotes(peers=("memory://peer", "" if what == "empty" else str(peer)), offline=offline)
    assert caught.value.cure
    assert what == "empty" or str(peer) in caught.value.message


@pytest.mark.parametrize("folder", ["model-payloads", "capsules", "blobs", "manifests"])
def test_a_folder_that_may_hold_something_is_a_peer_through_a_link_too(tmp_path: Path, folder: str) -> None:
    (tmp_path / "peer" / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "peer")
    for name in ("peer", "link"):
        assert len(make_remotes(peers=(str(tmp_path / name),)).near()) == 1
