"""What a case of the gradient matrix exercises, so that every pair of features is met once or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, get_args

from archon.parallel.dims import ArchonParallelDims
from archon.parallel.layout import parse_layout
from archon.parallel.pipeline import SPLIT_BACKWARD
from archon.parallel.resolve import context_parallel_kind
from archon.schema.config import PipelineConfig
from tests.distributed.cases import MODELS, Case

SCHEDULES: tuple[str, ...] = get_args(PipelineConfig.model_fields["schedule"].annotation)
FULL: dict[str, Any] = {"mode": "full"}
BY_OP: dict[str, Any] = {"mode": "selective", "selective": "op"}
EVERY_SECOND: dict[str, Any] = {"mode": "selective", "selective": 2}
BUDGET: dict[str, Any] = {"mode": "memory_budget"}


def _degree(name: str) -> Callable[[Case], bool]:
    return lambda case: getattr(_dims(case), name) > 1


# Options of the engine that are features, as a case gives them.
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute full": {"activation_checkpoint": FULL},
    "recompute by operator": {"activation_checkpoint": BY_OP},
    "recompute every n-th": {"activation_checkpoint": EVERY_SECOND},
    "memory budget": {"activation_checkpoint": BUDGET, "compile": True},
    "compile": {"compile": True},
    "cpu_offload": {"cpu_offload": True},
    "per_microbatch": {"gradient_reduction": "per_microbatch"},
    "reshard always": {"reshard_after_forward": "always"},
    "reshard never": {"reshard_after_forward": "never"},
    "fused loss": {"loss": "fused"},
    "aux loss": {"router_aux_loss_coef": 0.1},
    "fp8 tensorwise": {"fp8": "tensorwise"},
    "fp8 rowwise": {"fp8": "rowwise"},
}


def _options(*names: str) -> dict[str, Callable[[Case], bool]]:
    return {name: lambda case, wanted=OPTIONS[name]: case.config.items() >= wanted.items() for name in names}


def _dims(case: Case) -> ArchonParallelDims:
    return parse_layout(case.layout).dims()


def _attention_over_ranks(kind: str) -> Callable[[Case], bool]:
    def holds(case: Case) -> bool:
        dims, model = _dims(case), MODELS[case.model]
        model = model.get("text_config", model)
        heads = model["num_attention_heads"], model["num_key_value_heads"]
        wanted = case.config.get("context_parallel", "auto")
        return dims.cp > 1 and context_parallel_kind(wanted, dims.cp, dims.tp, *heads) == kind

    return holds


def _schedule(name: str) -> Callable[[Case], bool]:
    return lambda case: _dims(case).pp > 1 and case.config.get("pipeline", {}).get("schedule", "1f1b") == name


# Of each group a case has one at most.
AXES: dict[str, dict[str, Callable[[Case], bool]]] = {
    "shards": {"dp_shard": _degree("dp_shard")},
    "replicas": {"dp_replicate": _degree("dp_replicate")},
    "tensor": {"tp": _degree("tp")},
    "context": {"cp ulysses": _attention_over_ranks("ulysses"), "cp allgather": _attention_over_ranks("allgather")},
    "pipeline": {name: _schedule(name) for name in SCHEDULES},
    "experts": {"ep": _degree("ep")},
    "expert features": {"etp": _degree("etp")},
    "model": {"moe": lambda case: "num_experts" in MODELS[case.model]},
    "tying": {"tied": lambda case: MODELS[case.model]["tie_word_embeddings"]},
    "head": {"critic": lambda case: case.critic},
    "recompute": _options("recompute full", "recompute by operator", "recompute every n-th", "memory budget"),
    "compiler": _options("compile"),
    "offload": _options("cpu_offload"),
    "reduction": _options("per_microbatch"),
    "resharding": _options("reshard always", "reshard never"),
    "loss": _options("fused loss"),
    "balance": _options("aux loss"),
    "8 bits": _options("fp8 tensorwise", "fp8 rowwise"),
}
FEATURES = {name: holds for axis in AXES.values() for name, holds in axis.items()}
PAIRS = [(first, second) for one, other in combinations(AXES, 2) for first in AXES[one] for second in AXES[other]]


def features(case: Case) -> frozenset[str]:
    return frozenset(name for name, holds in FEATURES.items() if holds(case))


def pairs(case: Case) -> set[tuple[str, str]]:
    found = features(case)
    return {pair for pair in PAIRS if found >= set(pair)}


def _refused() -> dict[tuple[str, str], str]:
    found = {("critic", "fused loss"): "a critic predicts values"}
    for schedule in SCHEDULES:
        found[schedule, "per_microbatch"] = "a pipeline reduces gradients once a step"
        found[schedule, "aux loss"] = "a pipeline has them on different ranks"
        if schedule in SPLIT_BACKWARD:
            found |= {(schedule, name): "splits the backward pass" for name in (*AXES["recompute"], "compile")}
            found[schedule, "reshard always"] = "weights freed in between get none"
    return found


REFUSED = _refused()
"""Pairs that no layout runs, and what the engine says of them."""


def refused_case(pair: tuple[str, str]) -> Case:
    """The least that has both."""
    first, second = pair
    if first == "critic":
        return Case("d1", critic=True, config=OPTIONS[second])
    model = "moe" if second == "aux loss" else "dense"
    return Case("p2", model, config={"pipeline": {"schedule": first}} | OPTIONS[second])
