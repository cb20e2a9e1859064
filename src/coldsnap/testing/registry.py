"""Registries on loopback: a fake that lies when it is told to and sells tokens, and Debian's real docker-registry.

The fake keeps blobs as files and speaks what ``ship/registry.py`` uses: chunked uploads that say how far they came,
mounts, manifests by tag and digest, tags, ranges, Basic and Bearer. It proves digests as a registry must.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.web import Reply, Request, Web

__all__ = ["PREFIX", "RealRegistry", "RegistryServer", "real_registry"]

PREFIX = Path("/opt/coldsnap/registry")
_PATIENCE_S = 60.0
_NAME = r"(?P<name>[a-z0-9]+(?:[._/-][a-z0-9]+)*)"
_BLOB = re.compile(rf"/v2/{_NAME}/blobs/sha256:(?P<hex>[0-9a-f]{{64}})")
_BEGIN = re.compile(rf"/v2/{_NAME}/blobs/uploads/")
_SESSION = re.compile(rf"/v2/{_NAME}/blobs/uploads/(?P<id>[0-9a-f]+)")
_MANIFEST = re.compile(rf"/v2/{_NAME}/manifests/(?P<ref>[A-Za-z0-9_.:-]+)")
_TAGS = re.compile(rf"/v2/{_NAME}/tags/list")


class RegistryServer(Web):
    """See the module's head. ``login`` is (user, password); with ``bearer`` a token is sold for it, or for nothing."""

    def __init__(self, folder: Path, *, login: tuple[str, str] | None = None, bearer: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.login = login
        self.bearer = bearer
        self.deletes = True
        self.blobs: dict[str, set[str]] = {}
        self.manifests: dict[str, dict[str, bytes]] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.tokens: dict[str, set[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def handle(self, request: Request) -> Reply:
        """Dispatch by path."""
        if request.path == "/token":
            return self._sell(request)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        for pattern, method in (
            (_BEGIN, self._begin), (_SESSION, self._session), (_BLOB, self._blob), (_MANIFEST, self._manifest),
            (_TAGS, self._list),
        ):  # fmt: skip
            if (match := pattern.fullmatch(request.path)) is not None:
                return method(request, match["name"], match.groupdict())
        return Reply.of({}) if request.path == "/v2/" else _no(404, "UNSUPPORTED")

    # -- who may ----------------------------------------------------------------------------------------------

    def _basic(self) -> str:
        assert self.login is not None
        return "Basic " + base64.b64encode(":".join(self.login).encode()).decode()

    def _refusal(self, request: Request) -> Reply | None:
        given = request.headers.get("authorization", "")
        if self.bearer:
            name = re.match(rf"/v2/{_NAME}/(?:blobs|manifests|tags)/", request.path)
            action = "push" if request.method in ("POST", "PATCH", "PUT", "DELETE") else "pull"
            wanted = f"repository:{name['name']}:{action}" if name else ""
            if given.startswith("Bearer ") and wanted in self.tokens.get(given[7:], set()):
                return None
            challenge = f'Bearer realm="{self.url}/token",service="fake",scope="{wanted}"'
            return _no(401, "UNAUTHORIZED", **{"WWW-Authenticate": challenge})
        if self.login is not None and given != self._basic():
            return _no(401, "UNAUTHORIZED", **{"WWW-Authenticate": 'Basic realm="fake"'})
        return None

    def _sell(self, request: Request) -> Reply:
        if self.login is not None and request.headers.get("authorization") != self._basic():
            return _no(401, "UNAUTHORIZED")
        token = f"sold-{secrets.token_hex(8)}"
        granted = self.tokens.setdefault(token, set())
        for scope in request.query.get("scope", []):
            kind, name, actions = scope.split(":")
            granted |= {f"{kind}:{name}:{action}" for action in actions.split(",")}
        return Reply.of({"token": token, "expires_in": 300})

    # -- what is asked ----------------------------------------------------------------------------------------

    def _begin(self, request: Request, name: str, at: dict[str, str]) -> Reply:
        digest, neighbour = (request.query.get(key, [""])[0] for key in ("mount", "from"))
        with self.lock:
            if digest and digest in self.blobs.get(neighbour, set()):
                self.blobs.setdefault(name, set()).add(digest)
                return Reply(status=201, headers={"Location": f"/v2/{name}/blobs/{digest}"})
        session = secrets.token_hex(8)
        (self.folder / session).touch()
        return Reply(status=202, headers={"Location": f"/v2/{name}/blobs/uploads/{session}?_state=planted-state"})

    def _session(self, request: Request, name: str, at: dict[str, str]) -> Reply:
        path = self.folder / at["id"]
        if not path.exists():
            return _no(404, "BLOB_UPLOAD_UNKNOWN")
        size = path.stat().st_size
        headers = {"Location": f"/v2/{name}/blobs/uploads/{at['id']}?_state=planted-state"}
        if request.method == "GET":
            return Reply(status=204, headers={**headers, "Range": f"0-{max(size - 1, 0)}"})
        if request.method == "DELETE":
            path.unlink()
            return Reply(status=204)
        if request.method == "PATCH":
            stated = request.headers.get("content-range")
            if stated is not None and int(stated.split("-")[0]) != size:
                return Reply(status=416, headers={**headers, "Range": f"0-{max(size - 1, 0)}"})
            with path.open("ab") as out:
                for piece in request.read():
                    out.write(piece)
            return Reply(status=202, headers={**headers, "Range": f"0-{max(path.stat().st_size - 1, 0)}"})
        with path.open("ab") as out:
            for piece in request.read():
                out.write(piece)
        digest = request.query.get("digest", [""])[0]
        with path.open("rb") as file:
            if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" != digest:
                path.unlink()
                return _no(400, "DIGEST_INVALID")
        path.rename(self.folder / digest[7:])
        with self.lock:
            self.blobs.setdefault(name, set()).add(digest)
        return Reply(status=201, headers={"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": digest})

    def _blob(self, request: Request, name: str, at: dict[str, str]) -> Reply:
        digest = f"sha256:{at['hex']}"
        if digest not in self.blobs.get(name, set()):
            return _no(404, "BLOB_UNKNOWN")
        return Reply.of_file(self.folder / at["hex"], request, **{"Docker-Content-Digest": digest})

    def _manifest(self, request: Request, name: str, at: dict[str, str]) -> Reply:
        if request.method == "PUT":
            data = request.body()
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            manifest = json.loads(data)
            for entry in (manifest["config"], *manifest["layers"]):
                if entry["digest"] not in self.blobs.get(name, set()):
                    return _no(400, "MANIFEST_BLOB_UNKNOWN")
            with self.lock:
                self.manifests.setdefault(name, {})[digest] = data
                if not at["ref"].startswith("sha256:"):
                    self.tags.setdefault(name, {})[at["ref"]] = digest
            return Reply(status=201, headers={"Docker-Content-Digest": digest})
        digest = self.tags.get(name, {}).get(at["ref"], at["ref"])
        if request.method == "DELETE" and digest in self.manifests.get(name, {}):
            if not self.deletes:
                return _no(405, "UNSUPPORTED")
            with self.lock:
                del self.manifests[name][digest]
                self.tags[name] = {tag: one for tag, one in self.tags.get(name, {}).items() if one != digest}
            return Reply(status=202)
        found = self.manifests.get(name, {}).get(digest)
        if found is None:
            return _no(404, "MANIFEST_UNKNOWN")
        return Reply(data=found, headers={"Docker-Content-Digest": digest, "Content-Type": json.loads(found)["mediaType"]})  # fmt: skip # noqa: E501

    def _list(self, request: Request, name: str, at: dict[str, str]) -> Reply:
        if name not in self.manifests:
            return _no(404, "NAME_UNKNOWN")
        return Reply.of({"name": name, "tags": sorted(self.tags.get(name, {}))})


def _no(status: int, code: str, **headers: str) -> Reply:
    return Reply.of({"errors": [{"code": code, "message": code.lower().replace("_", " ")}]}, status, **headers)


@dataclass(kw_only=True)
class RealRegistry:
    """A running docker-registry."""

    host: str
    folder: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def real_registry(folder: Path, *, prefix: Path = PREFIX) -> Iterator[RealRegistry]:
    """Debian's docker-registry on a free loopback port, storing below ``folder``; ended with the block."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "throw-away"},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [prefix / "bin/docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log
        )
    try:
        ends = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=60):
                break
            if process.poll() is not None or time.monotonic() > ends:
                raise AssertionError(f"docker-registry does not answer: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        yield RealRegistry(host=f"127.0.0.1:{port}", folder=folder, process=process)
    finally:
        process.terminate()
        process.wait(60)
