"""Comparison of a model's logits with transformers' logits for its export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from archon.checkpoint.hf_export import stored_dtypes
from archon.checkpoint.hf_io import load_spec
from archon.checkpoint.hub import checkpoint_folder
from archon.models.base import BaseArchonModel
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError

LOGIT_TOLERANCE = 1e-5
"""Largest accepted `export_difference`, relative and in float32."""


def require_exact_export(config: EngineConfig) -> None:
    """Raise ConfigError if the export of a model rounds its weights: `export_difference` would exceed the tolerance."""
    adapter = load_spec(config.path).adapter
    stored = stored_dtypes(checkpoint_folder(config.path), adapter)
    dtypes = {str(stored.get(name, torch.float32)).removeprefix("torch.") for name in adapter.hf_shapes()}
    narrow = sorted((dtypes if config.export_dtype == "checkpoint" else {config.export_dtype}) - {"float32", "float64"})
    if narrow and config.lora is None:
        raise ConfigError(
            f"verify_export compares float32 logits, and the export is {narrow[0]}, whose rounding exceeds its "
            "tolerance; set actor.export_dtype=float32, or verify_export=false"
        )


@torch.no_grad()
def export_difference(model: BaseArchonModel, path: str | Path, documents: Sequence[Sequence[int]]) -> float:
    """Return max|a − b| / max|b| for the float32 logits a of `model` and b of transformers.

    Args:
        model: trained actor with float32 weights, on any device.
        path: the export.
        documents: token ids; `model` runs them packed, transformers one by one.
    """
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    device = next(model.parameters()).device
    tokens = torch.tensor([token for document in documents for token in document], device=device)
    lengths = torch.tensor([len(document) for document in documents])
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).to(device)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device)
    logits = model(tokens, positions, cu_seqlens, int(lengths.max())).cpu()
    expected = torch.cat([hf_model(torch.tensor([list(document)])).logits[0] for document in documents])
    return float((logits - expected).abs().max() / expected.abs().max())
