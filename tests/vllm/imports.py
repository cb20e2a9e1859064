"""imports.py RESULT MODEL: what a template imports ahead, and what a start of vLLM after it imports still."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from life import engine  # type: ignore[import-not-found] # a script beside this one

from coldsnap.engines.vllm.prepare import import_engine
from coldsnap.engines.vllm.server import import_server

if __name__ == "__main__":
    result, model = map(Path, sys.argv[1:])
    import_server()
    missing = import_engine(model)
    ahead = set(sys.modules)
    touched = torch.cuda.is_initialized()
    engine(str(model), "auto")
    late = sorted(name for name in set(sys.modules) - ahead if name.startswith("vllm."))
    found = {"missing": missing, "ahead": sorted(ahead), "touched": touched, "late": late}
    result.write_text(json.dumps(found), encoding="utf-8")
