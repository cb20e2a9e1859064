"""What the device room shows, and what it keeps in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.errors import MissingCapability
from coldsnap.hydrate import cuda


def importers_of(*packages: str) -> set[str]:
    found = set()
    for path in Path(cuda.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in packages for name in names):
                found.add(path.name)
    return found


def test_public_names() -> None:
    assert sorted(cuda.__all__) == [
        "AdoptedMemory",
        "CudaMemory",
        "DEFAULT_DEVICE_BASE",
        "DeviceArray",
        "DeviceFacts",
        "DeviceWindow",
        "Driver",
        "DriverFailure",
        "Pages",
        "RegisteredFile",
        "import_bindings",
        "open_driver",
    ]
    assert all(hasattr(cuda, name) for name in cuda.__all__)


def test_the_driver_is_touched_in_one_file_and_torch_in_none() -> None:
    assert importers_of("cuda") == {"bindings.py"}
    assert importers_of("ctypes", "torch", "numpy", "cupy") == set()


def test_importing_the_room_imports_no_cuda() -> None:
    code = "import sys, coldsnap.hydrate; print('cuda' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU, so there is a driver")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(MissingCapability, match=r"cuda-bindings|CUDA driver"):
        cuda.open_driver()
