"""Show that what was captured here restores there, through real servers: capture, publish, wipe, prepare, restore.

Packs go to a hub that the stock ``huggingface_hub`` client talks to, capsules to Debian's docker-registry; both are on
loopback, and bytes are counted there: by the hub itself, and by a relay before the registry. Expected answers come from
a separate cold process; the prompts are ones that the captured process never saw. A step that fails is recorded, and
the next one runs.

    ./run ship-proof                               the fake engine in real processes; 0.25 GiB is the large object
    ./run ship-proof --engine transformers --model DIR --gib 16
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks._proof import Found, Record, Step, run_steps
from benchmarks._ship_homes import MIB, TOKEN, Homes, Relay
from benchmarks._ship_judged import ask_judges, run_on_image
from benchmarks._ship_large import move_large
from benchmarks._ship_servers import hear_lies, publish_one_pack
from benchmarks._ship_there import (
    ask_explain,
    prepare_twice,
    publish_again,
    publish_first,
    recover_in_moved_home,
    restore_there,
)
from benchmarks.harness import ROOT

from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.hub import HubServer
from coldsnap.testing.registry import real_registry

FILE = "ship-proof.json"
STEPS: Mapping[str, Callable[[Homes], Found]] = {
    "publish": publish_first,
    "publish-again": publish_again,
    "explain": ask_explain,
    "prepare": prepare_twice,
    "restore": restore_there,
    "moved-home": recover_in_moved_home,
    "image": run_on_image,
    "one-pack": publish_one_pack,
    "judges": ask_judges,
    "lies": hear_lies,
    "large": move_large,
}
"""In order; later ones use what earlier ones made."""


def _steps(homes: Homes) -> dict[str, Step]:
    return {name: partial(step, homes) for name, step in STEPS.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(
        prog="ship-proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the result")
    parser.add_argument("--name", default=FILE, help=f"name of the result, {FILE} by default")
    parser.add_argument("--only", default="", help="some of the steps, by comma; the others of the result stay")
    parser.add_argument("--gib", type=float, default=0.25, help="size of the large object")
    parser.add_argument("--rounds", type=int, default=4, help="how often the large object travels")
    parser.add_argument("--engine", default=PLUGIN.name, help="fake or transformers")
    parser.add_argument("--model", type=Path, help="a local checkpoint, for an engine that is not fake")
    parser.add_argument("--commit", help="the commit that is shown, where the checkout has lost its history")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="a disk: state roots, servers")  # noqa: S108
    options = parser.parse_args(words)
    if (options.model is None) != (options.engine == PLUGIN.name):
        parser.error("--model goes with an engine that is not fake")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coldsnap-ship-", dir=options.work)))
        registry = stack.enter_context(real_registry(folder / "registry"))
        relay = Relay(registry.host)
        stack.callback(relay.close)
        hub = stack.enter_context(HubServer(folder / "hub", token=TOKEN, part_bytes=4 * MIB))
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "DOCKER_CONFIG": str(folder / "nobody")}
        homes = Homes(options=options, folder=folder, hub=hub, relay=relay, stack=stack)
        steps, only = _steps(homes), [word for word in options.only.split(",") if word]
        if unknown := [word for word in only if word not in steps]:
            parser.error(f"--only: no step is called {', '.join(unknown)}; there are {', '.join(steps)}")
        out = options.out / options.name
        record = Record(
            out, commit=options.commit, kind=options.engine, resume=False, benchmark="ship-proof", anew=only
        )
        good = run_steps(steps, record, only=only, budget_s=float("inf"))
    print(f"{out}: " + ", ".join(f"{name} {entry['state']}" for name, entry in record.document["steps"].items()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
