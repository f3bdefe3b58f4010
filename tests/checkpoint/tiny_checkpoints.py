"""Checkpoints of a few thousand weights, written by safetensors' own writer, so that archon's is not its own judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from archon.models import get_model_spec

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "intermediate_size": 35,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "mlp_only_layers": [0],
}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": None}


def config_with(**changes: Any) -> dict[str, Any]:
    """`CONFIG` with changes; None removes a field."""
    return {name: value for name, value in (CONFIG | changes).items() if value is not None}


def random_weights(config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """One random tensor for every key that a checkpoint of `config` holds."""
    adapter = get_model_spec(config["model_type"]).state_dict_adapter_class(config)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in adapter.hf_shapes().items()}


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    """Config and weights, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: weights[key] for key in list(weights)[number::shards]}
        save_file(part, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_checkpoint(
    folder: Path, shards: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint folder and the weights in it."""
    config = config_with(torch_dtype=str(dtype).removeprefix("torch."), **changes)
    weights = random_weights(config, dtype, seed)
    return write_checkpoint(folder, config, weights, shards), weights


def hf_state(model: nn.Module, folder: Path, is_critic: bool = False) -> dict[str, Tensor]:
    """The weights of a model of this project under Hugging Face's names."""
    config = json.loads((folder / "config.json").read_text())
    adapter = get_model_spec(config["model_type"]).state_dict_adapter_class(config, is_critic=is_critic)
    return adapter.to_hf({name: parameter.detach() for name, parameter in model.named_parameters()})


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def edit_header(file: Path, edit: Any) -> None:
    """Rewrite the header of a safetensors file: `edit` gets it as a dictionary and returns one, or raw text."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    edited = edit(json.loads(content[8 : 8 + length]))
    text = edited.encode() if isinstance(edited, str) else json.dumps(edited).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
