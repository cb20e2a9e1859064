"""The engine as a real process, from its command to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.manifest import parse_native_manifest
from coldsnap.core.messages import (
    AnswerBody,
    Answers,
    ExportBody,
    Exported,
    Prompt,
    Serving,
    SleepReport,
    Verb,
    WorkerSettings,
    WorkerState,
)
from coldsnap.engines.control import ControlClient
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.testing.engine_harness import free_port, post

pytestmark = pytest.mark.model

PROMPTS = (Prompt(text="Hello", max_tokens=5),)
WINDOW_BYTES = 64


def test_it_serves_and_holds_no_model_byte_while_asleep(tiny: Path, tmp_path: Path) -> None:
    port = free_port()
    model = PLUGIN.resolve_model(str(tiny))
    settings = WorkerSettings(
        worker="w0",
        unit="u0",
        rank=0,
        socket=str(tmp_path / "w.sock"),
        port=port,
        options=PLUGIN.settings_options(model, {}),
    )
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    (tmp_path / "out").mkdir(mode=0o700)
    environment = {"PATH": os.environ["PATH"], "COLDSNAP_SETTINGS": str(tmp_path / "settings.json")}
    options = PLUGIN.options({"num_threads": 1})
    command = PLUGIN.unit_command(model, options, host="127.0.0.1", port=port, python=sys.executable)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        client = ControlClient(tmp_path / "w.sock")
        try:
            found = client.wait_loaded(deadline_s=120, alive=lambda: process.poll() is None)
            assert (found.state, found.port) == (WorkerState.SERVING, port)
            assert {"torch", "transformers"} <= found.engine_versions.keys()
            body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "return_token_ids": True}
            code, reply = post(port, "/v1/completions", body)
            answers = client.call(Verb.ANSWER, AnswerBody(prompts=PROMPTS), reply=Answers, deadline_s=60).answers
            assert (code, tuple(reply["choices"][0]["token_ids"])) == (200, answers[0].token_ids)
            client.call(Verb.STOP_SERVING, reply=Serving, deadline_s=60)
            wanted = ExportBody(state_root=str(tmp_path / "state"), out_dir=str(tmp_path / "out"), capture_id="c")
            exported = client.call(Verb.EXPORT, wanted, reply=Exported, deadline_s=60)
            client.call(Verb.SLEEP, reply=SleepReport, deadline_s=60)
            links = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert sum(link.startswith("socket:") for link in links) == 1  # the control listener
            assert not [link for link in links if link.startswith("anon_inode:")]
            assert "(deleted)" not in Path(f"/proc/{process.pid}/maps").read_text()
            memory = list(_writable_memory(process.pid))
            assert sum(map(len, memory)) > 50_000_000
            for window in _windows(exported):
                assert not any(window in part for part in memory)
        finally:
            process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=60)
    assert process.returncode == 0, log


def _windows(exported: Exported) -> list[bytes]:
    """A piece out of the middle of every matrix. Embeddings are left out: activations are rows of them."""
    assert exported.pack is not None
    pack = Path(exported.pack.path).read_bytes()
    manifest = parse_native_manifest(Path(exported.native_manifest.path).read_bytes())
    matrices = sorted(manifest.model_weight_extents, key=lambda one: one.size)[:-1]
    found = [pack[one.offset + one.size // 2 :][:WINDOW_BYTES] for one in matrices if one.size >= 4096]
    assert len(found) >= 10
    return found


def _writable_memory(pid: int) -> Iterator[bytes]:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            addresses, permissions, *_ = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if permissions.startswith("rw"):
                memory.seek(begin)
                yield memory.read(end - begin)
