"""Tiny checkpoints of real architectures, made once a session."""

from pathlib import Path

import pytest

from coldsnap.engines.transformers.checkpoints import make_random


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers."""
    return make_random(tmp_path_factory.mktemp("checkpoints") / "tiny", size="tiny")
