"""A model of a few thousand parameters, batches of ragged documents, and gradients worked out the plain way."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import LossFn, LossWeightFn
from archon.schema.config import EngineConfig

VOCAB = 101
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 70,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
# Odd lengths, two equal neighbors, one document without a prediction.
LENGTHS = (13, 5, 5, 1, 21, 8, 3)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, as PyTorch gathers one by itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_config(folder: Path, **changes: Any) -> str:
    """A folder that holds `config.json` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def make_engine(
    folder: Path, total_steps: int | None = None, hf: dict[str, Any] | None = None, **config: Any
) -> ArchonEngine:
    """An initialized engine with fresh weights, on the CPU."""
    path = write_config(folder / "model", **(hf or {}))
    defaults = {"device": "cpu", "init_from_scratch": True, "max_tokens_per_mb": 64}
    engine = ArchonEngine(EngineConfig(path=path, **(defaults | config)))
    engine.initialize(total_steps)
    return engine


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def loss_masks(docs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """A prompt of random length is not trained; the second document not at all."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for index, doc in enumerate(docs):
        prompt = int(torch.randint(1, max(2, len(doc) // 2 + 1), (1,), generator=generator))
        mask = torch.ones_like(doc)
        mask[: len(doc) if index == 1 else prompt] = 0
        masks.append(mask)
    return masks


def padded(
    docs: Sequence[Tensor], side: str = "right", extra: int = 0, fill: int = 0, **fields: Sequence[Tensor]
) -> dict[str, Tensor]:
    """[B, S] with `extra` columns more than needed, `fill` in the padding; 0-D entries of `fields` give [B]."""
    width = max(map(len, docs)) + extra

    def pad(x: Tensor, value: float) -> Tensor:
        missing = width - len(x)
        return F.pad(x, (0, missing) if side == "right" else (missing, 0), value=value)

    batch = {
        "input_ids": torch.stack([pad(doc, fill) for doc in docs]),
        "attention_mask": torch.stack([pad(torch.ones_like(doc), 0) for doc in docs]).bool(),
    }
    for name, values in fields.items():
        batch[name] = torch.stack([pad(v, fill) if v.ndim else v for v in values])
    return batch


def sft_batch(lengths: Sequence[int] = LENGTHS, seed: int = 0, **how: Any) -> dict[str, Tensor]:
    docs = documents(lengths, seed)
    return padded(docs, loss_mask=loss_masks(docs, seed + 1), **how)


def engine_gradients(
    engine: ArchonEngine,
    batch: dict[str, Tensor],
    loss_fn: LossFn,
    weight_fn: LossWeightFn,
    max_tokens: int = 64,
    temperature: float = 1.0,
    reduce_every: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and every parameter's gradient, computed by the engine."""
    engine.config.max_tokens_per_mb = max_tokens
    engine.config.gradient_reduction = "per_microbatch" if reduce_every else "per_step"
    grads, metrics = engine.gradients(batch, loss_fn, weight_fn, temperature, full=False)
    missing = dict(engine.model.named_parameters()).keys() - grads.keys()
    assert not missing, f"{sorted(missing)} have no gradient"
    return metrics["loss"], {name: full_tensor(grad) for name, grad in grads.items()}


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grads[name] = full_tensor(parameter.grad).clone()
    model.zero_grad(set_to_none=True)
    return grads


def one_document_at_a_time(model: nn.Module, doc: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logprob and entropy [len - 1] of tokens 1, 2, … of one document, from whole logits."""
    positions, ends = torch.arange(len(doc)), torch.tensor([0, len(doc)], dtype=torch.int32)
    logits = model(doc, positions, ends, len(doc))[:-1]
    logp = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logp.gather(-1, doc[1:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def reference_gradients(
    model: nn.Module,
    docs: Sequence[Tensor],
    loss: Callable[[int, Tensor, Tensor], Tensor],
    units: float,
    temperature: float = 1.0,
) -> tuple[float, dict[str, Tensor]]:
    """Σ loss(index, logprobs, entropy) / units over documents run one at a time, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    total = (
        sum(loss(i, *one_document_at_a_time(model, doc, temperature)) for i, doc in enumerate(docs) if len(doc) > 1)
        / units
    )
    assert isinstance(total, Tensor)
    total.backward()
    return float(total.detach()), take_gradients(model)


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every parameter of the reference, each with a gradient that is not all zero."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, f"the reference gradient of {name} is all zero"
        difference = float((actual[name] - gradient).abs().max() / scale)
        assert difference <= tolerance, f"{name}: {difference:.2e} > {tolerance:.0e}"
