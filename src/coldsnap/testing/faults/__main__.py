"""``python -m coldsnap.testing.faults``: run a campaign, print a line a case and the summary, write the JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from coldsnap.capsule.hostfacts import host_facts
from coldsnap.errors import ColdsnapError
from coldsnap.testing.faults.campaign import Campaign, run_campaign
from coldsnap.testing.faults.case import Row

_INPUTS_PER_PARSER = 250
_REASON_CHARACTERS = 110
_NAME_CHARACTERS = 64


def main() -> int:
    """0 when everything that must hold held; 1 when something did not; 2 when the campaign could not run."""
    parser = argparse.ArgumentParser(prog="./run faults", description="Inject faults into real processes.")
    parser.add_argument("--seed", type=int, default=1, help="all the chance there is in a campaign (1)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cases whose name has this in it (a regex)")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="begin no case after that long (60)")
    parser.add_argument("--pens", type=int, default=2, help="how many work at a time (2)")
    parser.add_argument("--no-real-engine", action="store_true", help="the fake engine alone, no Transformers")
    parser.add_argument("--out", type=Path, help="write the summary and the table to this file as JSON")
    options = parser.parse_args()
    pattern = re.compile(options.only)
    wanted = Campaign(
        seed=options.seed,
        choose=lambda cases: [case for case in cases if pattern.search(case.name)],
        max_s=options.max_minutes * 60,
        num_pens=max(1, options.pens),
        num_inputs=_INPUTS_PER_PARSER if pattern.search("parsers") else 0,
        with_real_engine=not options.no_real_engine,
        say=_say,
        tell=_print_row,
    )
    _say(f"seed {options.seed}")
    try:
        sums = run_campaign(wanted)
    except ColdsnapError as error:
        _say(str(error))
        return 2
    document = {"seed": options.seed, "machine": _machine(), "commit": _commit(), **sums.document()}
    if options.out is not None:
        options.out.write_text(_compact(document))
    _print_summary(document)
    whole = not options.only and sums.num_listed == len(sums.rows)
    return 0 if _all_held(document, whole=whole) else 1


def _all_held(document: dict[str, Any], *, whole: bool) -> bool:
    broken = [document[name] for name in ("wrong_answers", "damaged", "leftovers", "stuck")]
    broken += [len(document["trouble"]), sum(len(one["wrong"]) for one in document["parsers"].values())]
    broken += [len(document["points"]["missing"])] if whole else []
    return not any(broken)


def _say(text: str) -> None:
    sys.stderr.write(f"faults: {text}\n")


def _print(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _print_row(row: Row) -> None:
    mark = "!!" if row.violations else "  " if row.happened else "--"
    line = f"{mark} {row.name:{_NAME_CHARACTERS}} {row.outcome:8} {row.reason[:_REASON_CHARACTERS]}"
    _print(line.rstrip())
    for kind, text in row.violations:
        _print(f"     {kind}: {text}")


def _print_summary(document: dict[str, Any]) -> None:
    points = document["points"]
    _print()
    for name in ("seed", "faults", "sigkills", "criu_faults", "wrong_answers", "damaged", "leftovers", "stuck"):
        _print(f"{name:15} {document[name]}")
    _print(f"{'points hit':15} {points['hit']} of {points['all']} {' '.join(points['missing'])}".rstrip())
    _print(f"{'not happened':15} {len(document['faults_that_did_not_happen'])}")
    inputs = sum(one["inputs"] for one in document["parsers"].values())
    wrong = [f"{name}: {text}" for name, one in document["parsers"].items() for text in one["wrong"]]
    _print(f"{'parsers':15} {len(document['parsers'])}, {inputs} inputs, {len(wrong)} wrong")
    _print(f"{'seconds':15} {document['seconds']}")
    for text in (*wrong, *document["trouble"]):
        _print(f"!! {text}")


def _compact(document: dict[str, Any]) -> str:
    """JSON with a line for each fact and for each row."""
    rows = document["rows"]
    head = json.dumps({**document, "rows": []}, indent=1)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return head[: head.rindex("[]")] + "[\n  " + lines + "\n ]\n}\n"


def _machine() -> dict[str, Any]:
    facts = host_facts()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "architecture": facts.architecture,
        "kernel": facts.kernel,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "python": platform.python_version(),
        "criu": facts.criu_version,
    }


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[4]
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
