"""The command of the front process: vLLM's own `serve MODEL ...`, and what of it the front cannot serve."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from coldsnap.engines.vllm.refusals import environment_problems, flag, option_problems
from coldsnap.errors import Problem, Refused, UsageError

__all__ = ["ENVIRONMENT", "check_environment", "parse_arguments", "problems", "serve_arguments"]

# What a served tree needs unless a recipe says otherwise. fork: the engine process imports nothing a second time, and
# shares the pages of what was imported. USE_LIBUV: its event loop holds io_uring descriptors, which cannot be frozen.
# The host's own address would be one of another host after a restore. Nobody is told anything over the network. NCCL's
# monitor ends a process whose clock went on without it, and asks a store all the time. humming starts compilers when it
# is imported, which would be frozen with the tree; without them it compiles when it is first used.
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "USE_LIBUV": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
)


def serve_arguments(command: Sequence[str]) -> list[str]:
    """What comes after `serve`. Raises UsageError for a command of another kind."""
    if not command or command[0] != "serve":
        raise UsageError(
            f"{' '.join(command[:1]) or 'nothing'} is no command of the vLLM engine",
            cure="write python -m coldsnap.engines.vllm serve MODEL ...",
        )
    return list(command[1:])


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises Refused for what must not be switched on in a served tree. Needs no vLLM."""
    found = environment_problems(environment)
    if found:
        raise Refused("the environment of vLLM", found)


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """vLLM's own record of its options. Imports vLLM. Raises UsageError, and Refused as `problems` says."""
    from coldsnap.engines.vllm.compat import resolve

    parser = resolve("make_arg_parser")(resolve("FlexibleArgumentParser")(prog="coldsnap.engines.vllm serve"))
    try:
        parsed: Namespace = parser.parse_args(list(arguments))
        if parsed.model_tag is not None:
            parsed.model = parsed.model_tag
        found = problems(vars(parsed))
        if found:
            raise Refused("the command of vLLM", found)
        parsed.api_server_count = 1
        resolve("validate_parsed_serve_args")(parsed)
        for name, manager in (("tool_parser_plugin", "Tool"), ("reasoning_parser_plugin", "Reasoning")):
            if plugin := getattr(parsed, name, None):
                getattr(resolve(f"{manager}ParserManager"), f"import_{manager.lower()}_parser")(plugin)
        resolve("validate_api_server_args")(parsed)
    except SystemExit as error:  # it has written what is wrong to the log
        raise UsageError("vLLM does not understand its command", cure="look at the engine's log") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"vLLM refuses its command: {error}") from error
    return parsed


def problems(options: Mapping[str, object]) -> tuple[Problem, ...]:
    """What the front cannot serve, by the option's name; `options` are vLLM's, after parsing."""
    return option_problems(options, field=lambda name: f"command.{flag(name)}")
