"""One file per command: an options record where there are many, a pure check, one call to ``ops``."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Hang every command on ``app``, in the order ``--help`` shows them."""
    from coldsnap.cli.commands import (
        capture,
        demo,
        demo_recovery,
        diff,
        explain,
        inspect,
        machine,
        materialize,
        payload,
        plan,
        predict,
        prepare,
        publish,
        quarantine,
        restore,
        schema,
        service,
        sign,
        tidy,
        usage,
    )

    for module in (
        plan,
        capture,
        prepare,
        explain,
        restore,
        service,
        inspect,
        diff,
        usage,
        predict,
        materialize,
        publish,
        sign,
        payload,
        quarantine,
        tidy,
        machine,
        schema,
        demo,
        demo_recovery,
    ):
        module.add_to(app)
