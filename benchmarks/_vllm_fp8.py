"""A checkpoint in FP8 out of one in bf16: ``python -m benchmarks._vllm_fp8 SOURCE OUT``. Needs torch and safetensors.

The matrices of linear layers become e4m3, each block of 128 x 128 with a scale of its own in float32, as published
checkpoints with ``weight_block_size`` have them; embeddings, norms and the head stay what they were.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
_INDEX = "model.safetensors.index.json"
_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (rows, columns) as e4m3, and what each block was divided by, (rows / 128, columns / 128) rounded up."""
    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    scaled = (blocks / scale[:, None, :, None]).view(high * BLOCK, wide * BLOCK)[:rows, :columns]
    return scaled.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()


def convert(source: Path, out: Path) -> None:
    """Write the folder ``out``, which must not exist, whole or not at all."""
    aside = out.with_name(f".{out.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    places: dict[str, str] = {}
    total = 0
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file() and path.name != _INDEX:
                shutil.copyfile(path, aside / path.name)
            continue
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            if name.endswith("_proj.weight") and tensor.dim() == 2:
                tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensor)
            else:
                tensors[name] = tensor
        save_file(tensors, aside / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (aside / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _QUANTIZATION
    (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    aside.rename(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
