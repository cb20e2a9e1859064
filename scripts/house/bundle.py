"""The bundle of vLLM for a GPU host without a network: `./run vllm-bundle`. `unbundle` puts it beside the host's torch.

Wheels of `scripts/vllm.lock`, each proved by the digest that stands there, are laid out as they would be installed,
without what a dense model on a Hopper GPU never loads, and become one tar, packed with xz and cut into parts. vLLM's
Python stays as it is: files are left out whole, and GPU code for other chips is overwritten with zeros in three binary
files (`fatbin`). Equal locks make equal bytes.

A part is a folder of its own, `part-0` and so on, each with the same manifest, so that they can travel one by one.
"""

import hashlib
import io
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from house import fatbin
from house.layers import WHEN, Entry
from house.say import Trouble, call, say
from house.setup import CACHE, ROOT
from house.wheels import wheel_entries

LOCK = ROOT / "scripts/vllm.lock"
MANIFEST = "vllm-bundle.json"
KIND = "coldsnap-vllm-bundle"
MACHINE, PYTHON = "x86_64", "3.12"
TARGET = 90  # Hopper: compute capability 9.0
PART_MIB = 60
_DATA = "data.xz"
_SITE = "site"
_OLDEST_LIBC, _NEWEST_LIBC = 5, 35  # of glibc 2, as wheels' tags say it
_LAYOUT = 1  # one more when equal locks are to make other bytes
_BLOCK_BYTES = 128 << 20  # packed side by side, so that the bytes do not depend on how many cores there are
_PRESET = 9

# What is left out, as patterns of paths, and why nobody misses it where the bundle is used.
LEFT_OUT: Mapping[str, str] = {
    r"vllm/vllm_flash_attn/_vllm_fa2_C\.": "FlashAttention 2 is for older GPUs",
    r"vllm/vllm-rs": "the server in Rust, which coldsnap refuses",
    r"vllm/_(flashmla|flashmla_extension)_C\.": "attention of other models",
    r"vllm/_qutlass_C\.": "for newer GPUs",
    r"vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/": "compilers' headers, and kernels for newer GPUs",
    r"vllm/kernels/helion/configs/": "tuned for kernels that are not chosen",
    r"vllm/benchmarks/datasets/": "inputs of vLLM's own benchmarks",
    r"mistral_common/data/|pycountry/locales/": "tokenizers of other models, and names of countries",
    r"tvm_ffi/(3rdparty|include|src)/": "sources of a compiled package",
    r"(.*/)?(tests|__pycache__)/": "tests",
    r".*\.jpg$": "pictures of tests",
}
_PRUNED = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
_LEFT_OUT = re.compile("|".join(f"(?:{pattern})" for pattern in LEFT_OUT))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of the packed tar."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle is. `recipe` says what it was made from; equal ones make equal bytes."""

    recipe: str
    packages: Mapping[str, str]
    unpacked_bytes: int
    blanked_bytes: int
    parts: tuple[Part, ...]

    def text(self) -> str:
        """As it stands in each part's folder."""
        head = {"format": 1, "kind": KIND, "machine": MACHINE, "python": PYTHON}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"


def locked() -> dict[str, str]:
    """Version by name of what the lock pins. Raises Trouble for a line without a version and a digest."""
    pins = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
            if match is None:
                raise Trouble(
                    f"{LOCK.name} has a line that pins nothing: {line}", "write NAME==VERSION --hash=sha256:HEX"
                )
            pins[match[1]] = match[2]
    return pins


def recipe_digest() -> str:
    """What the bytes of a bundle follow from: the lock, what is left out and blanked, and how the rest is packed."""
    how = [_LAYOUT, TARGET, list(LEFT_OUT), _PRUNED, _PRESET, _BLOCK_BYTES]
    return hashlib.sha256(LOCK.read_bytes() + json.dumps(how).encode()).hexdigest()


def build(out: Path, *, python: Path, part_mib: int) -> Manifest:
    """Make the bundle in the folder `out`, which is new or holds an older one, in parts of at most `part_mib` MiB.

    One that was made from the same lock in parts of that size is kept. `python` has pip and a package index.
    Raises Trouble when a wheel cannot be fetched or is another one than the lock's.
    """
    if out.exists() and any(out.iterdir()) and not list(out.glob(f"part-*/{MANIFEST}")):
        raise Trouble(f"{out} is not empty and no bundle", "name a new folder")
    kept = _same(out, part_mib)
    if kept is not None:
        say(f"{out} is that bundle already")
        return kept
    wheels = _fetch(python)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out.parent) as scratch:
        made = Path(scratch, "bundle")
        made.mkdir()
        tar = Path(scratch, "site.tar")
        say(f"laying out {len(wheels)} wheels without what a Hopper GPU never loads")
        blanked = _lay_out(wheels, tar)
        say(f"packing {tar.stat().st_size >> 20} MiB, minutes of every core")
        parts = _cut(_packed(tar), made, part_mib << 20)
        manifest = Manifest(
            recipe=recipe_digest(),
            packages=locked(),
            unpacked_bytes=tar.stat().st_size,
            blanked_bytes=blanked,
            parts=tuple(parts),
        )
        for folder in sorted(made.iterdir()):
            (folder / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """One manifest, checked. Raises Trouble."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        head = tuple(document.pop(name) for name in ("format", "kind", "machine", "python"))
        parts = tuple(Part(**one) for one in document.pop("parts"))
        manifest = Manifest(parts=parts, **document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Trouble(
            f"{path} is no manifest of a bundle: {error}", "./run vllm-bundle, where there is a network"
        ) from error
    if head != (1, KIND, MACHINE, PYTHON):
        raise Trouble(f"{path} is of another kind, or for another machine: {head}", "./run vllm-bundle makes one")
    for part in parts:
        clean = PurePosixPath(part.path)
        if clean.is_absolute() or ".." in clean.parts:
            raise Trouble(f"the bundle names a file outside itself: {part.path!r}")
    return manifest


def _same(out: Path, part_mib: int) -> Manifest | None:
    """The bundle that is there, if it is the one that would be made."""
    found = sorted(out.glob(f"part-*/{MANIFEST}"))
    if not found:
        return None
    try:
        manifest = read_manifest(found[0])
    except Trouble:
        return None
    whole = all((out / one.path).is_file() and (out / one.path).stat().st_size == one.bytes for one in manifest.parts)
    sizes = [one.bytes for one in manifest.parts]
    fits = max(sizes) <= part_mib << 20 and (len(sizes) == 1 or sizes[0] == part_mib << 20)
    return manifest if manifest.recipe == recipe_digest() and whole and fits else None


def _fetch(python: Path) -> list[Path]:
    """The lock's wheels, which pip proves; those of an earlier call are used again."""
    wheels = CACHE / "vllm-bundle/wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    digests = set(re.findall(r"sha256:([0-9a-f]{64})", LOCK.read_text(encoding="utf-8")))
    if not digests - (found := _by_digest(wheels)).keys():
        return sorted(found[one] for one in digests)
    pip: list[str | Path] = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--require-hashes", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for old in ("manylinux2014", "manylinux2010", "manylinux1"):
        pip += ["--platform", f"{old}_{MACHINE}"]
    for minor in range(_NEWEST_LIBC, _OLDEST_LIBC - 1, -1):
        pip += ["--platform", f"manylinux_2_{minor}_{MACHINE}"]
    say(f"fetching {len(locked())} wheels, some 400 MB the first time")
    if call([*pip, "--dest", wheels, "--find-links", wheels, "--requirement", LOCK]) != 0:
        raise Trouble(
            "pip could not fetch the wheels of vLLM", "its words are above; a package index must be reachable"
        )
    found = _by_digest(wheels)
    if missing := digests - found.keys():
        raise Trouble(f"{len(missing)} wheels of {LOCK.name} are not in {wheels}", f"remove {wheels} and try again")
    return sorted(found[one] for one in digests)


def _lay_out(wheels: Sequence[Path], tar: Path) -> int:
    """Write the tar; the bytes of GPU code that were blanked."""
    blanked, pruned = 0, set()
    with ExitStack() as stack, tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        for path, entry in sorted(_chosen(wheels, stack)):
            assert entry.data is not None  # noqa: S101 - regular files alone come out of wheels
            with entry.data() as opened:
                data = bytearray(opened.read())
            if path in _PRUNED:
                done = fatbin.prune(data, target=TARGET, name=path)
                say(f"{path}: kept {done.kept_bytes >> 20} MiB of GPU code, blanked {done.blanked_bytes >> 20}")
                blanked += done.blanked_bytes
                pruned.add(path)
            info = tarfile.TarInfo(path)
            info.size, info.mode, info.mtime = len(data), entry.mode, WHEN
            archive.addfile(info, io.BytesIO(data))
    if absent := set(_PRUNED) - pruned:
        raise Trouble(f"the wheel of vLLM has no {', '.join(sorted(absent))}", "mend _PRUNED of house/bundle.py")
    return blanked


def _chosen(wheels: Sequence[Path], stack: ExitStack) -> Iterator[tuple[str, Entry]]:
    for entry in wheel_entries(wheels, _SITE, stack):
        path = entry.path.removeprefix(f"{_SITE}/")
        if path != entry.path and not _LEFT_OUT.match(path):
            yield path, entry


def _packed(tar: Path) -> Iterator[bytes]:
    """An xz file of several streams, one a block."""
    with tar.open("rb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        blocks = range(0, tar.stat().st_size, _BLOCK_BYTES)

        def pack(at: int) -> bytes:
            return lzma.compress(os.pread(file.fileno(), _BLOCK_BYTES, at), preset=_PRESET)

        yield from pool.map(pack, blocks)


def _cut(packed: Iterator[bytes], made: Path, part_bytes: int) -> Iterator[Part]:
    """Write the parts' files."""
    held, number = bytearray(), 0
    for piece in packed:
        held += piece
        while len(held) > part_bytes:
            yield _write_part(made, number, bytes(held[:part_bytes]))
            del held[:part_bytes]
            number += 1
    yield _write_part(made, number, bytes(held))


def _write_part(made: Path, number: int, data: bytes) -> Part:
    path = made / f"part-{number}" / _DATA
    path.parent.mkdir()
    path.write_bytes(data)
    return Part(path=path.relative_to(made).as_posix(), bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _by_digest(wheels: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(wheels.glob("*.whl")):
        with path.open("rb") as file:
            found[hashlib.file_digest(file, "sha256").hexdigest()] = path
    return found
