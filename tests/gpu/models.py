"""Models on a GPU, with the CPU's float64 of the same weights next to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archon.models import BaseArchonModel, get_model_spec
from archon.models.attention.meta import PackedAttention
from archon.models.layers.head import WeightedLoss
from archon.tools.check.oracle import randomize_vectors
from tests.cuda_traced.models import VOCAB

LENGTHS = (5, 17, 1, 40, 40, 150)
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def build(config: dict[str, Any], attn_type: str, device: torch.device, dtype: torch.dtype) -> BaseArchonModel:
    """Return the model of a config with weights that are the same everywhere, rounded to bfloat16."""
    torch.manual_seed(0)
    spec = get_model_spec(config["model_type"], text_only="vision_config" not in config)
    options = {"delta_rule": "fla"} if attn_type == "fla" else {}
    kind = "varlen" if attn_type == "fla" else attn_type
    model = spec.model_class(spec.model_args_class.from_hf_config(config, attn_type=kind, **options))
    model.init_weights()
    randomize_vectors(model)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(x.bfloat16())
    return model.to(device, dtype)


class Pack:
    """A pack of documents, its labels and weights of its tokens."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths, total = lengths, sum(lengths)
        self.tokens = torch.randint(VOCAB, (total,), generator=generator)
        self.labels = torch.randint(VOCAB, (total,), generator=generator)
        self.weights = torch.rand(total, generator=generator)
        self.positions = torch.cat([torch.arange(n) for n in lengths])
        self.bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def gradients(self, model: BaseArchonModel, attn_type: str, experts: Tensor | None = None) -> dict[str, Tensor]:
        """Return the loss and every gradient, in float64 on the CPU. `experts` [T, L, k] are replayed."""
        device = next(model.parameters()).device
        tokens, labels, weights, positions, bounds = (
            x.to(device) for x in (self.tokens, self.labels, self.weights, self.positions, self.bounds)
        )
        meta = PackedAttention(bounds, max(self.lengths), "varlen" if attn_type == "fla" else attn_type, self.lengths)
        given = {} if experts is None else {"routed_experts": experts.to(device)}
        head = {"labels": labels, "loss_weights": weights}
        found = model(tokens, positions, bounds, max(self.lengths), meta, **head, **given)
        assert isinstance(found, WeightedLoss)
        found.loss.backward()
        grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        model.zero_grad(set_to_none=True)
        return {name: x.detach().double().cpu() for name, x in ({"loss": found.loss} | grads).items()}

    @torch.no_grad()
    def experts(self, model: BaseArchonModel) -> Tensor | None:
        """Return the experts [T, L, k] that a model on the CPU chooses, or None of one without."""
        model(self.tokens, self.positions, self.bounds, max(self.lengths))
        chosen = [stats.experts for stats in model.router_stats]
        return torch.stack([x for x in chosen if x is not None], 1) if chosen else None


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return |a - b| / |b| of all gradients as one vector."""
    assert found.keys() == wanted.keys()
    names = sorted(found.keys() - {"loss"})
    ours, theirs = (torch.cat([x[name].flatten() for name in names]) for x in (found, wanted))
    return float((ours - theirs).norm() / theirs.norm())
