"""Which layouts a model can be trained in: every rule by name, with neighbors that fit, and what is decided."""

from __future__ import annotations

import re
from typing import Any

import pytest

from archon.models import get_model_spec
from archon.parallel.layout import ModelSizes, parse_layout
from archon.parallel.pipeline import plan_stages
from archon.parallel.resolve import resolve_layout
from archon.schema.config import EngineConfig, PipelineConfig
from archon.schema.errors import LayoutError
from tests.distributed.cases import MODELS

DENSE = ModelSizes(heads=8, kv_heads=4, vocab=104, layers=4, hidden=(72,))
MOE = ModelSizes(heads=8, kv_heads=4, vocab=104, layers=4, hidden=(72, 40), experts=6, expert_hidden=9)


def config(layout: str, **options: Any) -> EngineConfig:
    return EngineConfig(path="model", layout=layout, **options)


@pytest.mark.parametrize(
    ("layout", "sizes", "options", "rule"),
    [
        ("t3", DENSE, {}, "tp = 3 does not divide the 8 attention heads"),
        ("t16", DENSE, {}, "tp = 16 does not divide the 8 attention heads"),
        (
            "t4",
            ModelSizes(12, 6, 104, 4, (72,)),
            {},
            "tp = 4 neither divides the 6 KV heads nor is a multiple of them",
        ),
        ("t8", ModelSizes(8, 4, 100, 4, (72,)), {}, "tp = 8 does not divide the vocabulary of 100"),
        ("t8", ModelSizes(8, 4, 104, 4, (60,)), {}, "tp = 8 does not divide the 60 hidden features"),
        ("t8", ModelSizes(8, 4, 104, 4, (72, 20)), {}, "tp = 8 does not divide the 20 hidden features"),
        ("d2e2", DENSE, {}, "ep = 2 and etp = 1 lay out experts, and the model has none"),
        ("(attn:d2t2|ffn:d2t2)", DENSE, {}, "ep = 1 and etp = 2 lay out experts, and the model has none"),
        ("d4e4", MOE, {}, "ep = 4 does not divide the 6 experts"),
        ("(attn:d2t2|ffn:d2t2)", MOE, {}, "etp = 2 does not divide the 9 hidden features of an expert"),
        ("c3", DENSE, {"context_parallel": "ulysses"}, "cp = 3 does not divide the 8 heads of a rank"),
        ("c4t4", DENSE, {"context_parallel": "ulysses"}, "cp = 4 does not divide the 2 heads of a rank"),
        ("p8", DENSE, {}, "p = 8 with schedule 1f1b has 8 stages, and the model 4 layers"),
        ("p4", DENSE, {"pipeline": PipelineConfig(schedule="zbv")}, "p = 4 with schedule zbv has 8 stages"),
        ("p4", DENSE, {"pipeline": PipelineConfig(layers_per_stage=[2, 2])}, "expected 4 numbers of at least 1"),
    ],
)
def test_a_broken_rule_is_named_with_neighbours_that_fit(
    layout: str, sizes: ModelSizes, options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        resolve_layout(config(layout, **options), sizes)
    message = str(refused.value)
    assert rule in message
    near = re.findall(r"\([^)]*\)|[a-z0-9]+", message.partition("nearest layouts that this model fits: ")[2])
    assert near
    for text in near:
        assert parse_layout(text).world_size == parse_layout(layout).world_size
        assert str(resolve_layout(config(text, **options), sizes)) == text


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("t8", DENSE),  # fewer key heads than ranks: neighbors share one
        ("c3", DENSE),  # keys are gathered where heads do not divide
        ("d3p2e3", MOE),
        ("d6e6", MOE),
        ("p4", DENSE),
    ],
)
def test_what_fits_is_accepted(layout: str, sizes: ModelSizes) -> None:
    assert resolve_layout(config(layout), sizes).layout == parse_layout(layout)


def test_what_is_decided_with_the_layout() -> None:
    found = resolve_layout(config("c4"), DENSE)
    assert (found.context_parallel, found.stages, found.dims.cp, found.compiled) == ("ulysses", None, 4, False)
    assert resolve_layout(config("c3"), DENSE).context_parallel == "allgather"  # 3 does not divide the 8 heads
    assert resolve_layout(config("c4", context_parallel="allgather"), DENSE).context_parallel == "allgather"
    staged = resolve_layout(config("p2"), DENSE, "cuda")
    assert staged.stages == plan_stages(PipelineConfig(), 2, 4)
    assert staged.compiled and staged.dims.device_type == "cuda"


def test_layers_that_a_tower_gives_features_are_on_the_first_stage() -> None:
    sizes = get_model_spec("qwen3_vl").model_args_class.from_hf_config(MODELS["deepstack"]).sizes
    assert (sizes.layers, sizes.deepstack_layers) == (5, 2)
    staged = resolve_layout(config("p4"), sizes).stages
    assert staged is not None and staged.layers == ((0, 2), (2, 3), (3, 4), (4, 5))
    too_many = r"has 5 stages, and the model 5 layers, the first 2 with the vision encoder; use a smaller p"
    with pytest.raises(LayoutError, match=too_many):
        resolve_layout(config("p5"), sizes)
    pipeline = {"layers_per_stage": [1, 4]}
    with pytest.raises(LayoutError, match=r"is \[1, 4\]; expected at least 2 layers on the first stage"):
        resolve_layout(config("p2", pipeline=pipeline), sizes)
    with pytest.raises(LayoutError, match="has 5 stages, and the model 4 layers; use"):
        resolve_layout(config("p5"), DENSE)
