"""Activations of a block, counted by a dry run: equal to the formulas, and known without a formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archon.engine.memory.activations import BlockActivations, MicroBatchShard, block_activations, is_shared
from archon.engine.memory.traced_block import TOKENS, trace_block
from archon.models import get_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.layers.attention import AttentionLayer
from archon.models.layers.spec import LayerSpec
from archon.parallel.layout import ParallelLayout, parse_layout
from archon.schema.errors import ConfigError
from archon.tools.planner.describe import describe
from archon.tools.planner.hardware import read_hardware
from archon.tools.planner.search import Planner, PlanRequest
from tests.tools.planner.models import DENSE, MODELS


def args_of(name: str) -> BaseModelArgs:
    return get_model_spec(MODELS[name]["model_type"]).model_args_class.from_hf_config(MODELS[name])


def activations(layer: LayerSpec, tokens: int = TOKENS, layout: str = "d1") -> BlockActivations:
    return block_activations(DENSE["hidden_size"], layer, MicroBatchShard(parse_layout(layout), tokens, 2), "auto")


FIRST = [(name, 0) for name in ("dense", "bias", "norms_both", "moe", "latent", "delta", "mamba")]


@pytest.mark.parametrize(("name", "layer"), [*FIRST, *(("one_part", layer) for layer in (1, 2, 3))])
def test_a_dry_run_counts_what_the_formulas_count(name: str, layer: int) -> None:
    spec = args_of(name).layer_specs[layer]
    traced, formula = trace_block(DENSE["hidden_size"], spec, torch.bfloat16), activations(spec)
    assert traced.input == formula.input
    # The planner's aim for memory is 10 %.
    assert traced.input + traced.operators + traced.elementwise == pytest.approx(formula.saved, rel=0.06)
    kept = traced.input + traced.operators + traced.unsaved_operators
    assert kept == pytest.approx(formula.kept_by_op, rel=0.1)


def test_weights_are_no_activations() -> None:
    traced = trace_block(DENSE["hidden_size"], args_of("dense").layer_specs[0], torch.bfloat16)
    assert (traced.operators + traced.elementwise) % TOKENS == 0, "a norm has 512 bytes"


class OneMore(nn.Module):
    """Keeps one tensor more than the attention that it wraps."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, rotation: Any, attention: Any) -> Tensor:
        return self.attention(x.sin().exp(), rotation, attention)


@dataclass(frozen=True)
class OneMoreLayer(AttentionLayer):
    """A kind of layer defined outside archon: it inherits sizes, and has no formula."""

    def build(self, layer: int, dim: int) -> nn.Module:
        """See `MixerSpec.build`."""
        return OneMore(super().build(layer, dim))


def one_more() -> LayerSpec:
    layer = args_of("dense").layer_specs[0]
    return replace(layer, mixer=OneMoreLayer(**vars(layer.mixer)))


def test_a_layer_without_a_formula_is_counted_by_what_it_computes() -> None:
    plain = trace_block(DENSE["hidden_size"], args_of("dense").layer_specs[0], torch.bfloat16)
    outside, hidden = activations(one_more()), TOKENS * DENSE["hidden_size"] * 2
    # The exponential keeps its output, which the projections keep too; the sine keeps the input.
    assert outside.saved - (plain.input + plain.operators + plain.elementwise) == hidden
    assert outside.kept_by_op == activations(args_of("dense").layer_specs[0]).kept_by_op
    half = activations(one_more(), TOKENS // 2, "d4")
    assert (2 * half.saved, 2 * half.working) == (outside.saved, outside.working)


@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_a_layer_without_a_formula_is_refused_where_ranks_share_it(layout: str) -> None:
    with pytest.raises(ConfigError, match=f"memory of OneMoreLayer is known only .* layout {layout} has t, c or e"):
        activations(one_more(), layout=layout)


def test_layouts_of_an_unknown_memory_are_left_out_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_model_spec("qwen3")
    args = spec.model_args_class.from_hf_config(DENSE)
    monkeypatch.setattr(type(args), "layer_specs", (one_more(),) * args.n_layers)
    plan = Planner(spec, args, read_hardware("h100-80gb")).plan(PlanRequest("m", 4, 2**16, 1024))
    layouts = {fit.candidate.layout for fit in plan.best}
    assert layouts and all(layout.tp * layout.cp == 1 for layout in layouts)
    assert plan.rejections.unknown > 0
    assert "layouts with t, c or e: a kind of layer has no formula" in "\n".join(describe(plan))


def test_ranks_share_a_block_with_t_c_or_e() -> None:
    assert not is_shared(ParallelLayout(4, 2, 2))
    assert all(is_shared(parse_layout(layout)) for layout in ("t2", "c2", "d2e2"))
