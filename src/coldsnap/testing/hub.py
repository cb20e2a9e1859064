"""A hub on loopback that the stock ``huggingface_hub`` client talks to: repositories, LFS, commits, downloads.

    repos/create, branch                    POST  /api/repos/create  /api/models/<repo>/branch/<name>
    model info, revision, tree, paths-info  GET   /api/models/<repo>[/revision/<rev>|/tree/<rev>/<path>], POST paths
    preupload, LFS batch, verify, commit    POST  (basic below ``part_bytes``, multipart above), PUT the parts
    resolve                                 GET   /<repo>/resolve/<rev>/<path>, redirected to another origin

LFS objects are files of a folder, so size costs no memory. With a ``token`` it answers nobody else; ``gated``
repositories show their pages and refuse their files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.testing.hub_objects import Objects
from coldsnap.testing.web import Reply, Request, Web

__all__ = ["HubServer", "Repository"]

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info|preupload|commit|branch|xet-write-token)/([^/]+)(?:/(.*))?)?$")  # fmt: skip # noqa: E501
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_STORE = re.compile(r"/lfs/(put|part|complete|verify)/([0-9a-f]{64})(?:/(\d+))?")

Files = Mapping[str, tuple[str, int]]


@dataclass
class Repository:
    """Commits by id, each with all its files (path -> (sha256, bytes)); branches by name."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def files(self, revision: str) -> Files | None:
        """The files at a branch or commit."""
        return self.commits.get(self.branches.get(revision, revision))

    def commit(self, branch: str, files: Files) -> str:
        """A new head."""
        seed = json.dumps([len(self.commits), branch, sorted(files)]).encode()
        oid = hashlib.sha1(seed, usedforsecurity=False).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid


class HubServer(Web):
    """See the module's head. ``part_bytes`` is the size of a part, and from which size on parts are used."""

    def __init__(self, folder: Path, *, token: str | None = None, part_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.folder = folder
        self.token = token
        self.part_bytes = part_bytes
        self.max_bytes: int | None = None
        self.repositories: dict[str, Repository] = {}
        self.objects = Objects(folder)

    @property
    def cdn_url(self) -> str:
        """Where bytes are served: this server under another name, so that it is another origin."""
        return self.url.replace("127.0.0.1", "localhost")

    def num_commits(self, repository: str) -> int:
        """Commits but for the first, which a new repository has."""
        return len(self.repositories[repository].commits) - 1

    def handle(self, request: Request) -> Reply:
        """Dispatch by path."""
        signed = request.path.startswith(("/cdn/", "/lfs/put", "/lfs/part", "/lfs/complete"))
        known = self.token is None or request.headers.get("authorization") == f"Bearer {self.token}"
        if not signed and not known:
            return _no(401, "RepoNotFound", "Invalid username or password.")
        if request.path.startswith("/cdn/"):
            return Reply.of_file(self.folder / Path(request.path).name, request)
        if (match := _STORE.fullmatch(request.path)) is not None:
            return self._store(request, match[1], match[2], match[3])
        with self.lock:
            if request.path == "/api/repos/create":
                return self._create(json.loads(request.body()))
            if (match := _BATCH.fullmatch(request.path)) is not None:
                return self._batch(json.loads(request.body()))
            if (match := _RESOLVE.fullmatch(request.path)) is not None:
                return self._resolve(request, match[1], match[2], match[3])
            if (match := _API.fullmatch(request.path)) is not None:
                return self._api(request, match[1], match[2], match[3], match[4] or "")
        return _no(404, "EntryNotFound", "no such address")

    def _create(self, wanted: Mapping[str, Any]) -> Reply:
        name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else f"me/{wanted['name']}"
        if name in self.repositories:
            return Reply.of({"url": f"{self.url}/{name}", "error": "You already created this model repo"}, 409)
        repository = self.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        repository.commit("main", {})
        return Reply.of({"url": f"{self.url}/{name}", "name": name})

    def _api(self, request: Request, name: str, verb: str | None, revision: str, path: str) -> Reply:
        repository = self.repositories.get(name)
        if repository is None:
            return _no(404, "RepoNotFound", "Repository not found")
        if verb == "branch":
            if revision in repository.branches:
                return _no(409, "", "Branch exists")
            repository.branches[revision] = repository.branches["main"]
            return Reply.of({})
        files = repository.files(revision or "main")
        if files is None:
            return _no(404, "RevisionNotFound", "Revision not found")
        if verb is None or verb == "revision":
            sha = repository.branches.get(revision or "main", revision)
            return Reply.of({"_id": "1", "id": name, "modelId": name, "sha": sha, "private": repository.private})
        if verb == "tree":
            found = [_entry(at, *file) for at, file in sorted(files.items()) if at.startswith(f"{path}/")]
            return Reply.of(found) if found or not path else _no(404, "EntryNotFound", "no such folder")
        if verb == "paths-info":
            form = dict(_form(request))
            return Reply.of([_entry(at, *files[at]) for at in form.get("paths", []) if at in files])
        if verb == "preupload":
            wanted = json.loads(request.body())["files"]
            return Reply.of({"files": [{"path": one["path"], "uploadMode": "lfs", "shouldIgnore": False, "oid": files.get(one["path"], (None,))[0]} for one in wanted]})  # fmt: skip # noqa: E501
        if verb == "commit":
            return self._commit(request, name, repository, revision)
        return _no(404, "", "no Xet here")

    def _commit(self, request: Request, name: str, repository: Repository, branch: str) -> Reply:
        lines = [json.loads(line) for line in request.body().splitlines()]
        head = repository.branches[branch]
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != head:
            return _no(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[head])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                if not (self.folder / value["oid"]).exists():
                    return _no(400, "", f"the LFS object {value['oid']} was not uploaded")
                files[value["path"]] = (value["oid"], value["size"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                data = base64.b64decode(value["content"])
                oid = hashlib.sha256(data).hexdigest()
                self.objects.put(oid, [data])
                files[value["path"]] = (oid, len(data))
        oid = repository.commit(branch, files)
        return Reply.of({"commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}", "pullRequestUrl": None})

    def _batch(self, wanted: Mapping[str, Any]) -> Reply:
        objects = []
        for one in wanted["objects"]:
            oid, size = one["oid"], one["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if self.max_bytes is not None and size > self.max_bytes:
                entry["error"] = {"code": 422, "message": "the file is too large for LFS without Xet"}
            elif not (self.folder / oid).exists():
                upload: dict[str, Any] = {"href": f"{self.url}/lfs/put/{oid}?X-Signature=planted-signature"}
                if size >= self.part_bytes:
                    header = {"chunk_size": str(self.part_bytes)}
                    for number in range(1, -(-size // self.part_bytes) + 1):
                        header[f"{number:05d}"] = f"{self.url}/lfs/part/{oid}/{number}?X-Signature=planted-signature"
                    upload = {"href": f"{self.url}/lfs/complete/{oid}", "header": header}
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/lfs/verify/{oid}"}}
            objects.append(entry)
        return Reply.of({"transfer": "basic", "objects": objects})

    def _store(self, request: Request, verb: str, oid: str, number: str | None) -> Reply:
        if verb == "verify":
            wanted = json.loads(request.body())
            path = self.folder / oid
            good = path.exists() and path.stat().st_size == wanted["size"]
            return Reply.of({}) if good else _no(404, "", "object not found")
        if verb == "part":
            offset = (int(number or 0) - 1) * self.part_bytes
            self.objects.put_part(oid, offset, request.read())
            return Reply(headers={"ETag": f'"{oid[:32]}-{number}"'})
        if verb == "complete":
            request.body()
            good = self.objects.complete(oid)
        else:
            good = self.objects.put(oid, request.read())
        return Reply.of({}) if good else _no(400, "", "the bytes are not those of the object id")

    def _resolve(self, request: Request, name: str, revision: str, path: str) -> Reply:
        repository = self.repositories.get(name)
        files = repository.files(revision) if repository is not None else None
        if repository is None or files is None:
            return _no(404, "RepoNotFound" if repository is None else "RevisionNotFound", "not found")
        if repository.gated:
            return _no(403, "GatedRepo", "Access to this model is restricted. You must accept its conditions.")
        if path not in files:
            return _no(404, "EntryNotFound", "Entry not found")
        oid, size = files[path]
        headers = {"ETag": f'"{oid}"', "X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(size), "X-Repo-Commit": repository.branches.get(revision, revision)}  # fmt: skip # noqa: E501
        return Reply(
            status=302, headers={**headers, "Location": f"{self.cdn_url}/cdn/{oid}?X-Signature=planted-signature"}
        )


def _entry(path: str, oid: str, size: int) -> dict[str, Any]:
    lfs = {"oid": oid, "size": size, "pointerSize": 134}
    return {"type": "file", "path": path, "size": size, "oid": "0" * 40, "lfs": lfs}


def _form(request: Request) -> Mapping[str, list[str]]:
    from urllib.parse import parse_qs

    if "json" in request.headers.get("content-type", ""):
        found = json.loads(request.body())
        return {"paths": list(found.get("paths", []))}
    return parse_qs(request.body().decode())


def _no(status: int, code: str, message: str) -> Reply:
    return Reply.of({"error": message}, status, **{"X-Error-Code": code, "X-Error-Message": message})
