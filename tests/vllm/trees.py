"""A real served tree for tests: the front process with vLLM's API server, and the engine processes that it forks."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.messages import Prompt, WorkerSettings
from coldsnap.engines.control import ControlClient
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.safetensors import metadata_sha256
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontClient

MODEL = Path(__file__).parents[2] / ".cache/models/smollm2"
START_S = 900.0
LONG_S = 120.0
KEY = "one-key"


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A front process, its run folder and its certificate."""

    process: subprocess.Popen[bytes]
    folder: Path
    front: FrontClient
    control: ControlClient
    certificate: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def descendants(self) -> dict[int, str]:
        """pid -> command line, of the front and everything below it."""
        parents: dict[int, int] = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parents[int(status.parent.name)] = int(status.read_text().rpartition(") ")[2].split()[1])
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid: command_line(pid) for pid in found}

    def end(self) -> None:
        """As its unit is ended; nothing of it is left."""
        below = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LONG_S) == 0, self.log
        wait_until(lambda: not any(is_alive(pid) for pid in below), lambda: f"{below}: {self.log}")
        assert list(self.folder.glob("*.sock")) == []

    def request(
        self, port: int, method: str, path: str, body: object = None, key: str | None = KEY
    ) -> tuple[int, bytes]:
        """Over TLS, trusting nothing but this tree's own certificate."""
        trust = ssl.create_default_context(cafile=self.certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=LONG_S)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def complete(self, port: int, prompt: Prompt, **more: object) -> tuple[int, Any]:
        body = {"model": "smol", "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0, **more}
        status, data = self.request(port, "POST", "/v1/completions", body)
        return status, data if more.get("stream") else json.loads(data)


def wait_until(true: Callable[[], bool], told: Callable[[], str], *, deadline_s: float = LONG_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has just ended


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0] != "Z"
    except OSError:
        return False


def events(data: bytes) -> list[str]:
    """What server-sent events say."""
    return [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]


def environment(folder: Path, **more: str) -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": source,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(MODEL.parents[1] / "vllm"),  # what it found out about the model, in a process of its own
        "VLLM_RPC_BASE_PATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1 that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "key.pem", folder / "certificate.pem"
    paths[0].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    paths[1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return paths


@contextmanager
def started(
    *options: str,
    digest: str | None = None,
    tls: bool = True,
    model: Path = MODEL,
    template: bool = False,
    **more: str,
) -> Iterator[Tree]:
    """`serve MODEL` with these options and variables; killed if the test did not end it."""
    assert model.is_dir(), f"{model} is not there: ./run model makes it"
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a socket's path has 107 bytes at most
        folder = Path(name)
        key, certificate = make_certificate(folder)
        pinned = digest if digest is not None else str(metadata_sha256(checkpoint_files(model)))
        settings = WorkerSettings(
            worker="w0",
            unit="u0",
            rank=0,
            socket=str(folder / "w.sock"),
            template=template,
            options={"model_id": "smollm2", "revision": "r", "metadata_sha256": pinned},
        )
        (folder / "settings.json").write_text(settings.model_dump_json())
        command = [sys.executable, "-m", "coldsnap.engines.vllm", "serve", str(model), "--enforce-eager"]
        command += ["--max-model-len", "512", "--served-model-name", "smol", *options]
        command += ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)] if tls else []
        variables = environment(folder, **{SETTINGS_VARIABLE: str(folder / "settings.json"), **more})
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        tree = Tree(
            process=process,
            folder=folder,
            front=FrontClient(folder / FRONT_SOCKET),
            control=ControlClient(Path(settings.socket)),
            certificate=certificate,
        )
        try:
            yield tree
        finally:
            for pid in tree.descendants() if process.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def wait_listening(tree: Tree) -> None:
    wait_until((tree.folder / FRONT_SOCKET).exists, lambda: tree.log)
