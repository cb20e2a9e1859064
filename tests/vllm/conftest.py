"""Real vLLM on a processor, in an environment of its own: `./run test-vllm`; `./run test` runs what needs no server.

Each vLLM lives in a process of its own, because one process has one of it; what it found comes back as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
_TIMEOUT_S = 1500  # two cores that others use too: imports alone have taken two minutes

# Nobody outside is asked, and no thread spins while it waits for work.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "GOMP_SPINCOUNT": "1000",
    "HF_HUB_OFFLINE": "1",
    "KMP_BLOCKTIME": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}

Play = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Run a script of this folder in a new process; it writes a JSON object to its first word, ours are the others."""

    def run(script: str, *words: object, environment: dict[str, str] | None = None) -> dict[str, Any]:
        result = tmp_path_factory.mktemp("result") / "found.json"
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(result), *map(str, words)],
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{script} {words}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found

    return run
