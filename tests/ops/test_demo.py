"""The demo passes only when every claim holds, and its figures are medians of what was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coldsnap.core.digest import Digest
from coldsnap.ops.demo import DemoResult
from coldsnap.ops.demo_parts import ColdStarts
from coldsnap.ops.outside import StartupTimeline
from coldsnap.ops.preparing import prepare
from coldsnap.ops.tools import Tools
from coldsnap.ops.windows import NUM_WINDOWS, windows_in_images

from .conftest import Shop  # isort: skip


def timeline(first_token_s: float) -> StartupTimeline:
    return StartupTimeline(port_open_s=first_token_s / 4, http_ready_s=first_token_s / 2, first_token_s=first_token_s)


@pytest.fixture
def result(shop: Shop) -> DemoResult:
    return DemoResult(
        model="m",
        tokens_equal=True,
        negative_control_detected=True,
        old_pids_gone=True,
        num_prompts=5,
        question="q",
        restored_answer="a",
        cold_starts=ColdStarts(expected=(), answer="a", timelines=tuple(timeline(one) for one in (8.0, 40.0, 10.0))),
        restored=[timeline(one) for one in (2.0, 1.0, 9.0)],
        command=timeline(3.0),
        prepare_s=0.5,
        capture=shop.result,
        windows_searched=200,
        windows_in_image=0,
    )


def test_it_passes_when_everything_holds(result: DemoResult) -> None:
    assert result.passed


@pytest.mark.parametrize(
    "broken",
    [
        {"tokens_equal": False},
        {"negative_control_detected": False},
        {"old_pids_gone": False},
        {"windows_in_image": 1},
        {"windows_searched": 0},
    ],
)
def test_one_broken_claim_is_enough(result: DemoResult, broken: dict[str, object]) -> None:
    assert not replace(result, **broken).passed  # type: ignore[arg-type]


def test_figures_are_medians(result: DemoResult) -> None:
    said = result.document()
    assert said["cold_start_to_first_token_s"] == 10.0
    assert said["restore_to_first_token_s"] == 2.0
    assert said["speedup"] == 5.0
    assert [sample["first_token_s"] for sample in said["cold_samples"]] == [8.0, 40.0, 10.0]
    for name in ("image_bytes", "pack_bytes", "residual_bytes"):
        assert said[name] == getattr(result.capture, name)


def test_windows_of_a_pack_are_looked_for_in_what_is_prepared(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    capsule = shop.loaded.capsule_digest("u0")
    assert windows_in_images(shop.tools, shop.result.pack_digests, [capsule]) == (NUM_WINDOWS, 0)
    process = shop.tools.state.prepared / capsule.hex / "process"
    pack = shop.tools.store.path(shop.result.pack_digests[0]).read_bytes()
    (process / "pages-9.img").write_bytes(b"\1" * 4097 + pack)
    assert windows_in_images(shop.tools, shop.result.pack_digests, [capsule]) == (NUM_WINDOWS, NUM_WINDOWS)


def test_a_pack_of_one_value_has_no_window_worth_looking_for(tools: Tools) -> None:
    digest = Digest.of(b"zeros")
    tools.store.path(digest).write_bytes(bytes(8192))
    assert windows_in_images(tools, [digest], []) == (0, 0)
