"""The real thing with a real engine: Transformers, tiny random models, real processes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from coldsnap.core.manifest import parse_native_manifest, parse_recovery_manifest
from coldsnap.core.messages import Answer, Prompt
from coldsnap.engines.transformers.checkpoints import make_random
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.errors import AcceptanceFailed
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, RECOVERY_MANIFEST
from coldsnap.ops.live import service_status
from coldsnap.ops.materialize import materialize, materialize_request
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.overlay import drop_overlay
from coldsnap.ops.windows import windows_in
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.stand import HOST, PATIENCE_S, UNSEEN, Stand

pytestmark = [pytest.mark.criu, pytest.mark.model]

PROMPTS = (*(prompt for prompt in UNSEEN if prompt.text), Prompt(text="0 1 2 3", max_tokens=12))
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def stand(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A captured Transformers engine with a tiny model."""
    folder = tmp_path_factory.mktemp("transformers")
    one = Stand(folder=folder, model=make_random(folder / "model", size="tiny"), plugin=PLUGIN)
    one.capture(validation={"prompts": [{"text": "The opposite of cold is", "max_tokens": 4}]})
    yield one
    one.stop_all()
    one.tools.host.close()


@pytest.fixture(scope="module")
def expected(stand: Stand) -> tuple[Answer, ...]:
    """From a cold process that nobody captured, to prompts that no captured one saw."""
    return stand.cold(PROMPTS)


@pytest.fixture(scope="module")
def seen_tokens(stand: Stand) -> frozenset[int]:
    """What the captured process computed with: the tokens of its prompts and of its answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(stand.model)
    prompts, answers = stand.loaded.acceptance()
    asked = {token for prompt in prompts for token in tokenizer(prompt.text)["input_ids"]}
    return frozenset(asked | {token for answer in answers for token in answer.token_ids})


def test_restored_tokens_are_the_cold_ones_side_by_side(stand: Stand, expected: tuple[Answer, ...]) -> None:
    ports = {"left": free_port(), "right": free_port()}
    for name, port in ports.items():
        assert stand.restore(f"side-{name}", name=name, port=port).source == "native"
    for port in ports.values():
        assert stand.ask(PROMPTS, port) == expected
    left, right = (service_status(stand.tools, name).pids for name in ports)
    assert set(left).isdisjoint(right)


def test_sleep_and_wake_and_chat(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("sleep-0")
    client = OutsideClient(host=HOST, port=stand.port)
    said = client.chat(QUESTION, max_tokens=8, timeout_s=PATIENCE_S)
    client.first_token("x", timeout_s=PATIENCE_S)
    stand.sleep("sleep-1")
    stand.wake("sleep-2")
    assert stand.ask(PROMPTS) == expected
    assert client.chat(QUESTION, max_tokens=8, timeout_s=PATIENCE_S) == said


def test_warm_and_recovery(stand: Stand, expected: tuple[Answer, ...]) -> None:
    assert stand.restore("warm-1", warm=True).state == "warm"
    stand.wake("warm-2")
    assert stand.ask(PROMPTS) == expected
    assert stand.restore("recovery-1", weights="recovery").source == "recovery"
    assert stand.ask(PROMPTS) == expected


def test_a_restore_without_hydration_is_caught(stand: Stand) -> None:
    with pytest.raises(AcceptanceFailed):
        stand.restore("negative-1", negative_control=True)
    stand.assert_nothing_left()


def test_no_window_of_the_pack_is_in_the_process_images(stand: Stand, seen_tokens: frozenset[int]) -> None:
    """Every 64-byte piece of every tensor, but for the embeddings of the few tokens that the captured process saw:
    such a row *is* the activation that the first layer was given, and freed activations stay in a heap."""
    stand.prepare("windows-1")
    prepared = stand.tools.state.prepared / stand.loaded.capsule_digest("u0").hex
    pack = stand.tools.store.path(stand.result.pack_digests[0]).read_bytes()
    native, recovery = (stand.loaded.worker_object("w0", role) for role in (NATIVE_MANIFEST, RECOVERY_MANIFEST))
    assert native is not None
    assert recovery is not None
    plan = parse_recovery_manifest((prepared / recovery.path).read_bytes()).replay_plan
    embeddings = {entry.ptr for entry in plan if entry.pieces[0].tensor == "model.embed_tokens.weight"}
    assert len(embeddings) == 1
    row_bytes = json.loads((stand.model / "config.json").read_text())["hidden_size"] * 2
    windows = set()
    for extent in parse_native_manifest((prepared / native.path).read_bytes()).model_weight_extents:
        for at in range(0, extent.size - 63, 64):
            piece = pack[extent.offset + at : extent.offset + at + 64]
            seen = extent.ptr in embeddings and at // row_bytes in seen_tokens
            if len(set(piece)) > 24 and not seen:
                windows.add(piece)
    assert len(windows) > 2000
    data = b"".join(path.read_bytes() for path in sorted((prepared / "process").iterdir()))
    planted = random.Random(2).choice(sorted(windows))
    assert windows_in(data + planted, windows) == {planted}


def test_another_load_order_and_address_share_the_pack(stand: Stand, expected: tuple[Answer, ...]) -> None:
    elsewhere = {"load_order": "shuffled:7", "arena_base": "0x5a0000000000"}
    second = stand.capture("capture-2", "second.json", serve=elsewhere)
    assert second.pack_digests == stand.result.pack_digests
    assert (stand.result.pack_shared, second.pack_shared) == (False, True)
    stand.restore("shared-1", load_artifact(second.artifact_path))
    assert stand.ask(PROMPTS) == expected


def test_a_lost_pack_an_overlay_and_a_cold_start_give_the_cold_tokens(
    stand: Stand, expected: tuple[Answer, ...]
) -> None:
    pack = stand.tools.store.path(stand.result.pack_digests[0])
    before = pack.read_bytes()
    pack.unlink()
    made = materialize(
        stand.tools, stand.loaded, materialize_request(stand.loaded, operation_id="ladder-1"), overlay=True
    )
    assert [one.outcome for one in made.packs] == ["written"]
    assert pack.read_bytes() == before
    assert made.overlay is not None
    assert made.overlay.outcome == "made"
    first = stand.restore("ladder-2")
    assert ([str(step.rung) for step in first.ladder], stand.ask(PROMPTS)) == (["overlay"], expected)
    capsule = stand.loaded.capsule_digest("u0").hex
    drop_overlay(stand.tools, stand.loaded.digest)
    aside = stand.folder / "aside"
    (stand.tools.state.capsules / capsule).rename(aside)
    try:
        shutil.rmtree(stand.tools.state.prepared / capsule, ignore_errors=True)

        def allow(document: Any) -> None:
            document["runtime"]["bindings"].append({"kind": "coldsnap-fallback", "cold_start": True})

        cold = stand.restore("ladder-3", stand.rewritten("cold.json", allow))
        assert [(str(step.rung), str(step.outcome)) for step in cold.ladder] == [
            ("native", "skipped"),
            ("cold", "used"),
        ]
        assert stand.ask(PROMPTS) == expected
    finally:
        aside.rename(stand.tools.state.capsules / capsule)
