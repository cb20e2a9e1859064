"""A vLLM in this process, and what became of it. Set-up of tests, not a test.

life.py RESULT MODEL            vLLM alone: its answers
life.py RESULT MODEL FOLDER     a watched load, an export, and wakes from the checkpoint, the pack and nothing
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import ExportBody, Exported, PackSource, Request, Verb, WakeBody, WakeReport
from coldsnap.engines.control import Call
from coldsnap.engines.export import export_memory
from coldsnap.engines.local_model import checkpoint_files, resolve_local
from coldsnap.engines.observer import Observer
from coldsnap.engines.vllm import plugin
from coldsnap.engines.vllm.hostpool import HostPool
from coldsnap.engines.vllm.loading import Load, supply
from coldsnap.engines.wake import fill_memory
from coldsnap.store.stateroot import StateRoot

PROMPTS = ("The capital of France is", "Two plus two is", "Once upon a time there was a fox that")
NUM_TOKENS = 8


def engine(folder: str, load_format: str) -> Any:
    """A vLLM with the model, in this process."""
    import vllm._custom_ops

    from vllm import LLM

    # On a processor vLLM packs matrices for oneDNN and throws the parameters away; on a GPU there is no such step.
    vllm._custom_ops._supports_onednn = False
    return LLM(
        folder,
        load_format=load_format,
        enforce_eager=True,
        max_model_len=256,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def answers(llm: Any) -> list[list[int]]:
    """The tokens that follow each prompt, one prompt at a time."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids) for prompt in PROMPTS]


@dataclass
class Life:
    """One model, its memory, and where its files go."""

    model: Path
    folder: Path
    memory: HostPool = field(default_factory=HostPool)
    observer: Observer = field(default_factory=Observer)

    def __post_init__(self) -> None:
        pinned = resolve_local(self.model)
        self.source = ModelSource(model_id=pinned.id, revision=pinned.revision, metadata_sha256=pinned.metadata_sha256)
        self.state = self.folder / "state"
        self.state.mkdir(mode=0o700)
        StateRoot.open(self.state)
        supply(self._hand_out)
        self.num_asked = 0

    def export(self, name: str) -> Exported:
        out = self.folder / name
        out.mkdir(mode=0o700)
        return export_memory(
            ExportBody(state_root=str(self.state), out_dir=str(out), capture_id="c" * 32),
            memory=self.memory,
            observation=self.observer.observation(self.memory.allocations),
            source=self.source,
            model_path=self.model,
            worker="w0",
            rank=0,
            call=_call(Verb.EXPORT),
        )

    def wake(self, exported: Exported, source: PackSource) -> WakeReport:
        assert exported.pack is not None
        assert exported.residual is not None
        body = WakeBody(
            source=source,
            native_manifest=exported.native_manifest.path,
            recovery_manifest=exported.recovery_manifest.path,
            pack=exported.pack.path,
            pack_sha256=exported.pack.sha256,
            pack_bytes=exported.pack.bytes,
            residual=exported.residual.path,
            residual_sha256=exported.residual.sha256,
            model_path=str(self.model),
        )
        return fill_memory(body, memory=self.memory, call=_call(Verb.WAKE), started_with=self.source)

    def _hand_out(self, vllm_config: Any) -> Load:
        self.num_asked += 1
        return Load(observer=self.observer, memory=self.memory, files=tuple(checkpoint_files(self.model)))


def _call(verb: Verb) -> Call:
    return Call(Request(id=1, verb=verb), lambda _frame: None)


def watched(model: Path, folder: Path) -> dict[str, Any]:
    """Everything that happened."""
    plugin.register()
    life = Life(model, folder)
    llm = engine(str(model), "coldsnap")
    found: dict[str, Any] = {"num_asked": life.num_asked, "answers": answers(llm)}
    first = life.export("first")
    found["allocated"] = sum(one.size for one in life.memory.allocations)
    found["first"] = first.model_dump(mode="json")
    life.memory.unmap()
    found["recovery"] = life.wake(first, PackSource.RECOVERY).model_dump(mode="json")
    found["answers_after_recovery"] = answers(llm)
    found["second"] = life.export("second").model_dump(mode="json")
    life.memory.unmap()
    life.wake(first, PackSource.NATIVE)
    found["answers_after_native"] = answers(llm)
    life.memory.unmap()
    life.memory.remap()
    found["answers_of_zeros"] = answers(llm)
    life.wake(first, PackSource.NATIVE)
    observation = life.observer.observation(life.memory.allocations)
    victim = max(observation.extents, key=lambda one: one.range.size)
    with life.memory.view(victim.range.ptr + victim.range.size // 2, 1) as view:
        view[0] ^= 0x40
    found["flipped"] = {"tensor": victim.writes[0].tensor, "size": victim.range.size}
    found["third"] = life.export("third").model_dump(mode="json")
    return found


if __name__ == "__main__":
    result, model, *folders = map(Path, sys.argv[1:])
    told = watched(model, folders[0]) if folders else {"answers": answers(engine(str(model), "auto"))}
    result.write_text(json.dumps(told), encoding="utf-8")
