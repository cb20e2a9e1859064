"""What the jobs need, brought about step by step and remembered.

Each step leaves a stamp in `.cache/setup/` with a fingerprint of what it was made from, so that a second call costs
a few comparisons. Stamps are written after the step, never before. Two set-ups of one checkout wait for each other.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from house import criu, registry
from house.say import Trouble, call, quiet, say

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
CRIU_PREFIX = Path("/opt/coldsnap/criu")
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
JUDGES = ("umoci", "skopeo")
_STAMPS = CACHE / "setup"
_SETTINGS = ("pyproject.toml", "scripts/constraints.txt")


def setup(*, extras: frozenset[str], with_criu: bool = False, with_judges: bool = False) -> None:
    """Make the environment ready; without any `extras` it has pip and nothing else. Raises Trouble with the cure."""
    with alone():
        python = _virtual_environment()
        if extras:
            _packages(python, extras)
        if with_judges:
            missing = [program for program in JUDGES if shutil.which(program) is None]
            if missing:
                apt_install(*missing, purpose="outside judges of image layouts")
            _registry()
        if with_criu:
            _criu()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait for another set-up of this checkout, and keep the next one waiting."""
    _STAMPS.mkdir(parents=True, exist_ok=True)
    lock = os.open(_STAMPS / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def apt_install(*packages: str, purpose: str) -> None:
    """Install Debian packages; the index is fetched only if the one on disk does not do."""
    words = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        raise Trouble(f"{', '.join(packages)} missing ({purpose})", f"as root: {' '.join(words)}")
    if shutil.which("apt-get") is None:
        raise Trouble(f"{', '.join(packages)} missing ({purpose}), and there is no apt-get", "install them yourself")
    say(f"installing {', '.join(packages)}: {purpose}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if quiet([*words, "--download-only"], timeout_s=900).returncode != 0:
        call(["apt-get", "update", "-qq"], env=environment)
    if call([*words, "-qq", "-o", "Dpkg::Use-Pty=0"], env=environment) != 0:
        raise Trouble(f"apt-get could not install {', '.join(packages)}", "its words are above")


def read_stamp(name: str) -> dict[str, object]:
    """What the step of that name was last made from; empty when it never was."""
    try:
        found = json.loads((_STAMPS / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_stamp(name: str, facts: Mapping[str, object]) -> None:
    """Remember, after a step, what it was made from."""
    aside = _STAMPS / f"{name}.json.new"
    aside.write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")
    aside.replace(_STAMPS / f"{name}.json")


def settings_digest() -> str:
    """What the packages of an environment are made from."""
    return hashlib.sha256(b"\0".join((ROOT / name).read_bytes() for name in _SETTINGS)).hexdigest()


def refuse_unless_of_kit() -> None:
    """Raises Trouble when `.venv` came from a package index: a kit would replace it by less."""
    if VENV.exists() and "kit" not in read_stamp("packages"):
        raise Trouble(f"{VENV} was not made from a kit", "./run clean first, if it may go")


def stamp_kit(extras: Sequence[str]) -> None:
    """Remember an environment that a kit made, so that the jobs take it for set up. `extras` are those it serves."""
    _STAMPS.mkdir(parents=True, exist_ok=True)
    write_stamp("venv", venv_facts())
    write_stamp("packages", {"settings": settings_digest(), "extras": sorted(extras), "kit": True})


def venv_facts() -> dict[str, object]:
    """What a virtual environment of this checkout depends on beside its packages."""
    # A virtual environment knows its own place and its interpreter; either may have moved.
    return {"python": sys.version, "interpreter": sys.executable, "root": str(ROOT)}


def _virtual_environment() -> Path:
    python = VENV / "bin/python"
    facts = venv_facts()
    ours = Path(sys.prefix) == VENV  # called by the environment's own Python
    if python.exists() and (ours or read_stamp("venv") == facts):
        return python
    if importlib.util.find_spec("ensurepip") is None:
        release = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        apt_install(f"{release}-venv", purpose="virtual environments")
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    (_STAMPS / "packages.json").unlink(missing_ok=True)
    if call([sys.executable, "-m", "venv", "--clear", VENV]) != 0:
        raise Trouble(f"{sys.executable} could not make a virtual environment", "its words are above")
    write_stamp("venv", facts)
    return python


def _packages(python: Path, extras: frozenset[str]) -> None:
    digest = settings_digest()
    stamp = read_stamp("packages")
    had = stamp.get("extras")
    present = frozenset(had) if isinstance(had, list) and stamp.get("settings") == digest else frozenset()
    if stamp.get("settings") == digest and extras <= present:
        return
    extras |= present
    pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        pip += ["--quiet", "--progress-bar", "off"]
    if extras & {"transformers", "dev"}:
        _torch(python, pip)
    say(f"installing coldsnap[{','.join(sorted(extras))}]")
    target = f"{ROOT}[{','.join(sorted(extras))}]"
    if call([*pip, "--constraint", ROOT / "scripts/constraints.txt", "--editable", target]) != 0:
        raise Trouble("pip could not install coldsnap's dependencies", "its words are above; then try again")
    write_stamp("packages", {"settings": digest, "extras": sorted(extras)})


def _torch(python: Path, pip: list[str | Path]) -> None:
    """Install the CPU build of the pinned torch from PyTorch's own index, if that answers soon.

    The package index has only the CUDA build for x86-64, some 3 GB; pip takes it in the next step when this fails.
    """
    wanted = cpu_torch()
    asked = quiet([python, "-c", "import importlib.metadata as m; print(m.version('torch'))"])
    if asked.stdout.strip().partition("+")[0] == wanted.removeprefix("torch==").partition("+")[0]:
        return
    say(f"installing {wanted} from PyTorch's own index (200 MB)")
    take_cpu_torch([*pip, wanted])


def cpu_torch() -> str:
    """The CPU build of the pinned torch, as pip is asked for it. Raises Trouble when none is pinned."""
    match = re.search(r'"torch==([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if match is None:
        raise Trouble("pyproject.toml pins no torch", "add torch==VERSION to its transformers extra")
    return f"torch=={match[1]}+cpu"


def take_cpu_torch(pip: Sequence[str | Path]) -> None:
    """Run a pip command for the CPU build, from where it is; say so when that does not work, which is no failure."""
    source: list[str | Path] = ["--index-url", PYTORCH_INDEX, "--timeout", "6", "--retries", "0", "--no-deps"]
    done = subprocess.run([*pip, *source], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        say(f"that did not work ({last}); taking torch from the package index, up to 3 GB")


def _registry() -> None:
    if registry.version(registry.PREFIX) is not None:
        return
    if os.geteuid() != 0:
        raise Trouble(f"the tests of shipping need a docker-registry in {registry.PREFIX}", "run this as root")
    say(f"unpacking docker-registry into {registry.PREFIX}")
    if call([sys.executable, ROOT / "scripts/install-registry", "--prefix", registry.PREFIX]) != 0:
        raise Trouble("there is no docker-registry", "what is missing is named above")


def _criu() -> None:
    if criu.inspect(CRIU_PREFIX).works:
        return
    if os.geteuid() != 0:
        raise Trouble("capture and restore need root, for CRIU", "run this as root")
    say(f"installing CRIU into {CRIU_PREFIX}")
    if call([sys.executable, ROOT / "scripts/install-criu", "--prefix", CRIU_PREFIX]) != 0:
        raise Trouble("there is no working CRIU", "what is missing is named above")
