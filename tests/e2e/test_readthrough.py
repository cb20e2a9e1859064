"""A pack that is lost comes back: recovery from the checkpoint, equal tokens, the identical pack, then native again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, Materialization, MaterializationState, Prompt, WorkerStatus
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.errors import IntegrityError
from coldsnap.ops.live import service_status, stop_service
from coldsnap.store.admission import record_path
from coldsnap.testing.stand import UNSEEN, Stand, wait_for

pytestmark = pytest.mark.criu

DONE, IDLE, RUNNING, WAITING = (
    MaterializationState.DONE,
    MaterializationState.IDLE,
    MaterializationState.RUNNING,
    MaterializationState.WAITING,
)


@pytest.fixture
def lost(stand: Stand) -> Iterator[bytes]:
    """The bytes of the pack, which is not in the store any more; it is put back when the test left it missing."""
    path = stand.pack
    content = path.read_bytes()
    path.unlink()
    record_path(path).unlink(missing_ok=True)
    yield content
    if not path.exists():
        path.write_bytes(content)
        path.chmod(0o400)


def pack_status(stand: Stand) -> Materialization:
    worker = service_status(stand.tools, "svc").workers["w0"]
    assert isinstance(worker, WorkerStatus)
    assert worker.materialization is not None
    return worker.materialization


def test_required_rebuilds_the_pack_before_success(stand: Stand, expected: tuple[Answer, ...], lost: bytes) -> None:
    result = stand.restore("required-1", materialize="required")
    assert result.source == "recovery"
    assert stand.pack.read_bytes() == lost
    assert Digest.of(lost) == stand.result.pack_digests[0]
    assert stand.ask(UNSEEN) == expected
    again = stand.restore("required-2")
    assert (again.source, again.prepared_from_record) == ("native", True)
    assert stand.ask(UNSEEN) == expected


def test_async_rebuilds_it_beside_the_service(stand: Stand, expected: tuple[Answer, ...], lost: bytes) -> None:
    result = stand.restore("async-1", materialize="async")
    told = result.wake["w0"].materialization
    assert told is not None
    assert result.source == "recovery"
    assert told.state in (WAITING, RUNNING, DONE)  # it waits for two quiet seconds, which a slow machine may have had
    assert stand.ask(UNSEEN) == expected
    wait_for("the pack", lambda: pack_status(stand).state is DONE)
    assert pack_status(stand).pack_sha256 == stand.result.pack_digests[0]
    assert stand.pack.read_bytes() == lost
    assert stand.ask(UNSEEN) == expected
    assert stand.restore("async-2").source == "native"
    assert stand.ask(UNSEEN) == expected


def test_sleep_finishes_what_waits(stand: Stand, expected: tuple[Answer, ...], lost: bytes) -> None:
    stand.restore("sleep-1", materialize="async")
    stand.sleep("sleep-2")
    assert pack_status(stand).state is DONE
    assert stand.pack.read_bytes() == lost
    stand.wake("sleep-3")
    assert service_status(stand.tools, "svc").record.source == "native"
    assert stand.ask(UNSEEN) == expected


def test_off_rebuilds_nothing(stand: Stand, expected: tuple[Answer, ...], lost: bytes) -> None:
    stand.restore("off-1", materialize="off")
    assert stand.ask(UNSEEN) == expected
    stand.sleep("off-2")
    assert pack_status(stand).state is IDLE
    assert not stand.pack.exists()


def test_a_fine_tuned_twin_is_never_served(stand: Stand, expected: tuple[Answer, ...], lost: bytes) -> None:
    """The same headers and two changed tensors: both are named, and the base serves again once it is back."""
    base = stand.model.with_name("base")
    stand.model.rename(base)
    shutil.copytree(base, stand.model)
    try:
        for file in checkpoint_files(stand.model):
            data = bytearray(file.path.read_bytes())
            for tensor in file.tensors:
                if tensor.name in ("layers.0", "norm"):
                    data[tensor.offset + tensor.size // 2] ^= 4
            file.path.write_bytes(data)
        with pytest.raises(IntegrityError, match="other bytes in 2 tensors") as caught:
            stand.restore("twin-1")
        named = [str(one).split(": ")[1] for one in caught.value.facts["tensors"]]  # type: ignore[attr-defined]
        assert sorted(named) == ["layers.0", "norm"]
        stand.assert_nothing_left()
    finally:
        shutil.rmtree(stand.model)
        base.rename(stand.model)
    assert stand.restore("twin-2").source == "recovery"
    assert stand.ask(UNSEEN) == expected


def test_a_checkpoint_with_other_headers_does_not_cost_the_running_service(
    stand: Stand, expected: tuple[Answer, ...], lost: bytes
) -> None:
    stand.restore("headers-1")
    pids = service_status(stand.tools, "svc").pids
    path = stand.model / "model-00001-of-00002.safetensors"
    original = path.read_bytes()
    path.write_bytes(original.replace(b'"U8"', b'"I8"', 1))
    try:
        with pytest.raises(IntegrityError, match="not the captured one"):
            stand.restore("headers-2")
        assert service_status(stand.tools, "svc").pids == pids
        assert stand.ask(UNSEEN) == expected
        stand.sleep("headers-3")
        with pytest.raises(IntegrityError, match="not the captured one"):
            stand.wake("headers-4")
    finally:
        path.write_bytes(original)
    stand.wake("headers-5")
    assert stand.ask(UNSEEN) == expected


def test_the_command_line_asks_for_it_and_shows_it(stand: Stand, lost: bytes) -> None:
    words = ("restore", stand.loaded.path, "--port", str(stand.port), "--materialize", "required", "--json")
    process = stand.cli(*words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert '"source": "recovery"' in out or '"source":"recovery"' in out
    assert stand.pack.read_bytes() == lost
    process = stand.cli("status")
    out, err = process.communicate(timeout=60)
    assert "pack of w0 done: written from the model bytes in memory" in " ".join(out.split()), out + err
    stop_service(stand.tools, "svc")


@pytest.mark.model
@pytest.mark.usefixtures("criu")
def test_a_real_engine_goes_the_whole_way(tmp_path: Path) -> None:
    """Two layers of Qwen3 by Transformers: no pack, recovery, equal tokens, identical pack, native."""
    from coldsnap.engines.transformers.checkpoints import make_random
    from coldsnap.engines.transformers.plugin import PLUGIN

    prompts = (Prompt(text="The quick brown fox", max_tokens=6), Prompt(text="one two", max_tokens=6))
    stand = Stand(folder=tmp_path, model=make_random(tmp_path / "tiny", size="tiny"), plugin=PLUGIN)
    try:
        validation = {"prompts": [prompt.model_dump() for prompt in prompts]}
        expected = stand.capture(serve={"num_threads": 1}, validation=validation).answers
        content = stand.pack.read_bytes()
        stand.pack.unlink()
        record_path(stand.pack).unlink()
        assert stand.restore("real-1", materialize="async").source == "recovery"
        assert stand.ask(prompts) == expected
        wait_for("the pack", lambda: pack_status(stand).state is DONE)
        assert stand.pack.read_bytes() == content
        assert stand.restore("real-2").source == "native"
        assert stand.ask(prompts) == expected
        stand.stop_all()
        stand.assert_nothing_left()
    finally:
        stand.stop_all()
        stand.tools.host.close()
