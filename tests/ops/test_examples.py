"""The example model is made once, and a maker that fails says its last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.errors import HostError, UserError
from coldsnap.ops.examples import example_model
from coldsnap.testing.engine import PLUGIN, FakePlugin


class Maker(FakePlugin):
    """Has an example model that ``script`` makes."""

    def __init__(self, script: str) -> None:
        self.script = script

    def example_model_command(self, cache: Path, *, random: str | None = None) -> tuple[tuple[str, ...], Path] | None:
        path = cache / (random or "made")
        return ("-c", self.script, str(path)), path


MAKE = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'count').open('a').write('x')"


def test_it_is_made_once(tmp_path: Path) -> None:
    for _ in range(2):
        assert example_model(Maker(MAKE), tmp_path / "cache") == tmp_path / "cache" / "made"
    assert (tmp_path / "cache" / "made" / "count").read_text() == "x"


def test_random_weights_are_another_model(tmp_path: Path) -> None:
    assert example_model(Maker(MAKE), tmp_path, random="tiny") == tmp_path / "tiny"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('no network here')", "no network here"),
        ("raise ValueError('the hub is gone')", "ValueError: the hub is gone"),
        ("pass", "it said nothing"),
    ],
)
def test_a_maker_that_fails_says_why(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(HostError, match=message) as caught:
        example_model(Maker(script), tmp_path)
    assert caught.value.cure is not None
    assert "--model" in caught.value.cure


def test_an_engine_without_an_example(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine fake has no example model; name a checkpoint with --model"):
        example_model(PLUGIN, tmp_path)
