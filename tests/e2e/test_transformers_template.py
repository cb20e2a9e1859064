"""A template of a real engine, frozen by a real CRIU: built again from what it read before, wherever it lands.

On the processor, because what is shown here is the engine's half; `test_template.py` shows the devices.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping

import pytest

from coldsnap.core.drivers import DriverId
from coldsnap.core.messages import Answer, Prompt
from coldsnap.core.request import Execution
from coldsnap.engines.transformers.checkpoints import make_random
from coldsnap.engines.transformers.plugin import TransformersPlugin
from coldsnap.errors import AcceptanceFailed
from coldsnap.ops.live import service_status
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.stand import UNSEEN, Stand

pytestmark = [pytest.mark.criu, pytest.mark.model]

PROMPTS = (*(prompt for prompt in UNSEEN if prompt.text), Prompt(text="0 1 2 3", max_tokens=12))


class OnPaper(TransformersPlugin):
    """Says that it computes on a GPU, and computes on the processor."""

    def options(self, serve: Mapping[str, object]) -> dict[str, object]:
        return super().options({name: value for name, value in serve.items() if name != "gpu"})

    def execution(self, options: Mapping[str, object], *, unit: str = "u0") -> Execution:
        execution = super().execution(options, unit=unit)
        (worker,) = execution.workers
        return execution.model_copy(update={"workers": (worker.model_copy(update={"device_slots": (0,)}),)})


@pytest.fixture(scope="module")
def stand(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A template of the Transformers engine, whose source loaded, answered, and ended."""
    folder = tmp_path_factory.mktemp("transformers-template")
    one = Stand(
        folder=folder,
        model=make_random(folder / "model", size="tiny"),
        plugin=OnPaper(),
        driver=DriverId.N580,
        gpus=GpuRack.make(folder / "gpus", 1),
    )
    one.capture(serve={"num_threads": 1})
    yield one
    one.stop_all()
    one.tools.host.close()


@pytest.fixture(scope="module")
def expected(stand: Stand) -> tuple[Answer, ...]:
    """From a cold process that nobody captured."""
    return stand.cold(PROMPTS)


def test_copies_side_by_side_give_the_cold_answers(stand: Stand, expected: tuple[Answer, ...]) -> None:
    ports = {"left": free_port(), "right": free_port()}
    for name, port in ports.items():
        assert stand.restore(f"side-{name}", name=name, port=port).source == "native"
    for port in ports.values():
        assert stand.ask(PROMPTS, port) == expected
    left, right = (service_status(stand.tools, name).pids for name in ports)
    assert set(left).isdisjoint(right)


def test_a_recovery_then_sleep_and_wake(stand: Stand, expected: tuple[Answer, ...]) -> None:
    assert stand.restore("recovery-1", weights="recovery").source == "recovery"
    assert stand.ask(PROMPTS) == expected
    stand.sleep("sleep-1")
    stand.wake("wake-1")
    assert stand.ask(PROMPTS) == expected


def test_a_restore_without_hydration_is_caught(stand: Stand) -> None:
    with pytest.raises(AcceptanceFailed):
        stand.restore("negative-1", negative_control=True)
    stand.assert_nothing_left()


def test_the_image_holds_nothing_of_the_model(stand: Stand) -> None:
    """Not even a zero page for it: nothing was reserved when the template was frozen."""
    stand.prepare("image-1")
    prepared = stand.tools.state.prepared / stand.loaded.capsule_digest("u0").hex
    pack = stand.tools.store.path(stand.result.pack_digests[0]).read_bytes()
    pieces = {pack[at : at + 64] for at in range(0, len(pack), 4096) if any(pack[at : at + 64])}
    assert len(pieces) > 10
    for path in prepared.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert [piece for piece in pieces if piece in content] == [], path


def test_a_native_restore_needs_no_checkpoint(stand: Stand, expected: tuple[Answer, ...]) -> None:
    hidden = stand.folder / "hidden"
    stand.model.rename(hidden)
    try:
        assert stand.restore("no-checkpoint", weights="native").source == "native"
        assert stand.ask(PROMPTS) == expected
    finally:
        stand.stop_all()
        shutil.move(hidden, stand.model)
