"""A served vLLM as users have it: captured by CRIU out of a recipe, killed, restored, asked; on a processor.

One model, one capture. What a restore answers is compared with a separate process that nobody captured.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.messages import Answer, Prompt
from coldsnap.engines.vllm.outer import PLUGIN
from coldsnap.errors import AcceptanceFailed, Refused, UserError
from coldsnap.ops.live import service_status
from coldsnap.ops.restore import restore
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.stand import HOST, Stand

from .trees import make_certificate  # isort: skip

pytestmark = [pytest.mark.criu, pytest.mark.timeout(3600)]

MODEL = Path(__file__).parents[2] / ".cache/models/smollm2"
PROMPTS = (
    Prompt(text="Water boils at a temperature of", max_tokens=12),
    Prompt(text="one two three four", max_tokens=6),
    Prompt(text="The opposite of cold is", max_tokens=6),
)
SERVE = {"device": "cpu", "enforce-eager": True, "max-model-len": 512, "served-model-name": "smol"}
START_S = 1800.0
KEY = "an-api-key-of-this-test"
ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture(scope="module")
def stand(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A captured server."""
    assert MODEL.is_dir(), f"{MODEL} is not there: ./run model makes it"
    folder = tmp_path_factory.mktemp("vllm")
    one = Stand(folder=folder, model=MODEL, plugin=PLUGIN)
    one.capture(
        serve=SERVE,
        environment={**ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "cache")},
        validation={"prompts": [{"text": "The capital of France is", "max_tokens": 6}]},
    )
    yield one
    one.stop_all()
    one.assert_nothing_left()
    one.tools.host.close()


@pytest.fixture(scope="module")
def expected(stand: Stand) -> tuple[Answer, ...]:
    """From a cold process that nobody captured, to prompts that no captured one saw."""
    return stand.cold(PROMPTS, deadline_s=START_S)


def test_nearly_all_of_the_weights_are_the_checkpoints(stand: Stand) -> None:
    (pack,) = stand.result.pack_digests
    assert stand.result.pack_bytes > 0.99 * (MODEL / "model.safetensors").stat().st_size
    assert stand.result.residual_bytes < 0.01 * stand.result.pack_bytes
    assert stand.tools.store.path(pack).exists()
    assert stand.result.image_bytes > 0


def test_restored_tokens_are_those_of_a_cold_process(stand: Stand, expected: tuple[Answer, ...]) -> None:
    assert stand.restore("restore-1").source == "native"
    assert stand.ask(PROMPTS) == expected
    assert len({answer.token_ids for answer in expected}) == len(PROMPTS)


def test_a_stream_and_a_chat_come_out_of_a_restored_server(stand: Stand) -> None:
    connection = http.client.HTTPConnection(HOST, stand.port, timeout=600)
    body: dict[str, Any] = {"model": "smol", "prompt": "one two", "max_tokens": 4, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    lines = [line for line in connection.getresponse().read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    connection.close()


def test_two_restores_of_one_capture_serve_side_by_side(stand: Stand, expected: tuple[Answer, ...]) -> None:
    port = free_port()
    stand.restore("side-1", name="side", port=port)
    assert stand.ask(PROMPTS, port) == expected
    left, right = (set(service_status(stand.tools, name).pids) for name in ("svc", "side"))
    assert len(left) >= 3, "front, engine core and worker"
    assert left.isdisjoint(right)


def test_sleep_and_wake_give_the_memory_back_and_bring_it_again(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.sleep("sleep-1")
    stand.wake("wake-1")
    assert stand.ask(PROMPTS) == expected


def test_the_checkpoint_alone_suffices_and_writes_the_identical_pack(
    stand: Stand, expected: tuple[Answer, ...]
) -> None:
    before = stand.pack.read_bytes()
    stand.pack.unlink()
    assert stand.restore("recovery-1", weights="recovery", materialize="required").source == "recovery"
    assert stand.ask(PROMPTS) == expected
    assert stand.pack.read_bytes() == before


def test_a_restore_without_hydration_is_caught(stand: Stand) -> None:
    with pytest.raises(AcceptanceFailed):
        stand.restore("negative-1", negative_control=True)


@pytest.fixture
def guarded(criu: object, tmp_path: Path) -> Iterator[tuple[Stand, Path, Path]]:
    """A server that was captured with an API key and TLS: with its key's and its certificate's file."""
    private, certificate = make_certificate(tmp_path)
    one = Stand(folder=tmp_path, model=MODEL, plugin=PLUGIN)
    one.capture(
        serve={**SERVE, "ssl-keyfile": str(private), "ssl-certfile": str(certificate)},
        environment={**ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_API_KEY": KEY},
        allow_secrets=["VLLM_API_KEY"],
        validation={"prompts": [{"text": "The capital of France is", "max_tokens": 4}]},
    )
    yield one, private, certificate
    one.stop_all()
    one.assert_nothing_left()
    one.tools.host.close()


def test_an_api_key_and_tls_work_after_a_restore_and_say_so(guarded: tuple[Stand, Path, Path]) -> None:
    stand, private, certificate = guarded
    report = stand.result.hygiene["u0"]
    assert (report.allowed_secrets, report.publishable) == (("VLLM_API_KEY",), False), "the private key is in no image"
    stand.restore("guarded-1")
    trust = ssl.create_default_context(cafile=certificate)
    for key, wanted in ((KEY, 200), ("another-key-of-nobody", 401), (None, 401)):
        connection = http.client.HTTPSConnection(HOST, stand.port, context=trust, timeout=600)
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"} if key else {})
        assert connection.getresponse().status == wanted
        connection.close()
    stand.stop_all()
    private.rename(private.with_suffix(".away"))
    with pytest.raises(UserError, match=f"--ssl-keyfile: {private}"):
        stand.restore("guarded-2")


def test_another_command_is_refused_by_name(stand: Stand) -> None:
    request = stand.request("refused-1")
    command = (*request.launch.units[0].command, "--seed", "1")
    unit = request.launch.units[0].model_copy(update={"command": command})
    changed = request.model_copy(update={"launch": request.launch.model_copy(update={"units": (unit,)})})
    with pytest.raises(Refused, match=r"launch\.units\[0\]\.command"):
        restore(stand.tools, stand.loaded, changed, host=HOST, port=free_port())
