"""What vLLM calls in each of its processes, several times: entry point `coldsnap` of `vllm.general_plugins`.

Nothing happens, and vllm is not imported, in a process that coldsnap has not started and that nobody told to export.
"""

from __future__ import annotations

import os

from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm.handsettings import read_hand_settings

__all__ = ["register"]


def register() -> None:
    """Make load format and sleep-mode backend `coldsnap` known, and what the format is to load. Idempotent.

    By hand, vLLM's own load formats become that one. Raises as `read_hand_settings`, which ends vLLM's start.
    """
    hand = read_hand_settings(os.environ)
    if hand is None and not os.environ.get(SETTINGS_VARIABLE):
        return
    from coldsnap.engines.vllm import backend, byhand, inner, loader, loading

    loader.register()
    backend.register()
    if hand is not None:
        loader.watch_every_format()
    if not loading.is_supplied():
        if hand is not None:
            loading.supply(lambda vllm_config: byhand.supplied(hand, vllm_config))
        else:
            loading.supply(lambda vllm_config: inner.supplied(vllm_config, os.environ))
