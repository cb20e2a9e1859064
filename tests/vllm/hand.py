"""A plain vLLM in this process that was told by its environment to export at its sleep. Set-up of tests, not a test.

hand.py RESULT MODEL [FORMAT]  vLLM as anybody starts it: what became of the start, and its answers
hand.py RESULT MODEL OUT       sleeps and wakes of every kind, by the backend that vLLM's worker would ask; OUT is the
                               folder of this worker's export

A processor has no sleep mode in vLLM, so nobody but this script asks the backend.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from life import answers, engine  # type: ignore[import-not-found] # a script beside this one

from coldsnap.core.digest import Digest
from coldsnap.errors import PayloadRejected, UsageError


def started(model: Path, load_format: str) -> dict[str, Any]:
    """The answers, or why there is none."""
    try:
        return {"answers": answers(engine(str(model), load_format))}
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        return {"error": f"{type(error).__name__}: {error}"}


def nights(model: Path, out: Path) -> dict[str, Any]:
    """Everything that happened."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from coldsnap.engines.vllm.byhand import by_hand

    llm = engine(str(model), "auto")
    hand = by_hand()
    assert hand is not None
    found: dict[str, Any] = {"answers": answers(llm), "names": sorted(one.name for one in out.parent.iterdir())}
    config = llm.llm_engine.vllm_config.model_config
    found["backend"] = config.sleep_mode_backend
    backend = SleepModeBackendFactory.create_backend(config)
    try:
        backend.suspend(2)
    except UsageError as error:
        found["level 2 at first"] = str(error)
    backend.suspend(1)
    found["asleep"] = [backend.state(), hand._memory.mapped]
    found["files"] = {one.name: str(Digest.of(one.read_bytes())) for one in out.iterdir()}
    backend.resume(["weights"])
    backend.resume(["kv_cache"])
    found["awake"] = [backend.state(), hand._memory.mapped]
    found["answers from the pack"] = answers(llm)
    backend.suspend(1)
    found["files again"] = {one.name: str(Digest.of(one.read_bytes())) for one in out.iterdir()}
    pack = out / "model-weights.pack"
    content = bytearray(pack.read_bytes())
    pack.unlink()
    backend.resume()
    found["answers from the checkpoint"] = answers(llm)
    backend.suspend(1)
    found["pack again"] = str(Digest.of(pack.read_bytes()))
    content[len(content) // 2] ^= 0x40
    pack.unlink()
    pack.write_bytes(content)
    try:
        backend.resume()
    except PayloadRejected as error:
        found["damaged"] = str(error)
    found["refused"] = [backend.state(), hand._memory.mapped]
    pack.unlink()
    backend.resume()
    found["answers after damage"] = answers(llm)
    backend.suspend(2)
    backend.resume()
    found["answers after level 2"] = answers(llm)
    hand._memory.unmap()
    hand._memory.remap()
    found["answers of zeros"] = answers(llm)
    return found


if __name__ == "__main__":
    result, model, *words = sys.argv[1:]
    out = Path(words[0]) if words and "/" in words[0] else None
    told = nights(Path(model), out) if out is not None else started(Path(model), *(words or ["auto"]))
    Path(result).write_text(json.dumps(told), encoding="utf-8")
