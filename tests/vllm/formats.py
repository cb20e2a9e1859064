"""formats.py RESULT: what vLLM knows after it has loaded its plugins, and after it did so once more."""

import json
import sys
from pathlib import Path

from vllm import plugins


def known() -> bool:
    """Whether load format `coldsnap` is one of vLLM's."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    return "coldsnap" in _LOAD_FORMAT_TO_MODEL_LOADER


if __name__ == "__main__":
    plugins.load_general_plugins()
    imported = "coldsnap.engines.vllm.loader" in sys.modules
    once = known()
    plugins.plugins_loaded = False  # as in each further process that is forked
    plugins.load_general_plugins()
    found = {"registered": once, "again": known(), "vllm_loader_imported": imported}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
