"""The vLLM that is installed: its symbols, its plugins, and what our loader refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm import compat
from coldsnap.engines.vllm.arguments import problems
from coldsnap.engines.vllm.flags import options_in
from coldsnap.engines.vllm.refusals import FACTS, OPTIONS, fact_problems
from coldsnap.engines.vllm.symbols import SYMBOLS

MODEL = Path(__file__).parents[2] / ".cache/models/smollm2"


def test_every_symbol_that_we_rely_on_is_in_the_sources() -> None:
    compat.require_symbols()


@pytest.mark.parametrize(
    "name", sorted({one.name.partition(".")[0] for one in SYMBOLS if "cumem" not in one.places[0]})
)
def test_every_symbol_can_be_imported_from_one_of_its_places(name: str) -> None:
    assert compat.resolve(name) is not None


def test_the_versions_are_those_of_the_packages_that_compute() -> None:
    import torch

    import vllm

    found = compat.versions()
    assert found["vllm"].partition("+")[0] == vllm.__version__.partition("+")[0]
    assert found["torch"] == torch.__version__


@pytest.mark.parametrize("ours", [True, False])
def test_vllms_own_plugin_loading_makes_the_load_format_known_where_coldsnap_started_the_process(
    ours: bool, play: Any
) -> None:
    found = play("formats.py", environment={SETTINGS_VARIABLE: "/nowhere/settings.json"} if ours else {})
    assert found == {"registered": ours, "again": ours, "vllm_loader_imported": ours}


def test_a_load_format_that_gives_no_names_is_refused() -> None:
    from vllm.config.load import LoadConfig

    from coldsnap.engines.vllm.loader import ColdsnapLoader
    from coldsnap.errors import UserError

    config = LoadConfig(load_format="coldsnap", model_loader_extra_config={"load_format": "dummy"})
    with pytest.raises(UserError, match="'dummy' cannot be watched"):
        ColdsnapLoader(config)


def test_the_other_members_of_the_extra_configuration_go_to_the_loader_that_reads() -> None:
    from vllm.config.load import LoadConfig

    from coldsnap.engines.vllm.loader import ColdsnapLoader

    extra = {"load_format": "safetensors", "enable_multithread_load": True, "num_threads": 2}
    config = LoadConfig(load_format="coldsnap", model_loader_extra_config=extra)
    inner = ColdsnapLoader(config)._delegate.load_config
    assert (inner.load_format, inner.model_loader_extra_config) == (
        "safetensors",
        {"enable_multithread_load": True, "num_threads": 2},
    )
    assert config.model_loader_extra_config == extra


class Sleeper:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def suspend(self, level: int) -> None:
        self.asked.append(("suspend", level))

    def resume(self, tags: object) -> None:
        self.asked.append(("resume", tags))

    def discard(self, tags: object) -> None:
        self.asked.append(("discard", tags))


def test_vllms_own_factory_makes_our_backend_and_it_asks_who_is_in_charge() -> None:
    from types import SimpleNamespace

    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from coldsnap.engines.vllm import backend, sleeping
    from coldsnap.errors import EngineError

    backend.register()
    backend.register()
    made = SleepModeBackendFactory.create_backend(SimpleNamespace(sleep_mode_backend=sleeping.BACKEND))
    with pytest.raises(EngineError, match="no weights to take care of"):
        made.suspend(1)
    assert made.state() == "RUNNING"
    sleeper = Sleeper()
    sleeping.put_in_charge(sleeper)
    try:
        made.suspend(1)
        assert made.state() == "SUSPENDED"
        made.resume(None)
        assert made.state() == "RUNNING"
        made.discard(("kv_cache",))
        assert sleeper.asked == [("suspend", 1), ("resume", None), ("discard", ("kv_cache",))]
    finally:
        sleeping.put_in_charge(None)


def test_what_is_read_out_of_the_sources_is_what_the_parser_has() -> None:
    found = options_in(compat.installed_folder())
    parser = compat.resolve("make_arg_parser")(compat.resolve("FlexibleArgumentParser")(prog="x"))
    words = {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
    plain = {word.removeprefix("--").replace("-", "_") for word in words if not word.startswith("--no-")}
    assert found == plain - {"help"}


def test_its_defaults_are_taken_and_every_row_of_the_table_is_an_option_of_it() -> None:
    parser = compat.resolve("make_arg_parser")(compat.resolve("FlexibleArgumentParser")(prog="x"))
    assert problems(vars(parser.parse_args(["a-model"]))) == ()
    later = {"sleep_mode_backend"}  # from 0.33 on
    assert {one.name for one in OPTIONS} - options_in(compat.installed_folder()) <= later


def test_a_plain_configuration_of_it_is_taken() -> None:
    engine_args = compat.resolve("AsyncEngineArgs")(model=str(MODEL), enforce_eager=True, max_model_len=512)
    config = engine_args.create_engine_config(usage_context=compat.resolve("UsageContext").OPENAI_API_SERVER)
    assert fact_problems(config) == ()
    assert {path for path in (one.path for one in FACTS) if not _has(config, path)} == set(), "each is there to be seen"


def _has(config: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True
