"""Secrets: every planted one is found, named and never shown; library text gives none.

No secret stands in this file: all are made when the tests run, from a seed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
import os
import random
import select
import string
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.capsule import secretrules, secrets
from coldsnap.capsule.secretrules import environment_secrets, fingerprint, looks_random, pem_key
from coldsnap.capsule.secrets import find_secrets, scan_secrets
from coldsnap.capsule.secretscan import Range, scan_bytes, scan_range
from coldsnap.core.bindings import Severity
from coldsnap.errors import HostError, OperationInterrupted

LETTERS = string.ascii_letters
BASE62 = string.ascii_letters + string.digits


def made(alphabet: str, length: int, seed: int = 1) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


def pem(seed: int = 1, *, head: str = "PRIVATE KEY", body_bytes: int = 300, line_break: str = "\n") -> str:
    # PKCS#8 and its kin are DER: a SEQUENCE (0x30) with a two-byte length.
    der = b"\x30\x82" + body_bytes.to_bytes(2, "big") + random.Random(seed).randbytes(body_bytes)
    lines = textwrap.wrap(base64.b64encode(der).decode(), 64)
    return line_break.join([f"-----BEGIN {head}-----", *lines, f"-----END {head}-----", ""])


TOKENS = {
    "huggingface-token": "hf_" + made(LETTERS, 34),
    "github-token": "ghp_" + made(BASE62, 36),
    "gitlab-token": "glpat-" + made(BASE62, 20),
    "openai-key": "sk-" + made(BASE62, 48),
    "aws-key-id": "AKIA" + made("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16, 3),
    "slack-token": "xoxb-" + made(string.digits, 12) + "-" + made(BASE62, 24),
    "google-key": "AIza" + made(BASE62 + "_-", 35),
    "npm-token": "npm_" + made(BASE62, 36),
    "pypi-token": "pypi-AgEI" + made(BASE62, 150),
    "nvidia-key": "nvapi-" + made(BASE62 + "_-", 64),
    "groq-key": "gsk_" + made(BASE62, 52),
    "replicate-token": "r8_" + made(BASE62, 37),
    "stripe-key": "sk" + "_live_" + made(BASE62, 24),
    "json-web-token": ".".join(
        [
            base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("="),
            base64.urlsafe_b64encode(b'{"sub":"1234567890"}').decode().rstrip("="),
            made(BASE62 + "_-", 43),
        ]
    ),
}


def hits(data: bytes) -> list[tuple[str, int, bytes]]:
    return list(scan_bytes(data, 0, len(data)))


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize(
    "around", [b"\0%s\0", b'{"key": "%s"}', b"export X=%s\n", b"text\\n%s\\n", b"\xff%s\xfe", b"%s"]
)
def test_a_token_of_each_kind_is_found_where_it_is(kind: str, around: bytes) -> None:
    token = TOKENS[kind].encode()
    data = around % token
    assert hits(data) == [(kind, data.index(token), token)]


@pytest.mark.parametrize("kind", TOKENS)
def test_the_shape_without_the_body_is_no_secret(kind: str) -> None:
    token = TOKENS[kind]
    for body in ("x" * 80, "_".join(["some", "words", "about", "keys"] * 4), "A" * 40, "0123456789" * 5):
        prefix = token[: 4 if kind != "json-web-token" else 3]
        assert hits(f" {prefix}{body} ".encode()) == []


@pytest.mark.parametrize(
    "text",
    [
        "hf_hub_download_and_cache_the_files_of_a_repository",
        "sk-toggleable__content sk-estimator-doc-link-and-more-words-in-a-class",
        "AKIAIOSFODNN7EXAMPLE",
        "https://example.org/very-long-path_with-many_words/and_more-words",
        r"(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{36} hf_[a-zA-Z]{34} xox[baprs]-([0-9a-zA-Z]{10,48})",
        "-----BEGIN RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        'KEY_BEGIN = b"-----BEGIN RSA PRIVATE KEY-----"\nKEY_END = b"-----END RSA PRIVATE KEY-----"',
        "-----BEGIN PRIVATE KEY-----\n" + "A" * 64 + "\n-----END PRIVATE KEY-----",
        "-----BEGIN PUBLIC KEY-----\n" + pem(head="X").split("\n", 1)[1],
        "authorization: Bearer your_token_goes_right_here_please",
        "MAX_BATCHED_TOKENS=16384 TOKENIZERS_PARALLELISM=false",
        "aws_secret_access_key=<your secret access key, forty characters>",
        "_ZN5torch8autograd9generated12MulBackward0C1Ev",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ],
)
def test_library_text_is_no_secret(text: str) -> None:
    assert hits(text.encode()) == []
    assert hits(b"\0" + text.encode() + b"\0") == []


def test_a_token_that_a_library_publishes_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with the letters that follow it in a file of bytecode; another token is one, of whatever length."""
    token, other = TOKENS["huggingface-token"].encode(), ("hf_" + made(LETTERS, 34, 2)).encode()
    known = (len(token), hashlib.sha256(token).hexdigest()[:12])
    monkeypatch.setattr(secretrules, "_PUBLISHED", frozenset({known}))
    for data in (token, token + b"z1ab", b"\0" + token + b"\0"):
        assert hits(data) == []
    for data in (other, other + b"z1ab", token[:-1] + b"9"):
        assert hits(data) == [("huggingface-token", 0, data)]


def test_real_libraries_give_no_secret() -> None:
    roots = [Path(json.__file__).parent, Path(subprocess.__file__).parent / "asyncio"]
    for name in ("huggingface_hub", "safetensors", "pydantic", "rich"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        roots.append(Path(spec.origin).parent)
    files = {str(path): path for root in roots for path in root.rglob("*") if path.is_file()}
    assert len(files) > 200
    found = [hit for path in files.values() for hit in scan_range(Range(path=path, start=0, end=path.stat().st_size))]
    assert found == []


@pytest.mark.parametrize("head", ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "ENCRYPTED PRIVATE KEY"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\\n"])
def test_a_pem_key_is_found_by_what_follows_its_header(head: str, line_break: str) -> None:
    text = pem(head=head, line_break=line_break).encode()
    data = b"\0" * 100 + text + b"\0" * 100
    assert [(kind, offset) for kind, offset, _ in hits(data)] == [("private-key", 100)]


def test_openssh_and_old_encrypted_keys_are_found() -> None:
    openssh = base64.b64encode(b"openssh-key-v1\0" + random.Random(1).randbytes(200)).decode()
    old = base64.b64encode(random.Random(2).randbytes(300)).decode()
    header = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0123456789ABCDEF0123456789ABCDEF\n\n"
    for text in (
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{openssh}\n-----END OPENSSH PRIVATE KEY-----\n",
        f"-----BEGIN RSA PRIVATE KEY-----\n{header}{old}\n-----END RSA PRIVATE KEY-----\n",
    ):
        assert [kind for kind, _, _ in hits(text.encode())] == ["private-key"]


def test_headers_and_assignments_name_what_has_no_shape() -> None:
    value = made(BASE62, 40)
    secret = made(BASE62 + "/+", 40, 5)
    assert hits(f"Authorization: Bearer {value}\r\n".encode()) == [("authorization-header", 22, value.encode())]
    assert hits(f"'authorization': 'Basic {value}'".encode()) == [("authorization-header", 24, value.encode())]
    assert hits(f"\0SERVICE_API_KEY={value}\0".encode()) == [("SERVICE_API_KEY", 17, value.encode())]
    assert hits(f"\0SERVICE_ENDPOINT={value}\0".encode()) == []
    text = f"[default]\naws_secret_access_key = {secret}\n".encode()
    assert hits(text) == [("aws-secret-key", text.index(secret.encode()), secret.encode())]


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from(sorted(TOKENS)))
@settings(max_examples=100, deadline=None)
def test_a_token_is_found_in_any_surroundings(before: bytes, after: bytes, kind: str) -> None:
    token = TOKENS[kind].encode()
    data = before + b"\0" + token + b"\0" + after
    assert (kind, len(before) + 1, token) in hits(data)


@given(st.binary(max_size=2000))
@settings(max_examples=100, deadline=None)
def test_random_bytes_give_nothing_and_break_nothing(data: bytes) -> None:
    assert hits(data) == []
    pem_key(b"-----BEGIN PRIVATE KEY-----" + data, 11)


def test_ranges_and_pieces_neither_miss_nor_repeat(tmp_path: Path) -> None:
    # Tokens across and beside every boundary: of the file, of megabyte pieces, of two ranges.
    size = 3 * 1024 * 1024 + 77
    token = TOKENS["huggingface-token"].encode()
    key = pem().encode()
    data = bytearray(size)
    spots = [0, 1024 * 1024 - 20, 1024 * 1024 + 40, 2 * 1024 * 1024 - 1, size - len(token)]
    for spot in spots:
        data[spot : spot + len(token)] = token
    key_spot = 1536 * 1024 - 10
    data[key_spot : key_spot + len(key)] = key
    path = tmp_path / "pages.img"
    path.write_bytes(data)
    cut = 1536 * 1024
    for cuts in ([0, size], [0, cut, size], [0, 10, 1024 * 1024 - 5, 2 * 1024 * 1024, size]):
        found = [
            hit for start, end in itertools.pairwise(cuts) for hit in scan_range(Range(path=path, start=start, end=end))
        ]
        assert sorted((hit.offset, hit.kind) for hit in found) == sorted(
            [*((spot, "huggingface-token") for spot in spots), (key_spot, "private-key")]
        )


def test_one_process_and_several_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_RANGE_BYTES", 64 * 1024)
    rng = random.Random(4)
    images = {}
    for number in range(3):
        data = bytearray(rng.randbytes(200_000))
        data[64 * 1024 - 6 : 64 * 1024 + 33] = f"\0{TOKENS['huggingface-token']}\0".encode()
        data[150_000:150_042] = f"\0{TOKENS['npm-token']}\0".encode()
        data[190_000:190_014] = b"correct horse!"
        path = tmp_path / f"pages-{number}.img"
        path.write_bytes(data)
        images[path.name] = path
    alone = find_secrets(images, [], extra_literals={"PASSPHRASE": "correct horse!"}, num_threads=1)
    together = find_secrets(images, [], extra_literals={"PASSPHRASE": "correct horse!"}, num_threads=2)
    assert alone == together
    assert {secret.id.rsplit("-", 1)[0] if "-" in secret.id else secret.id: secret.num_places for secret in alone} == {
        "PASSPHRASE": 3,
        "huggingface-token": 3,
        "npm-token": 3,
    }
    places = next(secret.places for secret in alone if secret.id == "PASSPHRASE")
    assert places == tuple(f"pages-{number}.img at byte 190000" for number in range(3))


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostError, match=r"missing\.img"):
        find_secrets({"missing.img": tmp_path / "missing.img"}, [])
    monkeypatch.setattr(secrets, "_RANGE_BYTES", 1024)
    (tmp_path / "gone.img").write_bytes(bytes(4096))
    monkeypatch.setattr(secrets, "_ranges", lambda path: [Range(path=tmp_path / "no", start=0, end=4096)])
    with pytest.raises(HostError, match="No such file"):
        find_secrets({"gone.img": tmp_path / "gone.img"}, [], num_threads=2)


def test_cancelling_stops_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.img").write_bytes(bytes(100_000))
    stop = threading.Event()
    stop.set()
    with pytest.raises(OperationInterrupted):
        find_secrets({"a.img": tmp_path / "a.img"}, [], cancel=stop, num_threads=1)
    monkeypatch.setattr(secrets, "_RANGE_BYTES", 1024)
    monkeypatch.setattr(secrets, "_POLL_S", 0)
    with pytest.raises(OperationInterrupted):
        find_secrets({"a.img": tmp_path / "a.img"}, [], cancel=stop, num_threads=2)


LONG_SCAN = """
import sys
from pathlib import Path
from coldsnap.capsule.secrets import find_secrets
find_secrets({"a.img": Path(sys.argv[1])}, [], num_threads=2)
"""


def test_the_processes_that_look_end_with_the_one_that_asked(tmp_path: Path) -> None:
    """Also when it is killed. They would look for minutes: the file is large, and nothing in it costs room."""
    with (tmp_path / "a.img").open("wb") as file:
        file.truncate(64 << 30)
    asking = subprocess.Popen([sys.executable, "-c", LONG_SCAN, str(tmp_path / "a.img")])
    try:
        while len(looking := children_of(asking.pid)) < 2:
            assert asking.poll() is None
            time.sleep(0.01)
        watched = [os.pidfd_open(pid) for pid in looking]
    finally:
        asking.kill()
        asking.wait()
    for fd in watched:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(60_000)
        os.close(fd)


def test_one_that_looks_for_nobody_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-m", "coldsnap.capsule.secretscan", "1"], stdin=subprocess.PIPE, timeout=60)
    assert done.returncode == 0


def children_of(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("HF_TOKEN", TOKENS["huggingface-token"], True),
        ("HF_TOKEN", "short1", True),
        ("AWS_SECRET_ACCESS_KEY", made(BASE62, 40), True),
        ("AWS_ACCESS_KEY_ID", TOKENS["aws-key-id"], True),
        ("DB_PASSWORD", "hunter", True),
        ("MYAPIKEY", "abcdefgh", True),
        ("UNRELATED", f"user={TOKENS['github-token']}", True),
        ("DATABASE_URL", "postgres://me:hunter2@db/x", True),
        ("CERT", pem(), True),
        ("HF_TOKEN", "", False),
        ("USE_AUTH_TOKEN", "false", False),
        ("TOKENIZERS_PARALLELISM", "yes please", False),
        ("MAX_TOKENS", "4096", False),
        ("HF_TOKEN_PATH", "/root/.cache/huggingface/token", False),
        ("SSL_KEY_FILE", "server.pem", False),
        ("KEY", "/etc/ssl/key.pem", False),
        ("GPG_KEY", made("ABCDEF0123456789", 40), False),
        ("KEYBOARD", "de_DE-latin1", False),
        ("MONKEY", "capuchin", False),
        ("PATH", "/usr/bin:/bin", False),
        ("HTTP_PROXY", "http://proxy:3128", False),
        ("GIT_COMMIT", made("abcdef0123456789", 40), False),
        ("LS_COLORS", "rs=0:di=01;34:ln=01;36", False),
    ],
)
def test_which_variables_hold_secrets(name: str, value: str, is_secret: bool) -> None:
    assert environment_secrets({name: value}) == ({name: value} if is_secret else {})


def test_a_report_stops_until_allowed_and_never_shows_a_secret(tmp_path: Path) -> None:
    token, key, password = TOKENS["huggingface-token"], pem(), "hunter2hunter2"
    (tmp_path / "pages-1.img").write_bytes(b"\0HF_TOKEN=" + token.encode() + b"\0\0" + key.encode() + b"\0")
    environments = [{"HF_TOKEN": token, "DB_PASSWORD": password, "HOME": "/root"}]
    report = scan_secrets(tmp_path, environments)
    ids = [finding.subject for finding in report.findings]
    key_id = next(name for name in ids if name.startswith("private-key-"))
    assert sorted(ids) == sorted(["HF_TOKEN", "DB_PASSWORD", key_id])
    assert [finding.severity for finding in report.findings] == [Severity.STOP] * 3
    assert {problem.field for problem in report.stop_problems()} == set(ids)
    assert all(problem.cure and problem.field in problem.cure for problem in report.stop_problems())
    assert (report.allowed_secrets, report.publishable) == ((), True)

    allowed = scan_secrets(tmp_path, environments, allow=["HF_TOKEN", key_id, "NOT_THERE"])
    assert [problem.field for problem in allowed.stop_problems()] == ["DB_PASSWORD"]
    assert (set(allowed.allowed_secrets), allowed.publishable) == ({"HF_TOKEN", key_id}, False)

    for text in (repr(report), repr(allowed), report.binding("u0").model_dump_json()):
        body = key.splitlines()[1]
        assert token not in text
        assert token[3:15] not in text
        assert body[:20] not in text
        assert password not in text
    place = next(finding.message for finding in report.findings if finding.subject == "HF_TOKEN")
    assert "pages-1.img at byte 10" in place
    assert "the environment of a process" in place
    # No fingerprint is made of what could be guessed from it.
    assert not any(fingerprint(password.encode()) in finding.message for finding in report.findings)


def test_equal_secrets_are_one_finding_and_different_ones_are_two(tmp_path: Path) -> None:
    one, other = TOKENS["npm-token"], "npm_" + made(BASE62, 36, 99)
    (tmp_path / "a.img").write_text(f" {one} {other} {one} ")
    found = find_secrets({"a.img": tmp_path / "a.img"}, [])
    assert {secret.id: secret.num_places for secret in found} == {
        f"npm-token-{fingerprint(one.encode())}": 2,
        f"npm-token-{fingerprint(other.encode())}": 1,
    }
    assert all(secret.length == 40 for secret in found)


def test_a_value_keeps_its_variables_name_inside_a_header(tmp_path: Path) -> None:
    token = TOKENS["openai-key"]
    (tmp_path / "a.img").write_text(f"Authorization: Bearer {token}\r\n")
    found = find_secrets({"a.img": tmp_path / "a.img"}, [{"OPENAI_API_KEY": token}])
    assert [(secret.id, secret.num_places) for secret in found] == [("OPENAI_API_KEY", 2)]


HOLD_SECRETS = """
import base64, random, string, sys
rng = random.Random(int(sys.argv[1]))
token = "hf_" + "".join(rng.choices(string.ascii_letters, k=34))
der = b"\\x30\\x82" + (300).to_bytes(2, "big") + random.Random(int(sys.argv[1])).randbytes(300)
key = "-----BEGIN PRIVATE KEY-----\\n" + base64.encodebytes(der).decode() + "-----END PRIVATE KEY-----\\n"
print(token, flush=True)
sys.stdin.read()
"""


def memory_of(pid: int) -> bytes:
    """The writable private memory of a child: what a dump would hold of it."""
    parts = []
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            words = line.split()
            if words[1] == "rw-p":
                start, end = (int(word, 16) for word in words[0].split("-"))
                memory.seek(start)
                parts.append(memory.read(end - start))
    return b"".join(parts)


def test_secrets_in_the_memory_of_a_real_process_are_found_and_nothing_else(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLD_SECRETS, "7"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        token = child.stdout.readline().strip()
        (tmp_path / "pages-1.img").write_bytes(memory_of(child.pid))
        child.kill()
    found = find_secrets({"pages-1.img": tmp_path / "pages-1.img"}, [])
    assert [secret.kind for secret in found] == ["huggingface-token", "private-key"]
    assert found[0].id == f"huggingface-token-{fingerprint(token.encode())}"


def test_what_looks_random() -> None:
    assert looks_random(made(BASE62, 40).encode())
    assert not looks_random(b"")
    assert not looks_random(b"a" * 40)
    assert not looks_random(b"the_quick_brown_fox_jumps_over_the_lazy_dog")
