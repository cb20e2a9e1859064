"""One model by every snapshot driver: cold start, capture, restores, and every check of the demo.

    python -m benchmarks.drivers [--model FOLDER] [--drivers n610,n580] [--serve NAME=VALUE ...] [--rounds N]

as root. Cold starts are made once and compared with every driver's restores: the same command, prompts and options.
The prompts that judge are four that no capture saw, 32 tokens each, answered by a separate cold process. Each driver's
part has the claims (``claims``), the capture by phase, sizes, and restores as ``benchmarks.restore`` reports them.
Without ``--drivers``: those that the engine, as asked, has here. Without ``--model`` the fake engine on a fake GPU is
measured, which shows what everything but model and device takes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._proof_tools import Subject, fake_subject, real_subject
from benchmarks.harness import arguments, emit, engine_option
from benchmarks.restore import MODES, timelines

from coldsnap.core.drivers import DriverId
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import ColdsnapError
from coldsnap.ops.demo import DemoResult, run_demo
from coldsnap.ops.demo_parts import UNSEEN, ColdStarts, Story
from coldsnap.ops.tools import Tools

NUM_TOKENS = 32


def story_of(driver: DriverId, serve: Mapping[str, Any], *, num_cold_starts: int) -> Story:
    """The demo's story with this driver: prompts of 32 tokens, packs in memory, everything by the verbs."""
    return Story(
        name=f"coldsnap-{driver.value}",
        driver=driver,
        serve=serve,
        environment=library_path(os.environ),
        stage=True,
        unseen=tuple(prompt.model_copy(update={"max_tokens": NUM_TOKENS}) for prompt in UNSEEN),
        question=None,
        num_cold_starts=num_cold_starts,
        num_restores=1,
        by_command=False,
    )


def library_path(environment: Mapping[str, str]) -> dict[str, str]:
    """What an engine needs on machines that have the driver's library in a place of its own."""
    return {name: environment[name] for name in ("LD_LIBRARY_PATH",) if environment.get(name)}


def tell(
    tools: Tools,
    plugin: EnginePlugin,
    model: Path,
    folder: Path,
    story: Story,
    *,
    cold: ColdStarts | None,
    rounds: Mapping[str, int],
) -> tuple[DemoResult, dict[str, Any]]:
    """One driver's part, and the result whose cold starts the next one may use."""
    result = run_demo(tools, plugin, model, folder, story=story, cold=cold)
    restores = timelines(tools, result.capture.artifact_path, rounds=rounds)
    said = result.document()
    claims = {
        "tokens_equal": result.tokens_equal,
        "negative_control_detected": result.negative_control_detected,
        "old_pids_gone": result.old_pids_gone,
        "no_weights_in_image": result.windows_searched > 0 and result.windows_in_image == 0,
    }
    return result, {"claims": claims, "story": said, "restores": restores}


def main() -> int:
    """Measure and print; exit status 1 when a driver failed or a claim did not hold."""
    parser = arguments("one model by every snapshot driver")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--drivers", default="", help="n610,n580 on a GPU, host without")
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    options = parser.parse_args()
    count = options.rounds or (1 if options.quick else 3)
    rounds = dict.fromkeys(MODES, count)
    parts: dict[str, Any] = {}
    cold: ColdStarts | None = None
    with tempfile.TemporaryDirectory(prefix="coldsnap-bench-", dir="/var/tmp") as name:
        work = Path(name)
        subject = subject_of(work, options.model, options.serve)
        execution = subject.plugin.execution(subject.plugin.options(subject.serve))
        usual = ["n610", "n580"] if any(worker.device_slots for worker in execution.workers) else ["host"]
        try:
            for driver in map(DriverId, options.drivers.split(",") if options.drivers else usual):
                story = story_of(driver, subject.serve, num_cold_starts=count)
                try:
                    result, parts[driver.value] = tell(
                        subject.tools, subject.plugin, subject.model(), work, story, cold=cold, rounds=rounds
                    )
                    cold = result.cold_starts
                except ColdsnapError as error:
                    parts[driver.value] = {"error": f"{type(error).__name__}: {error}"}
        finally:
            subject.close()
    head = {"model": str(options.model or "fake"), "serve": dict(subject.serve)}
    emit("drivers", {**head, "drivers": parts}, options.out, commit=options.commit)
    return 0 if all(all(part.get("claims", {"": False}).values()) for part in parts.values()) else 1


def subject_of(work: Path, model: Path | None, serve: Sequence[str]) -> Subject:
    """A checkpoint with the Transformers engine as asked, or the fake engine."""
    if model is None:
        return fake_subject(work, work, size="", serve=serve)
    made = real_subject(work, work, size="", serve=serve)
    asked = dict(map(engine_option, serve))
    return replace(made, serve=asked, model=lambda: model, small_model=lambda: model)


if __name__ == "__main__":
    sys.exit(main())
