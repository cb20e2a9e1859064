"""vLLM's application on a port, with vLLM's own options for TLS, headers and logs; opened and closed many times."""

from __future__ import annotations

import socket
import ssl
from argparse import Namespace
from pathlib import Path
from typing import Any

import uvicorn

from coldsnap.engines.listening import Listening
from coldsnap.engines.vllm.compat import resolve
from coldsnap.engines.vllm.gate import Gate
from coldsnap.errors import UserError

__all__ = ["Listener"]

_FILES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


class Listener:
    """The door of `gate`; every method belongs to the event loop."""

    def __init__(self, gate: Gate, args: Namespace) -> None:
        self._gate = gate
        self._args = args
        self._listening: Listening | None = None

    @property
    def is_open(self) -> bool:
        """Whether a client can connect."""
        return self._listening is not None

    async def open(self, bound: socket.socket) -> None:
        """Serve on `bound`, which is closed when that fails.

        Certificates and keys are read now: a process that is frozen with its listener closed holds none. Raises
        UserError naming a TLS option whose file is not there or not usable, EngineError as `Listening` does.
        """
        try:
            config = _config(self._gate, self._args)
        except BaseException:
            bound.close()
            raise
        listening = Listening(bound, config, self._gate.cut_off)
        self._gate.draining = False
        await listening.open()
        self._listening = listening

    async def close(self, drain_s: float) -> int:
        """As `Listening.close`; how many requests were in flight. Does nothing and returns 0 when not open."""
        listening, self._listening = self._listening, None
        if listening is None:
            return 0
        self._gate.draining = True
        in_flight = self._gate.num_in_flight
        await listening.close(drain_s)
        return in_flight


def _config(gate: Gate, args: Namespace) -> uvicorn.Config:
    given = {"log_config": resolve("get_uvicorn_log_config")(args), "ssl_ciphers": args.ssl_ciphers}
    config = uvicorn.Config(
        gate,
        loop="asyncio",
        lifespan="off",  # the application lives longer than one opening of it
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=resolve("VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
        ssl_cert_reqs=args.ssl_cert_reqs,
        **{name: getattr(args, name) for name in _FILES},
        **{name: value for name, value in given.items() if value is not None},
    )
    # Read by vLLM's own launcher from the same two options, and by uvicorn's h11 protocol from these two attributes.
    config.h11_max_incomplete_event_size = args.h11_max_incomplete_event_size
    config.h11_max_header_count = args.h11_max_header_count
    _load(config, args)
    return config


def _load(config: Any, args: Namespace) -> None:
    for name in _FILES:
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise UserError(
                f"--{name.replace('_', '-')}: {path} is no file",
                cure="put the file there on this host, or capture with another path",
                facts={"option": name, "path": path},
            )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"the TLS options cannot be used: {error}",
            cure="check --ssl-keyfile, --ssl-certfile, --ssl-ca-certs and --ssl-ciphers",
        ) from error
