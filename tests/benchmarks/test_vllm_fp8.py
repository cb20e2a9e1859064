"""The checkpoint in FP8 that the proof of vLLM makes: what a reader of it multiplies is what was there."""

from __future__ import annotations

import pytest


@pytest.mark.model
def test_blocks_times_their_scales_are_the_matrix() -> None:
    import torch
    from benchmarks._vllm_fp8 import BLOCK, quantize

    weight = torch.randn(300, 260, generator=torch.Generator().manual_seed(0)) * 0.02
    quantized, scale = quantize(weight)
    assert (quantized.dtype, tuple(quantized.shape)) == (torch.float8_e4m3fn, (300, 260))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (3, 3)), "blocks at the edges are cut off, not left out"
    whole = scale.repeat_interleave(BLOCK, 0)[:300].repeat_interleave(BLOCK, 1)[:, :260]
    # Three bits of mantissa: half a step is a sixteenth of a number, or of the smallest normal one, 2 ** -6.
    bound = torch.maximum(weight.abs(), whole * 2**-6) / 16 * 1.001
    assert bool(((quantized.float() * whole - weight).abs() <= bound).all())
