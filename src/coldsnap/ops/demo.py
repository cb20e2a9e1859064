"""The demo: a real model started cold, captured, killed, restored, and asked the same things.

What it claims it checks: expected answers come from a separate cold process, the prompts are ones the captured
process never saw, the captured PIDs are proved gone, hydration is skipped once on purpose and must be caught,
and random windows of the pack are looked for in the process image.

Times are what a client outside the process tree sees. ``restore_to_first_token`` begins when the verb ``restore``
is called, everything being prepared; ``command_to_first_token`` begins when the shell starts ``coldsnap restore``, and
so has the start of that Python program in it.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.core.request import DriverId
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.ops.capture import CaptureResult, capture
from coldsnap.ops.choosing import choose_driver
from coldsnap.ops.demo_parts import ACCEPTANCE, ColdStarts, Restores, Story, cold_starts, free_port, new_id
from coldsnap.ops.outside import StartupTimeline
from coldsnap.ops.planning import PlannedCapture, plan_capture
from coldsnap.ops.recipe import Recipe, RecipeValidation
from coldsnap.ops.tools import Tools
from coldsnap.ops.windows import NUM_WINDOWS, windows_in_images

__all__ = ["DemoResult", "run_demo"]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo saw. Times in seconds, sizes in bytes; raw samples beside every median."""

    model: str
    tokens_equal: bool
    negative_control_detected: bool
    old_pids_gone: bool
    num_prompts: int
    question: str | None
    restored_answer: str
    cold_starts: ColdStarts
    restored: Sequence[StartupTimeline]
    command: StartupTimeline | None
    prepare_s: float
    capture: CaptureResult
    windows_searched: int
    windows_in_image: int
    restore_phases: Sequence[dict[str, float]] = field(default=())
    transfers: Sequence[Mapping[str, str]] = field(default=())
    driver: str = DriverId.HOST.value

    @property
    def cold_s(self) -> float:
        """Median cold start to first token."""
        return statistics.median(one.first_token_s for one in self.cold_starts.timelines)

    @property
    def restore_s(self) -> float:
        """Median restore to first token."""
        return statistics.median(one.first_token_s for one in self.restored)

    @property
    def passed(self) -> bool:
        """Whether every claim held."""
        return (
            self.tokens_equal
            and self.negative_control_detected
            and self.old_pids_gone
            and self.windows_searched > 0
            and self.windows_in_image == 0
        )

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "driver": self.driver,
            "tokens_equal": self.tokens_equal,
            "negative_control_detected": self.negative_control_detected,
            "old_pids_gone": self.old_pids_gone,
            "windows_searched": self.windows_searched,
            "windows_in_image": self.windows_in_image,
            "num_prompts": self.num_prompts,
            "question": self.question,
            "cold_answer": self.cold_starts.answer,
            "restored_answer": self.restored_answer,
            "cold_start_to_first_token_s": self.cold_s,
            "restore_to_first_token_s": self.restore_s,
            "command_to_first_token_s": self.command.first_token_s if self.command is not None else None,
            "speedup": self.cold_s / self.restore_s,
            "prepare_s": self.prepare_s,
            "image_bytes": self.capture.image_bytes,
            "capsule_bytes": self.capture.capsule_bytes,
            "pack_bytes": self.capture.pack_bytes,
            "residual_bytes": self.capture.residual_bytes,
            "pack_digests": [str(digest) for digest in self.capture.pack_digests],
            "cold_samples": [_timeline(one) for one in self.cold_starts.timelines],
            "restore_samples": [_timeline(one) for one in self.restored],
            "restore_phases": list(self.restore_phases),
            "restore_transfers": [dict(one) for one in self.transfers],
            "capture_seconds": dict(self.capture.seconds),
        }


def run_demo(
    tools: Tools,
    plugin: EnginePlugin,
    model: Path,
    folder: Path,
    *,
    story: Story = Story(),  # noqa: B008 - frozen
    cold: ColdStarts | None = None,
) -> DemoResult:
    """Run it all below ``folder`` (new files only) with the state root of ``tools``.

    ``cold``: cold starts of an earlier run with the same model, engine and prompts; else they are made.
    Raises what the verbs raise; nothing it started is left.
    """
    port = free_port()
    planned = _plan(tools, plugin, model, folder / f"{story.name}.json", port, story)
    say = tools.reporter
    cold = cold or cold_starts(tools, plugin, planned, port, story)
    say.note(f"cold start to first token: {statistics.median(one.first_token_s for one in cold.timelines):.2f} s")
    captured = capture(tools, planned.request, planned.model)
    gone = not any(_same_process(pid, ticks) for pid, ticks in captured.processes)
    restores = Restores(tools, captured.artifact_path, port, story)
    prepare_s = restores.prepare()
    capsules = tuple(image.digest for image in captured.artifact.capsule.images)
    with say.phase(f"look for {NUM_WINDOWS} windows of the pack in the process image"):
        searched, found = windows_in_images(tools, captured.pack_digests, capsules)
    command: StartupTimeline | None = None
    if story.by_command:
        with say.phase("restore by command"), restores.by_command() as (command, client):
            given = restores.answers(client)
    for index in range(story.num_restores):
        restores.prepare()
        with say.phase(f"restore {index + 1} of {story.num_restores}"):
            answers = restores.by_call(ask=not story.by_command and index == 0)
        if answers is not None:
            given = answers
    say.note(f"restore to first token: {statistics.median(one.first_token_s for one in restores.timelines):.2f} s")
    with say.phase("negative control: restore without hydration"):
        detected = restores.negative_control()
    return DemoResult(
        model=planned.model.id,
        driver=captured.artifact.snapshot_driver.id.value,
        tokens_equal=given == (cold.expected, cold.answer),
        negative_control_detected=detected,
        old_pids_gone=gone,
        num_prompts=len(story.unseen) + (story.question is not None),
        question=story.question,
        restored_answer=given[1],
        cold_starts=cold,
        restored=restores.timelines,
        command=command,
        prepare_s=prepare_s,
        capture=captured,
        windows_searched=searched,
        windows_in_image=found,
        restore_phases=restores.phases,
        transfers=restores.transfers,
    )


def _plan(tools: Tools, plugin: EnginePlugin, model: Path, output: Path, port: int, story: Story) -> PlannedCapture:
    recipe = Recipe(
        name=story.name,
        engine=plugin.name,
        model=str(model.absolute()),
        serve=dict(story.serve),
        environment=dict(story.environment),
        stage=story.stage,
        validation=RecipeValidation(prompts=ACCEPTANCE),
    )
    execution = plugin.execution(plugin.options(recipe.serve))
    driver = story.driver or choose_driver(tools, plugin, execution)
    with tools.reporter.phase("pin the model"):
        return plan_capture(recipe, plugin, operation_id=new_id("capture"), output=output, driver=driver, port=port)


def _same_process(pid: int, start_ticks: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(text.rsplit(")", 1)[1].split()[19]) == start_ticks


def _timeline(one: StartupTimeline) -> dict[str, float]:
    return {
        "port_open_s": one.port_open_s,
        "http_ready_s": one.http_ready_s,
        "first_token_s": one.first_token_s,
    }


def remove_demo_files(folder: Path) -> None:
    """Remove what a demo wrote."""
    shutil.rmtree(folder, ignore_errors=True)
