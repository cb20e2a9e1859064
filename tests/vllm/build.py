"""A model that is loaded and written, or built without a byte and filled from what was written. Set-up of tests.

build.py RESULT load MODEL FOLDER MODEL DTYPE                    FOLDER gets the export
build.py RESULT native|recovery MODEL FOLDER CHECKPOINT DTYPE    a build of MODEL, filled from there; CHECKPOINT is the
                                                                 same model with its data
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from life import answers  # type: ignore[import-not-found] # a script beside this one

from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import ExportBody, Exported, PackSource, Request, Verb, WakeBody
from coldsnap.engines.control import Call
from coldsnap.engines.export import export_memory
from coldsnap.engines.local_model import checkpoint_files, resolve_local
from coldsnap.engines.observer import Observer
from coldsnap.engines.relocation import Relocation
from coldsnap.engines.vllm import plugin
from coldsnap.engines.vllm.compat import keep_parameters
from coldsnap.engines.vllm.hostpool import HostPool
from coldsnap.engines.vllm.loading import Load, Way, supply
from coldsnap.engines.wake import fill_memory
from coldsnap.store.stateroot import StateRoot

BASES = {Way.LOAD: 0x5000_0000_0000, Way.BUILD: 0x5100_0000_0000}


class Maker:
    """One model in this process."""

    def __init__(self, way: Way, model: Path, folder: Path, pinned: Path) -> None:
        found = resolve_local(pinned)
        self.source = ModelSource(model_id="m", revision=found.revision, metadata_sha256=found.metadata_sha256)
        self.way, self.model, self.folder = way, model, folder
        self.memory = HostPool(base=BASES[way])
        self.observer = Observer()
        self.wake: WakeBody | None = None
        self.told: dict[str, Any] = {}
        supply(self._hand_out)

    def layout(self) -> dict[str, Any]:
        """Allocations, extents and labels, by their places in the allocations."""
        allocations = self.memory.allocations
        observation = self.observer.observation(allocations)

        def place(ptr: int) -> list[int]:
            number = max(index for index, one in enumerate(allocations) if one.ptr <= ptr)
            return [number, ptr - allocations[number].ptr]

        return {
            "allocations": [[one.size, one.tag] for one in allocations],
            "extents": [
                [
                    place(one.range.ptr),
                    one.range.size,
                    one.range.semantic_id,
                    [[place(w.ptr), w.size, w.tensor, w.file, w.file_offset] for w in one.writes],
                ]
                for one in observation.extents
            ],
            "labels": sorted([place(one.ptr), one.size, one.reason] for one in observation.labels),
        }

    def export(self, name: str) -> Exported:
        state, out = self.folder / "state", self.folder / name
        StateRoot.open(state)
        out.mkdir(mode=0o700)
        return export_memory(
            ExportBody(state_root=str(state), out_dir=str(out), capture_id="c" * 32),
            memory=self.memory,
            observation=self.observer.observation(self.memory.allocations),
            source=self.source,
            model_path=self.model,
            worker="w0",
            rank=0,
            call=Call(Request(id=1, verb=Verb.EXPORT), lambda _frame: None),
        )

    def _hand_out(self, vllm_config: Any) -> Load:
        files = tuple(checkpoint_files(self.model))
        return Load(
            observer=self.observer,
            memory=self.memory,
            files=files,
            way=self.way,
            is_template=True,
            laid_out=self._laid_out,
        )

    def _laid_out(self) -> None:
        self.told["layout"] = self.layout()
        if self.wake is None:
            return
        built = self.observer.observation(self.memory.allocations).extents
        relocation = Relocation(allocations=self.memory.allocations, ranges=tuple(one.range for one in built))
        report = fill_memory(
            self.wake,
            memory=self.memory,
            call=Call(Request(id=1, verb=Verb.WAKE), lambda _frame: None),
            started_with=self.source,
            relocation=relocation,
        )
        self.told["wake"] = report.model_dump(mode="json")


def engine(folder: Path, dtype: str) -> Any:
    from vllm import LLM

    keep_parameters()
    return LLM(
        str(folder),
        load_format="coldsnap",
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def wake_body(exported: Exported, source: PackSource, checkpoint: Path) -> WakeBody:
    assert exported.pack is not None
    assert exported.residual is not None
    return WakeBody(
        source=source,
        native_manifest=exported.native_manifest.path,
        recovery_manifest=exported.recovery_manifest.path,
        pack=exported.pack.path,
        pack_sha256=exported.pack.sha256,
        pack_bytes=exported.pack.bytes,
        residual=exported.residual.path,
        residual_sha256=exported.residual.sha256,
        model_path=str(checkpoint),
    )


def main(way: str, model: Path, folder: Path, checkpoint: Path, dtype: str) -> dict[str, Any]:
    """Everything that happened."""
    plugin.register()
    maker = Maker(Way.LOAD if way == "load" else Way.BUILD, model, folder, checkpoint)
    if maker.way is Way.BUILD:
        exported = Exported.model_validate_json((folder / "exported.json").read_bytes())
        maker.wake = wake_body(exported, PackSource(way), checkpoint)
    try:
        llm = engine(model, dtype)
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        return {**maker.told, "error": f"{type(error).__name__}: {error}"}
    maker.told["answers"] = answers(llm)
    if maker.way is Way.LOAD:
        exported = maker.export("out")
        (folder / "exported.json").write_text(exported.model_dump_json())
    maker.told["allocated"] = sum(one.size for one in maker.memory.allocations)
    maker.told["exported"] = exported.model_dump(mode="json")
    return maker.told


if __name__ == "__main__":
    result, way, model, folder, checkpoint, dtype = sys.argv[1:]
    told = main(way, Path(model), Path(folder), Path(checkpoint), dtype)
    Path(result).write_text(json.dumps(told), encoding="utf-8")
