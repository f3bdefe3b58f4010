"""What is proposed fits, is legal, and is the fastest that is."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from archon.checkpoint.hf_reader import read_hf_config
from archon.models import get_model_spec, get_supported_model_types
from archon.parallel.layout import parse_layout
from archon.parallel.resolve import resolve_layout
from archon.schema.errors import UserError
from archon.tools.planner.describe import as_json, describe, explain_no_plan, speed
from archon.tools.planner.hardware import read_hardware
from archon.tools.planner.search import UNSEARCHED_NOTE, Plan, Planner, PlanRequest, Rejections, layouts, micro_batches

CONFIGS = Path(__file__).parents[2] / "data" / "hf_configs"
SUPPORTED = sorted(
    path.parent.name
    for path in CONFIGS.glob("*/config.json")
    if json.loads(path.read_text())["model_type"] in get_supported_model_types()
)
# Masters, gradients and moments of 235 billion parameters are 3.8 TB, and eight GPUs have 0.68.
TOO_LARGE = {"Qwen3-235B-A22B"}


@cache
def planner(model: str, gpu: str = "h100-80gb") -> Planner:
    hf_config = read_hf_config(CONFIGS / model)
    spec = get_model_spec(hf_config["model_type"])
    return Planner(spec, spec.model_args_class.from_hf_config(hf_config), read_hardware(gpu))


def plan(model: str, gpus: int, tokens: int = 2**17, seq: int = 4096) -> Plan:
    return planner(model).plan(PlanRequest(str(CONFIGS / model), gpus, tokens, seq))


@pytest.mark.parametrize(
    "model", [m if m == "Qwen3-0.6B" else pytest.param(m, marks=pytest.mark.slow) for m in SUPPORTED]
)
def test_every_supported_model_gets_a_layout_of_eight_gpus_or_a_reason(model: str) -> None:
    found = plan(model, 8)
    if model in TOO_LARGE:
        assert not found.best and found.rejections.exceeds_memory and not found.rejections.idle
        assert ": masters, gradients and moments exceed the memory of 8 GPUs" in explain_no_plan(found)
        return
    seconds = [placed.candidate.seconds.total for placed in found.best]
    assert seconds == sorted(seconds)
    for placed in found.best:
        config = planner(model).config(found.request, placed.candidate)
        assert resolve_layout(config, planner(model).args.sizes, "cuda").layout.world_size == 8
        taken = placed.memory.total + found.hardware.reserve_bytes + placed.headroom
        assert taken <= found.hardware.memory_bytes
        assert 0 < speed(found, placed.candidate)[1] < 1


def test_what_lost_says_why() -> None:
    found = plan("Qwen3-0.6B", 8)
    text = "\n".join(describe(found))
    assert "attention is timed for fa4" in text
    assert all(f"\n{placed.candidate.layout} " in text for placed in found.best)
    assert text.count(" %: ") == len(found.best) - 1, "each but the first is slower by so much, in some part"
    assert all(placed.headroom < 0 for placed in found.too_large)


def test_what_is_left_out_is_told() -> None:
    found = plan("Qwen3-0.6B", 8)
    assert describe(found)[-1] == f"not tried: {UNSEARCHED_NOTE}"
    refused = Counter({"t = 3 divides no head": 2})
    told = describe(replace(found, rejections=Rejections(exceeds_memory=5, idle=7, refused=refused)))
    assert told[-4:-1] == [
        "rejected by the engine, 2 candidates: t = 3 divides no head",
        "too large, 5 layouts and schedules: masters, gradients and moments exceed the memory",
        "idle ranks, 7 layouts and schedules: 131,072 tokens are too few documents of 4,096",
    ]


def test_documents_that_the_ranks_cannot_share_evenly_are_those_of_the_fullest() -> None:
    """Twelve documents on eight ranks: four ranks have two, in micro-batches of one or of two."""
    request = PlanRequest("model", 8, 12 * 4096, 4096)
    assert list(micro_batches(request, parse_layout("d8"))) == [(4096, 2), (8192, 1)]
    assert list(micro_batches(request, parse_layout("d2t4"))) == [(4096, 6), (8192, 3), (16384, 2)]
    assert not list(micro_batches(request._replace(tokens=7 * 4096), parse_layout("d8"))), "a rank would be idle"
    found = planner("Qwen3-0.6B").plan(request)
    for placed in found.best:
        c = placed.candidate
        assert c.micro_batches * (c.tokens // 4096) * c.layout.dp >= 12, c.layout


MEMORY = "masters, gradients and moments exceed the memory of 17 GPUs"
TOKENS = "4,096 tokens a step are too few documents of 4,096 for every rank"


def test_without_a_layout_the_reason_is_the_one_that_holds() -> None:
    """One document for 17 GPUs, whose number no other divides."""
    idle, exceeds_memory = (plan(model, 17, tokens=4096) for model in ("Qwen3-0.6B", "Qwen3-235B-A22B"))
    assert explain_no_plan(idle) == f"No layout fits: {TOKENS}."
    assert explain_no_plan(exceeds_memory) == f"No layout fits: {MEMORY}."
    both = replace(idle, rejections=Rejections(exceeds_memory=1, idle=1))
    assert explain_no_plan(both) == f"No layout fits: {MEMORY}; in the other layouts, {TOKENS}."
    refused = replace(idle, considered=3, rejections=Rejections(refused=Counter({"no": 2, "never": 1})))
    assert explain_no_plan(refused) == "The engine rejects every layout that fits; 2 of them with: no"


def test_the_json_has_the_same_layouts() -> None:
    found = plan("Qwen3-0.6B", 8)
    refused = replace(found, rejections=Rejections(refused=Counter({"t = 3 divides no head": 2})))
    assert json.loads(json.dumps(as_json(refused)))["left_out"]["refused"] == {"t = 3 divides no head": 2}
    data = json.loads(json.dumps(as_json(found)))
    assert [way["layout"] for way in data["best"]] == [str(placed.candidate.layout) for placed in found.best]
    for way in data["best"]:
        kinds = {name: size for name, size in way["memory"].items() if name not in ("total", "headroom")}
        assert sum(kinds.values()) == way["memory"]["total"]


def test_layouts_are_those_the_rules_allow() -> None:
    args = planner("Qwen3-30B-A3B").args
    found = list(layouts(args, 16, 8))
    assert len(set(found)) == len(found) and {layout.world_size for layout in found} == {16}
    for layout in found:
        assert parse_layout(str(layout), 16) == layout
    assert all(layout.tp <= 8 and args.n_heads % layout.tp == 0 for layout in found)


def test_fewer_tokens_than_a_document_are_refused() -> None:
    with pytest.raises(UserError, match="expected at least seq, the 4096 tokens of a document"):
        plan("Qwen3-0.6B", 8, tokens=100)


@pytest.mark.slow
def test_a_thousand_gpus() -> None:
    found = plan("Qwen3-235B-A22B", 1024, tokens=2**24)
    assert len(found.best) == 10
    assert all(placed.candidate.layout.world_size == 1024 for placed in found.best)
