"""Bases with adapters, in archon and in the real `peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from archon.tools.check.oracle import hf_model, random_config

TOLERANCE = 1e-5
TOKENS = torch.arange(3, 40)


def base_of(model_type: str, folder: Path, **fields: Any) -> Path:
    """A checkpoint that transformers wrote, of 128 tokens or more."""
    torch.manual_seed(0)
    hf_model(random_config(3, model_type, vocab_size=128, **fields)).save_pretrained(folder)
    return folder


def engine_of(base: Path, **options: Any) -> ArchonEngine:
    engine = ArchonEngine(EngineConfig.parse({"path": str(base), "device": "cpu"} | options))
    engine.initialize()
    return engine


def logits_of(engine: ArchonEngine) -> Tensor:
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    with torch.no_grad():
        return engine.full_model(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS))


def theirs(base: Path, lora: Path | None = None, kind: Any = AutoModelForCausalLM) -> Any:
    model = kind.from_pretrained(base, dtype=torch.float32).eval()
    return model if lora is None else peft.PeftModel.from_pretrained(model, lora).eval()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def their_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]
