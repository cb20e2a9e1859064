"""Use a bundle of vLLM on a GPU host without a network: `./run vllm-bundle-use`.

Its packages go into the `.venv` that a kit made, beside the kit's wheels and before what the host has: torch and what
comes with it. Then a new process of that Python shows that vLLM, its compiled parts and coldsnap's plugin load.
"""

import hashlib
import json
import lzma
import platform
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, cast

from house.bundle import MANIFEST, PYTHON, Manifest, Part, read_manifest, recipe_digest
from house.say import Trouble, quiet, say
from house.setup import read_stamp

STAMP = MANIFEST  # in the environment, so that it goes with it
_PIECE_BYTES = 1 << 20
# In a process of its own. Of vLLM and of our plugin everything is imported that a served engine imports; the parts that
# are linked with the driver's library only where there is one.
_PROOF = """
import ctypes, importlib, importlib.metadata as metadata, json, time
begun = time.monotonic()
import torch, vllm
found = {"vllm": vllm.__version__, "torch": torch.__version__}
points = {one.name: one for one in metadata.entry_points(group="vllm.general_plugins")}
points["coldsnap"].load()()
from coldsnap.engines.vllm import loader
loader.register()
from coldsnap.engines.vllm.compat import require_symbols
require_symbols()
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as formats
found["load_format"] = formats["coldsnap"].__module__
modules = ["vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "coldsnap.engines.vllm.server"]
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    found["gpu"], found["why_not"] = None, str(error)
else:
    modules += ["vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C"]
    modules += ["vllm.cumem_allocator", "vllm.v1.worker.gpu_worker"]
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
for name in modules:
    importlib.import_module(name)
found["modules"], found["seconds"] = modules, round(time.monotonic() - begun, 1)
print("\\n" + json.dumps(found))
"""


def use(folders: Sequence[Path], *, environment: Path) -> dict[str, Any]:
    """Unpack the parts in `folders` into `environment`, unless they are there; what was shown to load.

    A folder is a part's, or holds parts' folders. Raises Trouble for a part that is missing or damaged, a bundle of
    another checkout or for another Python, an environment that no kit made, and when something does not load.
    """
    manifest, parts = find(folders)
    here = (platform.machine(), ".".join(platform.python_version_tuple()[:2]))
    if here != ("x86_64", PYTHON):
        raise Trouble(f"the bundle is for x86_64 and Python {PYTHON}, this is {' and Python '.join(here)}")
    if "kit" not in read_stamp("packages") or not (environment / "bin/python").exists():
        raise Trouble(
            f"{environment} was not made from a kit", "./run kit-use KIT_DIR first; the bundle goes into that"
        )
    if (environment / STAMP).exists() and (environment / STAMP).read_text(encoding="utf-8") == manifest.text():
        say(f"{environment.name} has this bundle already")
    else:
        for part, path in parts:
            _prove(part, path)
        say(f"unpacking {manifest.unpacked_bytes >> 20} MiB into {environment.name}")
        (environment / STAMP).unlink(missing_ok=True)
        _unpack([path for _, path in parts], next(environment.glob("lib/python*/site-packages")))
        (environment / STAMP).write_text(manifest.text(), encoding="utf-8")
    return prove(environment / "bin/python")


def find(folders: Sequence[Path]) -> tuple[Manifest, list[tuple[Part, Path]]]:
    """The manifest, and where each of its parts lies. Raises Trouble."""
    homes = [
        path.parent for folder in folders for path in (folder / MANIFEST, *sorted(folder.glob(f"part-*/{MANIFEST}")))
    ]
    homes = [home for home in homes if (home / MANIFEST).exists()]
    if not homes:
        raise Trouble(
            f"there is no part of a bundle in {', '.join(map(str, folders))}",
            "make one with ./run vllm-bundle DIR, where there is a network, and copy its parts here",
        )
    manifests = [read_manifest(home / MANIFEST) for home in homes]
    manifest = manifests[0]
    if any(one.parts != manifest.parts for one in manifests):
        raise Trouble(f"{', '.join(map(str, homes))} are parts of different bundles", "copy the parts of one")
    if manifest.recipe != recipe_digest():
        raise Trouble("the bundle was made from another lock than this checkout's", "make it again: ./run vllm-bundle")
    places = []
    for part in manifest.parts:
        name = Path(part.path)
        place = next((home / name.name for home in homes if home.name == name.parent.name), None)
        if place is None or not place.is_file():
            raise Trouble(f"{part.path} of {len(manifest.parts)} parts is not here", "copy it too, and name its folder")
        places.append((part, place))
    return manifest, places


def prove(python: Path) -> dict[str, Any]:
    """What a new process of `python` could load. Raises Trouble with its last words when something does not."""
    done = quiet([python, "-c", _PROOF], timeout_s=600)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise Trouble(
            f"vLLM does not load in {python}:\n{said}", "the host's Python needs torch 2.11 and transformers 5"
        )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _prove(part: Part, path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != part.sha256:
        raise Trouble(f"{path} has SHA-256 {digest}, the manifest says {part.sha256}", "copy that part again")


class _Joined:
    """The parts as one stream of bytes to read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._left = list(paths)
        self._file: BinaryIO | None = None

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; none at the end."""
        while True:
            if self._file is None:
                if not self._left:
                    return b""
                self._file = self._left.pop(0).open("rb")
            data = self._file.read(size if size >= 0 else _PIECE_BYTES)
            if data:
                return data
            self.close()

    def close(self) -> None:
        """Close the part that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _unpack(paths: Sequence[Path], site: Path) -> None:
    """The packed tar's files to where they are imported from; a file of the same name is replaced."""
    with (
        closing(_Joined(paths)) as joined,
        lzma.open(cast("BinaryIO", joined)) as packed,
        tarfile.open(fileobj=cast("BinaryIO", packed), mode="r|") as tar,
    ):
        tar.extractall(site, filter="data")


def words(found: dict[str, Any]) -> str:
    """What was shown, in a line."""
    gpu = found["gpu"] or f"no GPU ({found.get('why_not', 'torch sees none')})"
    return f"vLLM {found['vllm']} with torch {found['torch']}, {gpu}, and the plugin load: {found['seconds']} s"
