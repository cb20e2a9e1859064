"""What of vLLM's command and environment the front refuses, each by name and with a cure. Needs no vLLM."""

from __future__ import annotations

import pytest

from coldsnap.engines.vllm.arguments import ENVIRONMENT, check_environment, problems, serve_arguments
from coldsnap.errors import Refused, UsageError

PLAIN: dict[str, object] = {
    "uds": None,
    "headless": False,
    "grpc": False,
    "grpc_port": None,
    "api_key": None,
    "api_server_count": None,
    "data_parallel_size": 1,
    "enable_ssl_refresh": False,
}


def test_a_plain_command_has_no_problem() -> None:
    assert problems(PLAIN) == ()
    assert problems({**PLAIN, "api_server_count": 1}) == ()


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("uds", "/run/x.sock", "TCP port"),
        ("headless", True, "leave it out"),
        ("grpc", True, "leave it out"),
        ("grpc_port", 9000, "leave it out"),
        ("api_key", ["sk-1"], "VLLM_API_KEY"),
        ("enable_ssl_refresh", True, "opened"),
        ("api_server_count", 2, "leave it out"),
        ("api_server_count", 0, "leave it out"),
        ("data_parallel_size", 2, "leave it out"),
    ],
)
def test_what_the_front_cannot_serve_is_named_with_a_cure(name: str, value: object, cure: str) -> None:
    (problem,) = problems({**PLAIN, name: value})
    assert problem.field == f"command.--{name.replace('_', '-')}"
    assert problem.cure is not None
    assert cure in problem.cure
    assert "sk-1" not in str(problem), "a key is not repeated"


def test_all_problems_are_told_together() -> None:
    fields = {one.field for one in problems({**PLAIN, "grpc": True, "headless": True, "data_parallel_size": 4})}
    assert fields == {"command.--grpc", "command.--headless", "command.--data-parallel-size"}


def test_a_command_begins_with_serve() -> None:
    assert serve_arguments(["serve", "MODEL", "--port", "8"]) == ["MODEL", "--port", "8"]
    for command in ([], ["bench"], ["--model", "x"]):
        with pytest.raises(UsageError, match="serve MODEL"):
            serve_arguments(command)


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND"])
def test_an_environment_that_opens_more_than_the_api_is_refused(name: str) -> None:
    for off in ({}, {name: "0"}, {name: ""}):
        check_environment({**ENVIRONMENT, **off})
    with pytest.raises(Refused) as caught:
        check_environment({**ENVIRONMENT, name: "1"})
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == (f"environment.{name}", "1")
