"""What all tests share: a CRIU that works, how Hypothesis draws, and Ctrl-C.

A machine that gives a test no processor for a second must not fail it, so nothing is timed. The examples are the same
in every run: a suite that passes here passes there. `--hypothesis-profile=explore` draws new ones.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from coldsnap.capsule.criu import Criu, find_criu
from coldsnap.errors import MissingCapability

_EVERYWHERE = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("steady", _EVERYWHERE, derandomize=True, database=None)
settings.register_profile("explore", _EVERYWHERE)
settings.load_profile("steady")

# A shell that starts the tests in the background has Ctrl-C ignored, also in what the tests start to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def criu() -> Criu:
    """A CRIU that works here. The one place that may skip; the project's runner counts a skip as a failure."""
    if os.geteuid() != 0:
        pytest.skip("real process trees need root")
    try:
        return find_criu()
    except MissingCapability as error:
        pytest.skip(str(error))
