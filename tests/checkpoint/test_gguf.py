"""GGUF: transformers reads the file as the same model and tokenizer; what GGUF would lose is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from archon.checkpoint.convert import convert
from archon.checkpoint.formats.gguf import _LLAMA3_SPLIT as LLAMA3_SPLIT
from archon.checkpoint.formats.gguf import _QWEN2_SPLIT as QWEN2_SPLIT
from archon.checkpoint.formats.gguf import GGUF_TYPES, GGUFType
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.oracle import hf_model, random_config
from tests.lora.oracle import TOLERANCE, base_of, difference, engine_of, their_logits, theirs

PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 30000.0},
    "rms_norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"attention_bias": False, "mlp_bias": False},
    "mistral": PLAIN | {"sliding_window": None},
    "qwen2": PLAIN | {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "hidden_size": 64},
    "qwen3": PLAIN
    | {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "attention_bias": False}
    | {"head_dim": 128, "hidden_size": 64, "tie_word_embeddings": True},
}


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()


def rounded(tensor: Tensor, kind: GGUFType) -> Tensor:
    """Return what a matrix is in a file."""
    if kind == "f32" or tensor.dim() < 2:
        return tensor
    if kind == "f16" or tensor.shape[-1] % 32:
        return tensor.half().float()
    q8 = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), q8), q8))


@pytest.mark.parametrize("kind", GGUF_TYPES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_reads_the_same_model(model_type: str, kind: GGUFType, tmp_path: Path) -> None:
    base = base_of(model_type, tmp_path / "base", **FAMILIES[model_type])
    file = base / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("_proj.bias", "norm.weight")):
            tensor.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    save_file(tensors, file, {"format": "pt"})
    convert(base, tmp_path / "out", "gguf", gguf_type=kind)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    found = their_logits(read(tmp_path / "out"))
    plain = their_logits(theirs(base))
    if model_type in ("llama", "mistral"):  # their rows are permuted, in whole rows
        assert kind != "f32" or torch.equal(found, plain)
    save_file({name: rounded(tensor, kind) for name, tensor in tensors.items()}, file, {"format": "pt"})
    assert difference(found, their_logits(theirs(base))) <= TOLERANCE
    assert kind == "f32" or difference(found, plain) > 1e-4


def test_a_lora_is_merged_on_the_way(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base", **FAMILIES["llama"])
    engine = engine_of(base, lora={"rank": 4, "init": "random"})
    engine.save(tmp_path / "lora", "peft")
    convert(base, tmp_path / "out", "gguf", lora=tmp_path / "lora", gguf_type="f32")
    convert(base, tmp_path / "hf", "hf", lora=tmp_path / "lora")
    found = their_logits(read(tmp_path / "out"))
    assert torch.equal(found, their_logits(theirs(tmp_path / "hf")))
    assert difference(found, their_logits(theirs(base))) > 0.05


TEXT = (
    "Hello  world, it's 12345 o'clock!\n\n\tDéjà vu: naïve façade — 中文字符 <|end|> and <think>twice</think> 🙂 a b c"
)
SPLITS = {"gpt-2": None, "qwen2": QWEN2_SPLIT, "llama-bpe": LLAMA3_SPLIT}


def save_tokenizer(folder: Path, split: str | None, size: int = 320) -> None:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level]) if parts else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "12 123 1234 12345 it's world worlds Hello"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_tokens(["<think>"])
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)


@pytest.mark.parametrize("pre", SPLITS)
def test_transformers_reads_the_same_tokenizer(pre: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf_model(random_config(3, "llama", vocab_size=330, **FAMILIES["llama"])).save_pretrained(base)
    save_tokenizer(base, SPLITS[pre])
    convert(base, tmp_path / "out", "gguf")
    original = AutoTokenizer.from_pretrained(base)
    found = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    ids = original(TEXT).input_ids
    assert found(TEXT).input_ids == ids
    assert found.decode(ids) == original.decode(ids)
    assert original.eos_token_id in ids and original.convert_tokens_to_ids("<think>") in ids
    assert (found.eos_token_id, found.pad_token_id) == (original.eos_token_id, original.pad_token_id)
    assert found.chat_template == original.chat_template
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == pre
    assert len(fields["tokenizer.ggml.tokens"].data) == 330


@pytest.mark.parametrize(
    ("model_type", "fields", "complaint"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_scaling is"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and 'silu' would be read; export Hugging Face"),
        ("mistral", {"sliding_window": 3}, "sliding_window is 3, and None would be read"),
        ("qwen3", {"head_dim": 32}, "head_dim is 32, and 128 would be read"),
        ("llama", {"attention_bias": True}, "attention_out_bias is True, and False|attention_bias is True, and False"),
    ],
)
def test_a_model_that_gguf_would_change_is_refused(
    model_type: str, fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    base = base_of(model_type, tmp_path / "base", **FAMILIES[model_type] | fields)
    with pytest.raises(ConfigError, match=complaint):
        convert(base, tmp_path / "out", "gguf")
    assert [*tmp_path.iterdir()] == [base]


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = base_of("olmo3", tmp_path / "other")
    with pytest.raises(
        ConfigError, match="archon writes no GGUF of olmo3; expected one of llama, mistral, qwen2, qwen3"
    ):
        convert(other, tmp_path / "out", "gguf")
    base = base_of("llama", tmp_path / "base", **FAMILIES["llama"])
    save_tokenizer(base, None)
    with pytest.raises(ConfigError, match=r"tokenizer.json: token \d+ is outside the model's vocabulary of 128"):
        convert(base, tmp_path / "out", "gguf")
    content = json.loads((base / "tokenizer.json").read_text())
    for changed in (
        content | {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
        content | {"model": content["model"] | {"byte_fallback": True}},
        content | {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}},
    ):
        (base / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match="archon writes byte-level BPE tokenizers of GPT-2, Qwen2 and Llama 3"):
            convert(base, tmp_path / "out", "gguf")
    (base / "tokenizer.json").unlink()
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 70000
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight' has values that are not finite in f16; expected at most"
    ):
        convert(base, tmp_path / "out", "gguf")
    convert(base, tmp_path / "wide", "gguf", gguf_type="f32")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"--to gguf needs the package gguf .*: pip install 'archon-engine\[gguf\]'"):
        convert(base, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()
