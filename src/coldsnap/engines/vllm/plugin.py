"""What vLLM calls in each of its processes, several times: entry point `coldsnap` of `vllm.general_plugins`.

Nothing happens, and vllm is not imported, in a process that coldsnap has not started.
"""

from __future__ import annotations

import os

from coldsnap.engines.settings import SETTINGS_VARIABLE

__all__ = ["register"]


def register() -> None:
    """Make load format and sleep-mode backend `coldsnap` known, and what the format is to load. Idempotent."""
    if not os.environ.get(SETTINGS_VARIABLE):
        return
    from coldsnap.engines.vllm import backend, inner, loader, loading

    loader.register()
    backend.register()
    if not loading.is_supplied():
        loading.supply(lambda vllm_config: inner.supplied(vllm_config, os.environ))
