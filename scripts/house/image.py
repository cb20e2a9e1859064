"""The job `image`: an OCI layout with a small Debian, Python packages and this checkout, each a layer of its own.

A layer is made once and kept below `.cache/image/`, named by a fingerprint of what it is made from and believed only
while its bytes have the digest that was noted. What a suite's mirror offers is not in the fingerprint: `--fresh` asks
again. Equal packages, wheels and files make an equal image.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from house import debroot, layers, layout, wheels
from house.layers import Entry, Layer
from house.layout import TAG, Part
from house.say import Trouble, quiet, say
from house.setup import CACHE, ROOT, apt_install

_HERE = Path(__file__).resolve().parent
_SAY_EVERY_S = 5.0
_PATIENCE_S = 3600.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What image, and where its layout goes. `engine` is an extra of coldsnap, or `none`."""

    out: Path
    suite: str = "bookworm"
    architecture: str = "amd64"
    engine: str = "transformers"
    fresh: bool = False
    push: str = ""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Made:
    """A layer and what is known of its making."""

    part: Part
    facts: dict[str, Any]
    from_cache: bool


Maker = Callable[[ExitStack, Path], tuple[Iterable[Entry], dict[str, Any]]]


def options_of(words: Sequence[str]) -> Options:
    """Raises SystemExit as a command line does."""
    parser = argparse.ArgumentParser(prog="./run image", description="see ./run help image")
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--suite", default=Options.suite)
    parser.add_argument("--arch", dest="architecture", default=Options.architecture, choices=sorted(wheels.MACHINES))
    parser.add_argument("--engine", default=Options.engine, choices=("transformers", "none"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--push", default=Options.push, metavar="HOST/PATH")
    parser.add_argument("--json", action="store_true")
    options = Options(**vars(parser.parse_args(words)))
    if not re.fullmatch("[a-z]+", options.suite):
        parser.error(f"--suite: {options.suite!r} is no code name of Debian, such as bookworm")
    if options.push and not re.fullmatch(r"[^/@]+(/[a-z0-9][a-z0-9._-]*)+", options.push):
        parser.error(
            f"--push: {options.push!r} is no place of a registry, such as registry.example.com/coldsnap/engine"
        )
    return options


def build(options: Options, *, pip: Path, cache: Path = CACHE / "image") -> dict[str, Any]:
    """Make the layout; what was made. `pip` is a Python that has pip.

    Raises Trouble when a folder of something else is in the way or packages cannot be had.
    """
    out = options.out.absolute()
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / "oci-layout").is_file())):
        raise Trouble(f"{out} is there and holds no image layout", "name a new folder")
    with _alone(cache):
        made = _layers(options, _Shelf(cache, fresh=options.fresh), pip)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            aside = Path(scratch, "layout")
            parts = [one.part for one in made]
            digest = layout.write_layout(aside, parts, architecture=options.architecture, config=_config(options))
            if out.exists():
                shutil.rmtree(out)
            aside.rename(out)
    return {
        "layout": str(out),
        "tag": TAG,
        "digest": digest,
        "bytes": sum(one.part.layer.bytes for one in made),
        "unpacked_bytes": sum(one.part.layer.unpacked_bytes for one in made),
        "suite": options.suite,
        "architecture": options.architecture,
        "engine": options.engine,
        "python": wheels.INTERPRETER,
        "python_version": made[0].facts["python"],
        "layers": [{"what": one.part.what, "from_cache": one.from_cache, **asdict(one.part.layer)} for one in made],
        "packages": made[0].facts["packages"],
        "wheels": made[1].facts["wheels"],
    }


def push(made: Mapping[str, Any], place: str) -> str:
    """Copy a layout to HOST/PATH of a registry, with skopeo and its logins; the reference it has there.

    A registry of this machine is spoken to without TLS. Raises Trouble with skopeo's words.
    """
    if shutil.which("skopeo") is None:
        apt_install("skopeo", purpose="copying images to a registry")
    say(f"copying the image to {place}")
    local = re.match(r"(127\.[0-9.]+|localhost|\[::1\])(:|/)", place) is not None
    words = ["skopeo", "copy", "--quiet", "--preserve-digests", f"--dest-tls-verify={str(not local).lower()}"]
    done = quiet([*words, f"oci:{made['layout']}:{made['tag']}", f"docker://{place}:latest"], timeout_s=_PATIENCE_S)
    if done.returncode != 0:
        message = f"skopeo could not copy the image to {place}: {done.stderr.strip()[-300:]}"
        raise Trouble(message, "`skopeo login`, if it is that")
    return f"{place}@{made['digest']}"


def _layers(options: Options, shelf: "_Shelf", pip: Path) -> list[Made]:
    suite, architecture = options.suite, options.architecture

    def debian(stack: ExitStack, work: Path) -> tuple[Iterable[Entry], dict[str, Any]]:
        debs = debroot.fetch(work, suite=suite, architecture=architecture)
        packages = [package for _deb, package in debs]
        facts = {
            "python": debroot.python_of(packages),
            "libc": debroot.libc_of(packages),
            "packages": [asdict(package) for package in packages],
        }
        return debroot.root_entries(debs, architecture=architecture), facts

    root = shelf.layer(
        f"debian-{suite}-{architecture}", f"Debian {suite}", ["debroot", "debian"], debroot.ROOTS, debian
    )
    python, libc = root.facts["python"], root.facts["libc"]
    site = wheels.site_of(python)
    wanted = wheels.requirements(options.engine)

    def packages(stack: ExitStack, work: Path) -> tuple[Iterable[Entry], dict[str, Any]]:
        found = wheels.fetch(
            work / "wheels", wanted, pip=pip, python=python, libc=libc, architecture=options.architecture
        )
        return wheels.wheel_entries(found, site, stack), {"wheels": [wheels.describe(one) for one in found]}

    def own(stack: ExitStack, work: Path) -> tuple[Iterable[Entry], dict[str, Any]]:
        return wheels.own_entries(site), {}

    pins = (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8")
    name = f"packages-{suite}-{architecture}-{options.engine}"
    needs = shelf.layer(name, f"packages for {options.engine}", ["wheels"], [*wanted, pins, python, libc], packages)
    source = _digest_of(wheels.own_entries(site))
    return [root, needs, shelf.layer(f"coldsnap-{python}", "coldsnap", ["wheels"], [source], own)]


def _config(options: Options) -> dict[str, Any]:
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "Env": [f"PATH={path}", "LANG=C.UTF-8"],
        "Entrypoint": ["coldsnap"],
        "Cmd": ["--help"],
        "WorkingDir": "/",
        "Labels": {"io.coldsnap.image.engine": options.engine, "io.coldsnap.image.suite": options.suite},
    }


class _Shelf:
    """Layers that were made before: `NAME.KEY.tar.gz`, and beside it what is known of it, written last."""

    def __init__(self, folder: Path, *, fresh: bool) -> None:
        self._folder = folder
        self._fresh = fresh

    def layer(self, name: str, what: str, modules: Sequence[str], inputs: Sequence[str], maker: Maker) -> Made:
        """The layer `name` as `maker` makes it of `inputs`; the code that makes it, `modules` among it, counts too."""
        code = [(_HERE / f"{module}.py").read_text(encoding="utf-8") for module in ("layers", *modules)]
        key = hashlib.sha256(json.dumps([list(inputs), code]).encode()).hexdigest()[:16]
        packed, noted = self._folder / f"{name}.{key}.tar.gz", self._folder / f"{name}.{key}.json"
        if not self._fresh and (facts := _proved(packed, noted)) is not None:
            found = Layer(**facts.pop("layer"))
            return Made(part=Part(what=what, layer=found, path=packed), facts=facts, from_cache=True)
        for other in self._folder.glob(f"{name}.*"):
            other.unlink()
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="work-", dir=self._folder) as work:
            entries, facts = maker(stack, Path(work))
            say(f"writing the layer {what!r}")
            aside = Path(work, "layer.tar.gz")
            layer = layers.write_layer(entries, aside, progress=_Teller().tell)
            aside.chmod(0o444)
            aside.rename(packed)
        noted.write_text(json.dumps({**facts, "layer": asdict(layer)}, sort_keys=True), encoding="utf-8")
        say(f"{what}: {layer.bytes / _MIB:.1f} MiB, {layer.unpacked_bytes / _MIB:.1f} MiB unpacked")
        return Made(part=Part(what=what, layer=layer, path=packed), facts=facts, from_cache=False)


def _proved(packed: Path, noted: Path) -> dict[str, Any] | None:
    """What was noted of a layer whose bytes are still those; None when it has to be made."""
    try:
        facts: dict[str, Any] = json.loads(noted.read_text(encoding="utf-8"))
        with packed.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        return facts if facts["layer"]["digest"] == f"sha256:{found}" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Teller:
    """Says how far a layer is, now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def tell(self, done: int, total: int) -> None:
        if time.monotonic() - self._said > _SAY_EVERY_S:
            self._said = time.monotonic()
            say(f"  {done / _MIB:.0f} of {total / _MIB:.0f} MiB")


def _digest_of(entries: Iterable[Entry]) -> str:
    state = hashlib.sha256()
    for entry in entries:
        state.update(f"{entry.path}\0{entry.mode}\0{entry.bytes}\0".encode())
        if entry.data is not None:
            with entry.data() as file:
                state.update(file.read())
    return state.hexdigest()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two that want an image wait for each other; what a killed one left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for orphan in folder.glob("work-*"):
            shutil.rmtree(orphan)
        yield
    finally:
        os.close(lock)
