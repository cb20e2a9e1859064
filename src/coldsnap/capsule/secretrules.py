"""What a secret looks like: names of environment variables, and the shapes of keys and tokens. Pure.

Two mistakes matter. A missed secret leaks; a false alarm stops a capture, and people then allow everything. So a
shape needs a known prefix or place *and* a body that no word, example or pattern has: libraries are full of
`hf_hub_download`, `sk-toggleable__content`, `AKIAIOSFODNN7EXAMPLE`, and of regular expressions and PEM headers
that look for secrets. A PEM header counts only when real key material follows it.

What is not found, and cannot be without false alarms: values that have no shape (a short password in the heap),
text in UTF-16 or UCS-2, keys in binary form, anything compressed or encrypted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "MIN_RUN",
    "PEM_MARK",
    "Shape",
    "aws_secret_after",
    "environment_secrets",
    "fingerprint",
    "looks_random",
    "pem_key",
    "token_at",
]

MIN_RUN = 20
"""No token that is looked for has a shorter unbroken run of letters, digits, '-' and '_'."""

PEM_MARK = b"PRIVATE KEY"
_PEM_REACH = 48 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A kind of token: ``pattern`` matches the whole of it, group ``body`` is what must look random."""

    kind: str
    pattern: re.Pattern[bytes]
    needs_mix: bool = True


def _shape(kind: str, pattern: bytes, *, needs_mix: bool = True) -> Shape:
    return Shape(kind=kind, pattern=re.compile(pattern), needs_mix=needs_mix)


_SHAPES = (
    _shape("huggingface-token", rb"(?:hf|api_org)_(?P<body>[A-Za-z0-9]{30,60})"),
    _shape("github-token", rb"gh[pousr]_(?P<body>[A-Za-z0-9]{36,255})"),
    _shape("github-token", rb"github_pat_(?P<body>[A-Za-z0-9]{22}_[A-Za-z0-9]{59})"),
    _shape("gitlab-token", rb"gl(?:pat|dt|rt|ptt|cbt)-(?P<body>[A-Za-z0-9_-]{20,64})(?![A-Za-z0-9_-])"),
    _shape("openai-key", rb"sk-(?:proj-|svcacct-|admin-|ant-[a-z0-9]{3,8}-|or-v1-)?(?P<body>[A-Za-z0-9_-]{32,256})"),
    _shape("aws-key-id", rb"(?:AKIA|ASIA)(?P<body>[A-Z2-7]{16})(?![A-Za-z0-9_-])", needs_mix=False),
    _shape("slack-token", rb"xox[abeoprs]-(?P<body>[0-9]{8,14}-[A-Za-z0-9-]{16,255})", needs_mix=False),
    _shape("google-key", rb"AIza(?P<body>[A-Za-z0-9_-]{35})"),
    _shape("npm-token", rb"npm_(?P<body>[A-Za-z0-9]{36})"),
    _shape("pypi-token", rb"pypi-AgEI(?P<body>[A-Za-z0-9_-]{50,1000})"),
    _shape("nvidia-key", rb"nvapi-(?P<body>[A-Za-z0-9_-]{40,128})"),
    _shape("groq-key", rb"gsk_(?P<body>[A-Za-z0-9]{40,80})"),
    _shape("replicate-token", rb"r8_(?P<body>[A-Za-z0-9]{37})"),
    _shape("stripe-key", rb"(?:sk|rk)_live_(?P<body>[A-Za-z0-9]{24,128})"),
    _shape(
        "json-web-token", rb"eyJ[A-Za-z0-9_-]{10,4096}\.eyJ[A-Za-z0-9_-]{10,8192}\.(?P<body>[A-Za-z0-9_-]{20,2048})"
    ),
)
# The first three bytes of every shape: one look at a run decides whether it is worth matching.
_BEGINNINGS = frozenset(
    b"hf_ api ghp gho ghu ghs ghr git glp gld glr glc sk- AKI ASI xox AIz npm pyp nva gsk r8_ sk_ rk_ eyJ".split()
)
_AUTHORIZATION = re.compile(rb"[Aa]uthorization[\"']?\s{0,2}[:=,]\s{0,2}[\"']?(?:[Bb]earer|[Bb]asic|[Tt]oken) ?\Z")
_ASSIGNMENT = re.compile(rb"(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]{2,60})=\Z")
_AWS_SECRET = re.compile(
    rb"(?i:aws_secret_access_key)[\"']?\s{0,3}[:=]\s{0,3}[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"
)

_PEM = re.compile(rb"-----BEGIN (?:[A-Z0-9]{2,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(
    rb"(?:\s|\\r|\\n)*((?:[A-Za-z-]+: [^\n\\]{1,200}(?:\r?\n|\\n))*)((?:[A-Za-z0-9+/=]|\r?\n|\\r|\\n)+)"
)
_PEM_LAYOUT = re.compile(rb"\\r|\\n|\s")
_MIN_PEM_CHARACTERS = 60

# Printed in the sources of libraries for their tests, so known to everybody: by length and fingerprint.
_PUBLISHED = frozenset({(37, "5de261506c0f")})  # the user of transformers.testing_utils

_SECRET_WORDS = frozenset(
    {"TOKEN", "TOKENS", "KEY", "KEYS", "APIKEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PAT"}
    | {"CREDENTIAL", "CREDENTIALS", "AUTHORIZATION"}
)
_ALWAYS_WORDS = frozenset({"SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE"})
_HARMLESS_NAMES = frozenset({"GPG_KEY", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK"})  # a public key's name; no secrets
_HARMLESS_WORDS = frozenset(
    {"PATH", "FILE", "DIR", "NAME", "ID", "COUNT", "MAX", "MIN", "LENGTH", "LEN", "LIMIT", "SIZE", "NUM", "BATCHED"}
)
_HARMLESS_VALUE = re.compile(
    r"\s*(?:|true|false|yes|no|on|off|none|null|auto|default|unset|-?\d{1,7}(?:\.\d+)?)\s*", re.IGNORECASE
)
_PATH_VALUE = re.compile(r"~?(?:/[\w.@%+-]+)+/?|[A-Za-z]+://[^\s@]*")
_URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@")
_AWS_KEY_ID_NAME = "AWS_ACCESS_KEY_ID"


def token_at(data: bytes, start: int, end: int) -> tuple[str, bytes] | None:
    """The secret in or right after the run ``data[start:end]``, by its shape or by what stands before it.

    Returns (kind, value); for an assignment the kind is the variable's name.
    """
    before = data[start - 1 : start]
    first = start + 1 if before == b"\\" else start  # in escaped text the n of a line break joins the run
    if data[first : first + 3] in _BEGINNINGS:
        for shape in _SHAPES:
            match = shape.pattern.match(data, first)
            if match is None or not looks_random(match["body"], needs_mix=shape.needs_mix):
                continue
            return (shape.kind, match[0]) if not _is_published(match[0]) else None
    if before in (b" ", b":"):
        if _AUTHORIZATION.search(data, max(0, start - 40), start) and looks_random(data[start:end]):
            return "authorization-header", data[start:end]
    elif before == b"=":
        match = _ASSIGNMENT.search(data, max(0, start - 64), start)
        if match is not None and _is_secret_name(name := match[1].decode()) and looks_random(data[start:end]):
            return name, data[start:end]
    return None


def _is_published(value: bytes) -> bool:
    """Whether this is a published token, or begins with one: in a file of bytecode letters may follow it at once."""
    return any(fingerprint(value[:length]) == known for length, known in _PUBLISHED)


def aws_secret_after(data: bytes, start: int, end: int) -> bytes | None:
    """The 40 characters assigned to ``aws_secret_access_key``, when the run is that name."""
    if end - start != 21:
        return None
    match = _AWS_SECRET.match(data, start)
    return match[1] if match is not None and looks_random(match[1]) else None


def pem_key(data: bytes, mark: int) -> bytes | None:
    """The PEM private key whose header holds the ``PEM_MARK`` at ``mark``; None for a header without a key."""
    head = _PEM.match(data, max(0, data.rfind(b"-----BEGIN ", max(0, mark - 80), mark)))
    if head is None or not head.start() <= mark < head.end():
        return None
    body = _PEM_BODY.match(data, head.end(), head.end() + _PEM_REACH)
    if body is None:
        return None
    text = _PEM_LAYOUT.sub(b"", body[2]).rstrip(b"=")
    if len(text) < _MIN_PEM_CHARACTERS:
        return None
    try:
        beginning = base64.b64decode(text[:_MIN_PEM_CHARACTERS], validate=True)
    except binascii.Error:
        return None
    known = beginning[0] == 0x30 or beginning.startswith(b"openssh-key-v1\0") or b"BLOCK" in head[0]
    return head[0] + text if known or b"Proc-Type" in body[1] else None


def looks_random(body: bytes, *, needs_mix: bool = True) -> bool:
    """Whether no word, example or repeated pattern would look like this."""
    text = body.upper()
    if not text or b"EXAMPLE" in text or b"XXXX" in text or b"12345678" in text:
        return False
    counts = [body.count(letter) for letter in set(body)]
    bits = -sum(count / len(body) * math.log2(count / len(body)) for count in counts)
    if bits < min(3.6, math.log2(len(body)) - 1.2):
        return False
    has_lower = body.upper() != body
    has_upper = body.lower() != body
    has_digit = any(48 <= letter <= 57 for letter in body)
    if not needs_mix:
        return has_digit or not has_lower
    # Words in snake_case or kebab-case have many separators and no digits between letters.
    separated = sum(body.count(mark) for mark in b"_-") * 6 > len(body)
    return has_lower and (has_upper or has_digit) and (has_digit or not separated) and not (separated and not has_upper)


def environment_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold a secret, judged by name and value: name -> value."""
    return {name: value for name, value in environment.items() if _holds_secret(name, value)}


def fingerprint(value: bytes) -> str:
    """Twelve hex digits that stand for a secret in reports; only for values too random to be guessed from it."""
    return hashlib.sha256(value).hexdigest()[:12]


def _holds_secret(name: str, value: str) -> bool:
    if _URL_PASSWORD.search(value):
        return True
    if _HARMLESS_VALUE.fullmatch(value):
        return False
    words = _words(name)
    if words & _ALWAYS_WORDS and not _PATH_VALUE.fullmatch(value):
        return True
    if _is_secret_name(name) and not _PATH_VALUE.fullmatch(value):
        return True
    data = value.encode("utf-8", "surrogateescape")
    return any(
        (match := shape.pattern.search(data)) is not None and looks_random(match["body"], needs_mix=shape.needs_mix)
        for shape in _SHAPES
    ) or (PEM_MARK in data and pem_key(data, data.index(PEM_MARK)) is not None)


def _is_secret_name(name: str) -> bool:
    if name.upper() in _HARMLESS_NAMES:
        return False
    if name.upper() == _AWS_KEY_ID_NAME:
        return True
    words = _words(name)
    named = bool(words & _SECRET_WORDS) and not words & _HARMLESS_WORDS
    return named or name.upper().endswith(("APIKEY", "TOKEN"))


def _words(name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", name.upper()))
