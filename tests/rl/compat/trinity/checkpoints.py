"""A checkpoint that always gives one answer, for models that a test needs the words of."""

from __future__ import annotations

import string
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from archon.rl.bootstrap import make_tokenizer
from archon.training.config import TokenizerRecipe

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"


def write_judge(path: Path, answer: str) -> Path:
    """Write a Qwen3 whose next token depends on the last one only, and returns its folder.

    After the line break that ends every prompt it says `answer`, whose characters all differ, and the end of the turn.
    """
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=ALPHABET, chat_template="chatml"))
    chain = [*tokenizer("\n" + answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert len(set(chain)) == len(chain)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name or name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.zeros_like(weight)
    for place, (token, following) in enumerate(pairwise(chain)):
        weights["model.embed_tokens.weight"][token, place] = 1.0
        weights["lm_head.weight"][following, place] = 20.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    return path
