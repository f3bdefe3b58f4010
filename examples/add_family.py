"""A model family of your own, from its definition to logits and gradients equal to those of transformers.

    python examples/add_family.py OUT

The family is Llama's decoder under another name, with a checkpoint name of its own. A package registers it with an
entry point instead (models/README.md, "A family in your own package"); `archon check-model` then runs all contracts.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import archon
from archon.models import BaseArchonModel, BaseModelArgs, register_model_spec
from archon.models.hf.config import ATTENTION_BIAS, NULLABLE_HEAD_DIM, dense_fields
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.spec import define_family

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


# 1. The fields of config.json, and the values that the decoder assumes: any other value is an error.
@dataclass
class MyLlamaModelArgs(BaseModelArgs):
    """Config fields of the family."""

    model_types = frozenset({"my_llama"})
    biases_all_projections = True
    hf_fixed_values: ClassVar = {"mlp_bias": False, "pretraining_tp": 1}
    hf_fields = dense_fields(NULLABLE_HEAD_DIM, ATTENTION_BIAS, num_key_value_heads=0, max_position_embeddings=2048)


# 2. The names in the checkpoint: Llama's, except for the norm before attention.
def my_name(name: str) -> str:
    """Return the checkpoint's name of one of Llama's weights."""
    return name.replace("input_layernorm", "first_norm")


NAMES = {my_name(name): native for name, native in DENSE_HF_MAP.items()}
MyLlamaModel = BaseArchonModel[MyLlamaModelArgs]
MyLlamaStateDictAdapter, parallelize_my_llama, SPEC = define_family("my_llama", MyLlamaModel, NAMES)


def write_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a checkpoint of the family with the weights of `model`."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "my_llama", "architectures": None}))
    weights = load_file(folder / "model.safetensors")
    save_file({my_name(name): w for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    """Compare the family with transformers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to create, for the checkpoint")
    out = parser.parse_args().out
    torch.manual_seed(0)
    register_model_spec(SPEC)
    reference = LlamaForCausalLM(LlamaConfig(**SIZES))
    write_checkpoint(reference, out / "checkpoint")
    model = archon.load_model(out / "checkpoint", dtype=torch.float32)

    # 3. One document of 12 tokens. The label of a token is the next one; the last token has none.
    tokens = torch.randint(0, SIZES["vocab_size"], (12,))
    labels = torch.cat([tokens[1:], torch.tensor([-100])])
    inputs = tokens, torch.arange(12), torch.tensor([0, 12], dtype=torch.int32)
    expected = reference(tokens[None]).logits[0]
    expected_loss = torch.nn.functional.cross_entropy(expected, labels)
    expected_loss.backward()
    logits = model(*inputs, max_seqlen=12)
    loss = -model(*inputs, max_seqlen=12, labels=labels).logprobs.sum() / 11
    loss.backward()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    print(f"logits: largest difference {(logits - expected).abs().max():.1e}")

    # 4. A gradient has the shape of its weight, so saving the gradients as weights gives them the checkpoint's names.
    for weight in model.parameters():
        assert weight.grad is not None
        weight.data = weight.grad
    archon.save_model(model, out / "gradients", like=out / "checkpoint")
    gradients = load_file(out / "gradients" / "model.safetensors")
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(gradients.pop(my_name(name)), weight.grad, rtol=0, atol=1e-5)
    assert not gradients, f"gradients without a weight in transformers: {sorted(gradients)}"
    print(f"gradients: all {len(list(reference.parameters()))} equal within 1e-5")


if __name__ == "__main__":
    main()
