"""8-bit products in layouts: what is refused, and padding that has the values of a token of the pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.engine.batch import pack
from archon.engine.build import check_fp8
from archon.engine.dry_run import dry_run
from archon.engine.micro_batch import MicroBatch, TokenOrder
from archon.engine.plan import ForwardPlanner
from archon.models import get_model_spec
from archon.parallel.comm import Group
from archon.parallel.context import ContextPlan, SequenceShard, contiguous_plan, zigzag_plan
from archon.parallel.layout import parse_layout
from archon.parallel.ranks import SOLO, Ranks
from archon.parallel.resolve import resolve_layout
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, LayoutError
from tests.distributed.cases import MODELS, write_config
from tests.engine.tiny import sft_batch


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        (
            "t4",
            "fp8",
            "layers.0.attention.wk: the local shard is 8 x 64, and fp8 needs multiples of 16; use a smaller t",
        ),
        ("t8", "fp8_few_features", "layers.0.attention.wk: several ranks share a key head"),
        ("(attn:t4|ffn:t4)", "fp8_few_features", r"layers.0.moe.experts: the local shard is 8 x 64"),
    ],
)
def test_shares_that_the_kernels_do_not_take_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str, model: str, message: str
) -> None:
    """A layer is converted in every layout or in none, else one layout would compute something else."""
    wide = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
    monkeypatch.setitem(MODELS, "fp8_few_features", MODELS["fp8_moe"] | wide)
    path = write_config(tmp_path, model)
    config = EngineConfig(path=path, layout=layout, device="cpu", init_from_scratch=True, fp8="rowwise")
    with pytest.raises(LayoutError, match=message):
        dry_run(config, rank=0, tokens=64)


def test_a_gpu_has_kernels_for_bfloat16_alone() -> None:
    sizes = get_model_spec("qwen3").model_args_class.from_hf_config(MODELS["fp8"]).sizes
    for dtype in ("float32", "float64"):
        with pytest.raises(
            ConfigError, match=f"fp8 = rowwise has kernels for dtype = bfloat16 alone, and it is {dtype}"
        ):
            resolve_layout(EngineConfig(path="model", dtype=dtype, fp8="rowwise"), sizes, "cuda")
    resolve_layout(EngineConfig(path="model", dtype="bfloat16", fp8="rowwise"), sizes, "cuda")


@pytest.mark.parametrize(("layout", "fp8"), [("t2", "rowwise"), ("d2", "tensorwise"), ("r2d2", "tensorwise")])
def test_a_model_that_sees_may_have_one_scale_where_nothing_is_padded(layout: str, fp8: str) -> None:
    check_fp8(_engine_config(layout, fp8), _vision_language_args(), torch.device("cpu"))


@pytest.mark.parametrize("layout", ["t2", "c2", "p2"])
def test_padding_of_a_model_that_sees_could_be_an_image(layout: str) -> None:
    with pytest.raises(ConfigError, match=f"pads documents of layout {layout} .* set fp8 = rowwise, vision = off"):
        check_fp8(_engine_config(layout, "tensorwise"), _vision_language_args(), torch.device("cpu"))


def _engine_config(layout: str, fp8: str) -> EngineConfig:
    return EngineConfig.parse({"path": "model", "layout": layout, "fp8": fp8}, source="model")


def _vision_language_args() -> Any:
    return get_model_spec("qwen3_5").model_args_class.from_hf_config(MODELS["seeing"])


@pytest.mark.parametrize("plan", [contiguous_plan, zigzag_plan])
@pytest.mark.parametrize(("lengths", "ranks", "least"), [((7, 3, 12), 2, 0), ((5,), 4, 0), ((9, 2), 2, 31)])
def test_padding_repeats_the_first_token(
    plan: Callable[..., ContextPlan], lengths: tuple[int, ...], ranks: int, least: int
) -> None:
    """Each token of the padding is a document of its own, at position 0; what is no padding is where it was."""
    usual = plan(lengths, ranks, 2, least)
    repeated = usual.repeating_first()
    assert usual.padding and repeated.lengths == lengths + (1,) * usual.padding
    tokens = torch.arange(100, 100 + sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    for rank in range(ranks):
        before, share = (
            SequenceShard(each, Group("", ranks, rank), SOLO, torch.device("cpu")) for each in (usual, repeated)
        )
        assert share.index.equal(before.index)
        padded = share.index >= sum(lengths)
        own = share.take_inputs(tokens)
        assert own[~padded].equal(before.take(tokens)[~padded]) and bool((own[padded] == 100).all())
        assert bool((share.positions(positions)[padded] == 0).all())
        assert sum(stop - start for _, start, stop in repeated.chunks[rank]) == len(own)


@pytest.mark.parametrize("repeats", [False, True])
def test_micro_batches_are_padded_with_their_first_token_where_they_have_one_scale(repeats: bool) -> None:
    mb = pack(sft_batch())
    assert mb.tokens[0] != 0
    planner = ForwardPlanner(Ranks(), torch.device("cpu"), "allgather", "sdpa", repeats_first=repeats)
    plan = planner.plan(MicroBatch(mb, TokenOrder.of_pack(mb)), "trained", min_tokens=len(mb.tokens) + 5)
    padding = plan.model_inputs().tokens[len(mb.tokens) :]
    assert padding.tolist() == 5 * [int(mb.tokens[0]) if repeats else 0]


def test_a_layout_without_padding_is_as_it_was() -> None:
    plan = contiguous_plan((8, 8), 2, 2)
    assert plan.repeating_first() is plan
    assert parse_layout("r2d2").world_size == parse_layout("r2d2").dp
