"""The jobs of `./run`: what each needs, then what it calls."""

import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from house import image, kit, vllm
from house.checks import RERUN, check, for_pytest, test
from house.say import Trouble, call, say
from house.setup import CACHE, CRIU_PREFIX, ROOT, VENV, refuse_unless_of_kit, setup
from house.vllmjobs import run_vllm_bundle, run_vllm_bundle_use, run_vllm_proof

_DEMO = frozenset({"transformers", "demo"})
_ALL = frozenset({"transformers", "demo", "dev"})


def run_setup(words: Sequence[str]) -> int:
    """Bring everything about that the other jobs need: packages, `.venv`, CRIU. They call it themselves."""
    _no_arguments("setup", words)
    setup(extras=_ALL, with_criu=True, with_judges=True)
    say("all set up")
    return 0


def run_demo(words: Sequence[str]) -> int:
    """Serve a real model, capture it, kill it, restore it, compare the answers. As root.

    ./run demo                 with SmolLM2-135M-Instruct, made on the first run
    ./run demo MODEL=path      with a local checkpoint
    ./run demo --json          one JSON object on standard output
    Other words go to `coldsnap demo`; NAME=value becomes --name value.
    """
    setup(extras=_DEMO, with_criu=True)
    flags = _flags(words)
    if not any(flag == "--model" or flag.startswith("--model=") for flag in flags):
        flags = ["--model", _checkpoint([]), *flags]
    return _become("coldsnap", "demo", *flags)


def run_demo_recovery(words: Sequence[str]) -> int:
    """Delete the pack, restore from the checkpoint's own files, rebuild the pack, restore from it. As root.

    ./run demo-recovery                with SmolLM2-135M-Instruct and a Qwen3-0.6B of random weights
    ./run demo-recovery MODEL=path     with a local checkpoint; repeatable
    ./run demo-recovery --quick        with a tiny Qwen3 of random weights
    ./run demo-recovery --json         one JSON object on standard output
    Other words go to `coldsnap demo-recovery`; NAME=value becomes --name value.
    """
    setup(extras=_DEMO, with_criu=True)
    flags = _flags(words)
    if "--quick" in flags:
        flags.remove("--quick")
        flags = ["--model", _checkpoint(["tiny"]), *flags]
    elif not any(flag == "--model" or flag.startswith("--model=") for flag in flags):
        flags = ["--model", _checkpoint([]), "--model", _checkpoint(["0.6b"]), *flags]
    return _become("coldsnap", "demo-recovery", *flags)


def run_model(words: Sequence[str]) -> int:
    """Make a local checkpoint in `.cache/models/` and print its path.

    ./run model                SmolLM2-135M-Instruct, with real answers (269 MB)
    ./run model SIZE           random weights: tiny, tiny-llama, tiny-gpt2, 0.6b, 1.7b, 4b, 8b
    """
    setup(extras=_DEMO)
    sys.stdout.write(_checkpoint(words) + "\n")
    return 0


def run_test(words: Sequence[str]) -> int:
    """Run the tests; branch coverage of core and store must reach 95 %, and no test may be skipped.

    ./run test                 everything; of tests/vllm what needs no server, where a vLLM can be installed (3.4 GB)
    ./run test --allow-skips   print skipped tests instead of failing (needed without root)
    ./run test --rerun         when up to 3 tests fail, run each twice again; those that then pass are named, not fatal
    ./run test WORDS           those go to pytest; coverage is then not asked for
    """
    setup(extras=_ALL, with_criu=_root(), with_judges=_root())
    if for_pytest(words):
        return test(words)
    _checkpoint([])
    real = vllm.test_in_process(again=RERUN in words)
    status = test(words)
    say("the rest of tests/vllm, servers of a real vLLM, is not among these: ./run test-vllm")
    if real != 0:
        say("test: failed against a real vLLM; its tests came before the others")
    return real or status


def run_test_vllm(words: Sequence[str]) -> int:
    """Run the tests against a real vLLM on the processor, in `.venv-vllm` (3.4 GB, made on the first run).

    ./run test-vllm            all of tests/vllm, of which `./run test` runs a part; no test may be skipped
    ./run test-vllm WORDS      those go to pytest too; a path below tests/vllm takes the place of all of it
    """
    setup(extras=_DEMO, with_criu=_root())
    _checkpoint([])
    return vllm.test(words)


def run_check(words: Sequence[str]) -> int:
    """Lint, format, types and the import contracts between rooms."""
    _no_arguments("check", words)
    setup(extras=_ALL)
    return check()


def run_bench(words: Sequence[str]) -> int:
    """Run benchmarks and print their figures.

    ./run bench                all of them
    ./run bench NAME [WORDS]   benchmarks/NAME.py, with words of its own
    """
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
    names = [
        name for name in names if name not in ("harness", "gpu_proof", "ship_proof", "vllm_proof")
    ]  # proofs are jobs
    if words and words[0] not in names:
        raise Trouble(f"there is no benchmark {words[0]!r}", f"choose one of {', '.join(names)}")
    setup(extras=_ALL, with_criu=_root())
    if words:
        return _become("python", "-m", f"benchmarks.{words[0]}", *words[1:])
    failed = [name for name in names if call([VENV / "bin/python", "-m", f"benchmarks.{name}"], cwd=ROOT) != 0]
    if failed:
        raise Trouble(f"failed: {', '.join(failed)}")
    return 0


def run_gpu_proof(words: Sequence[str]) -> int:
    """Show every claim about GPUs on this machine, in steps that resume; writes gpu-proof.json. As root.

    ./run gpu-proof                     all steps, of a 16 GB model
    ./run gpu-proof --only STEP,...     some of probes, model, n610, n580, hydrate, capture-speed, first-use, criu,
                                        failures
    ./run gpu-proof --resume            those that are not in the result yet
    ./run gpu-proof --out DIR           where the result is, benchmarks/results by default
    ./run gpu-proof --kit DIR           on a host without a network: make .venv and CRIU from a kit first
    ./run gpu-proof --smoke             with a tiny model: does it all run
    ./run gpu-proof --fake              without a GPU: the fake engine on fake GPUs, in real processes
    """
    own = list(words)
    if "--kit" in own:
        at = own.index("--kit")
        folder = _one_folder("gpu-proof --kit", own[at + 1 : at + 2])
        del own[at : at + 2]
        refuse_unless_of_kit()
        kit.use(folder, environment=VENV, prefix=CRIU_PREFIX)
    setup(extras=frozenset({"transformers"} if "--fake" in own else {"transformers", "gpu"}), with_criu=True)
    return _become("python", "-m", "benchmarks.gpu_proof", *own)


def run_ship_proof(words: Sequence[str]) -> int:
    """Publish a capture to a hub and docker-registry here, wipe it, bring it back, and break it on the way. As root.

    ./run ship-proof                    all steps with the fake engine in real processes; writes ship-proof.json
    ./run ship-proof --engine transformers --model DIR
    ./run ship-proof --gib N            the size of the large object, 0.25 by default; needs twice that on a disk
    ./run ship-proof --only STEP,...    some of publish, publish-again, explain, prepare, restore, moved-home,
                                        image, one-pack, judges, lies, large; the others stay in the result
    ./run ship-proof --rounds N         how often the large object travels, 4 by default
    ./run ship-proof --name FILE        another name of the result
    ./run ship-proof --out DIR          where the result is, benchmarks/results by default
    """
    setup(extras=_ALL, with_criu=True, with_judges=True)
    return _become("python", "-m", "benchmarks.ship_proof", *words)


def run_faults(words: Sequence[str]) -> int:
    """Break one thing at a time in real processes, and check what must hold after every fault. As root.

    ./run faults                        the whole campaign; also writes benchmarks/results/faults.json
    ./run faults --only PATTERN         the cases whose name has the pattern in it, as 'damage .* pack'
    ./run faults --seed N               other chances
    ./run faults --max-minutes M        begin no case after M minutes
    ./run faults --out FILE             write the summary and the table as JSON to another file
    ./run faults --help                 everything else
    """
    setup(extras=_ALL, with_criu=True)
    partly = any(word.split("=")[0] in ("--only", "--out") for word in words)
    results = () if partly else ("--out", "benchmarks/results/faults.json")
    return _become("python", "-m", "coldsnap.testing.faults", *words, *results)


def run_image(words: Sequence[str]) -> int:
    """Make an OCI layout of a small Debian with Python, an engine and this checkout; print its digest.

    ./run image DIR                     for units with an image; layers are kept in .cache/image
    ./run image DIR --arch arm64        for another machine; amd64 by default
    ./run image DIR --suite trixie      of another stable Debian; bookworm by default
    ./run image DIR --engine none       without transformers and torch
    ./run image DIR --fresh             with what the mirror and the package index have now
    ./run image DIR --push HOST/PATH    copy it to a registry too, and print its reference for a recipe
    ./run image DIR --json              print all that is known of it, packages and digests, as one JSON object
    """
    options = image.options_of(words)
    setup(extras=frozenset())
    made = image.build(options, pip=VENV / "bin/python")
    say(f"made {options.out}: {made['bytes'] >> 20} MiB, {made['unpacked_bytes'] >> 20} MiB unpacked")
    if options.push:
        made["reference"] = image.push(made, options.push)
    sys.stdout.write(json.dumps(made, indent=2) if options.json else made.get("reference", made["digest"]))
    sys.stdout.write("\n")
    return 0


def run_kit(words: Sequence[str]) -> int:
    """Build a folder with what an offline x86-64 host with Python 3.12 and torch lacks to run this checkout.

    ./run kit OUT_DIR              wheels and CRIU, with their digests; copy it there beside the checkout
    ./run kit OUT_DIR PACKAGE ...  more wheels, without what they need in turn (other loaders, for benchmarks)
    """
    out = _one_folder("kit", words[:1])
    setup(extras=frozenset(), with_criu=True)
    total = kit.build(out, python=VENV / "bin/python", prefix=CRIU_PREFIX, more=words[1:])
    say(f"made {out}: {total / (1 << 20):.1f} MiB")
    return 0


def run_kit_use(words: Sequence[str]) -> int:
    """Make `.venv` and CRIU from a kit, without a network; print the path of the new Python. As root.

    ./run kit-use KIT_DIR      then, for example, .venv/bin/coldsnap doctor
    """
    folder = _one_folder("kit-use", words)
    refuse_unless_of_kit()
    sys.stdout.write(f"{kit.use(folder, environment=VENV, prefix=CRIU_PREFIX)}\n")
    return 0


def run_clean(words: Sequence[str]) -> int:
    """Remove what the jobs made in this checkout. CRIU, in /opt/coldsnap, and installed packages stay."""
    _no_arguments("clean", words)
    for name in (
        ".venv",
        ".venv-vllm",
        ".cache",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".import_linter_cache",
        ".hypothesis",
    ):
        if (ROOT / name).exists():
            say(f"removing {name}")
            shutil.rmtree(ROOT / name)
    return 0


def run_help(words: Sequence[str]) -> int:
    """List the jobs, or explain one: ./run help JOB"""
    for name in words or JOBS:
        if name not in JOBS:
            raise Trouble(f"there is no job {name!r}", f"choose one of {', '.join(JOBS)}")
        text = inspect.getdoc(JOBS[name]) or ""
        sys.stdout.write(text + "\n" if words else f"  {name:16} {text.splitlines()[0]}\n")
    return 0


JOBS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "setup": run_setup,
    "demo": run_demo,
    "demo-recovery": run_demo_recovery,
    "test": run_test,
    "test-vllm": run_test_vllm,
    "check": run_check,
    "bench": run_bench,
    "gpu-proof": run_gpu_proof,
    "ship-proof": run_ship_proof,
    "vllm-proof": run_vllm_proof,
    "faults": run_faults,
    "model": run_model,
    "image": run_image,
    "kit": run_kit,
    "kit-use": run_kit_use,
    "vllm-bundle": run_vllm_bundle,
    "vllm-bundle-use": run_vllm_bundle_use,
    "clean": run_clean,
    "help": run_help,
}


def main(words: Sequence[str]) -> int:
    """Run one job. Exit status: the job's; 1 when something is missing, 2 for no such job, 130 for Ctrl-C."""
    name, *rest = words or ["help"]
    if name in ("-h", "--help"):
        name = "help"
    if name not in JOBS:
        sys.stderr.write(f"there is no job {name!r}; choose one of {', '.join(JOBS)}\n")
        return 2
    if rest in (["-h"], ["--help"]):
        name, rest = "help", [name]
    try:
        return JOBS[name](rest)
    except Trouble as error:
        say(f"{name}: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _flags(words: Sequence[str]) -> list[str]:
    """Words for a command: NAME=value, in capitals, becomes --name value; the rest stays."""
    flags: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier() and name.isupper():
            flags += [f"--{name.lower().replace('_', '-')}", value]
        else:
            flags.append(word)
    return flags


def _checkpoint(words: Sequence[str]) -> str:
    if len(words) > 1:
        raise Trouble(f"one size at most, not {' '.join(words)}")
    make = [str(VENV / "bin/python"), "-m", "coldsnap.engines.transformers.checkpoints"]
    out = CACHE / "models" / (f"random-{words[0]}" if words else "smollm2")
    arguments = ["random", str(out), "--size", words[0]] if words else ["smollm2", str(out)]
    if not words:
        arguments += ["--cache", str(CACHE / "downloads")]
    if call([*make, *arguments]) != 0:
        raise Trouble("the checkpoint was not made", "the reason is above")
    return str(out)


def _become(program: str, *words: str) -> int:
    """Turn into a program of the virtual environment: its output, signals and exit status are then the job's."""
    path = VENV / "bin" / program
    os.chdir(ROOT)
    os.execv(path, [str(path), *words])  # noqa: S606 - no shell is wanted


def _root() -> bool:
    return os.geteuid() == 0


def _one_folder(job: str, words: Sequence[str]) -> Path:
    if len(words) != 1 or words[0].startswith("-"):
        raise Trouble(f"{job} takes one folder, got {' '.join(words) or 'nothing'}", f"./run help {job}")
    return Path(words[0]).absolute()


def _no_arguments(job: str, words: Sequence[str]) -> None:
    if words:
        raise Trouble(f"{job} takes no words, got {' '.join(words)}")
