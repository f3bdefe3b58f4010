"""What a pipeline does besides gradients: evaluation of unequal shares, its state, its schedules, failed steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.state_tree import Shard
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.memory.memory_model import in_flight
from archon.engine.micro_batch import micro_batches
from archon.engine.pipeline_step import PipelineRunner
from archon.models import get_model_spec
from archon.models.layers.moe import expert_biases
from archon.parallel.comm import Group
from archon.parallel.layout import parse_layout
from archon.parallel.mesh import default_group
from archon.parallel.pipeline import StagedModel, StagePlan, plan_stages, prune
from archon.parallel.pipeline_schedule import Pipeline, _Stage
from archon.schema.config import PipelineConfig
from archon.tools.check import layouts
from archon.tools.check.layouts import LENGTHS, VOCAB
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case, batch, engine_config, loss_of
from tests.distributed.checkpoints import whole_state

pytestmark = pytest.mark.xdist_group("ranks")

# Groups that span the data-parallel ranks within a stage: experts, and weights gathered again for each micro-batch.
UNEVEN = [Case("d2p2e2", "moe"), Case("d2p2", "tied", config={"reshard_after_forward": "always"}), Case("d2p2", "moe")]


def engine_of(case: Case, folder: str) -> ArchonEngine:
    engine = ArchonEngine(engine_config(case, f"{folder}/checkpoint", case.layout))
    engine.initialize(total_steps=10)
    return engine


def rank_rows(engine: ArchonEngine) -> dict[str, Tensor]:
    return layouts.rank_rows(batch(LENGTHS, seed=3), engine.ranks.dp.rank, engine.ranks.dp.size)


def plain_logprobs(path: str, rows: dict[str, Tensor]) -> Tensor:
    """[B, S], one document at a time through the plain model; 0 at first tokens and padding."""
    model = load_model(path, dtype=torch.float64)
    found = torch.zeros(rows["input_ids"].shape, dtype=torch.float64)
    for row, tokens in enumerate(rows["input_ids"]):
        n = int(rows["attention_mask"][row].sum())
        logits = model(tokens[:n], torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
        scores = logits[:-1].log_softmax(-1).gather(1, tokens[1:n].unsqueeze(1))
        found[row, 1:n] = scores.squeeze(1)
    return found


@torch.no_grad()
def evaluate_uneven(folder: str, case: Case) -> tuple[float, float, int]:
    """Largest error of the logprobs, the loss's error, and this rank's micro-batches."""
    engine = engine_of(case, folder)
    rows = rank_rows(engine)
    scores = engine.forward_batch(rows)
    expected = plain_logprobs(f"{folder}/checkpoint", rows)
    everything = batch(LENGTHS, seed=3)
    of_all = plain_logprobs(f"{folder}/checkpoint", everything)
    loss = -(of_all * everything["loss_mask"]).sum() / everything["loss_mask"].sum()
    found = engine.eval_batch(rows, CrossEntropyLoss(), loss_token_count)["loss"]
    own = len(micro_batches(rows, engine.config.max_tokens_per_mb, VOCAB)[1])
    return float((scores - expected).abs().max()), abs(found - float(loss)), own


@pytest.mark.parametrize("case", UNEVEN, ids=[case.name for case in UNEVEN])
def test_ranks_with_unequal_micro_batches_evaluate_together(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path], case: Case
) -> None:
    found = ranks(parse_layout(case.layout).world_size).run(evaluate_uneven, str(reference(case)), case)
    assert len({count for _, _, count in found}) > 1
    for scores, loss, _ in found:
        assert scores < 1e-12
        assert loss < 1e-12


def undo(folder: str, case: Case) -> list[str]:
    """Name that differ after train, remember, train, and back."""
    engine = engine_of(case, folder)
    rows = rank_rows(engine)
    engine.train_batch(rows, loss_of(case), loss_token_count)
    state = copied(engine.state_dict())
    before = whole_state(engine)
    engine.train_batch(rows, loss_of(case), loss_token_count)
    engine.load_state_dict(state)
    after = whole_state(engine)
    return [name for name in before if not torch.equal(before[name], after[name])]


def copied(value: Any) -> Any:
    """A state with copies of its live tensors."""
    if isinstance(value, Shard):
        return Shard(value.data.clone(), value.shape, value.region)
    if isinstance(value, dict):
        return {key: copied(x) for key, x in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("layout", ["p2", "p4"])
def test_a_tied_pipeline_takes_back_its_own_state(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path], layout: str
) -> None:
    case = Case(layout, "tied")
    assert ranks(parse_layout(layout).world_size).run(undo, str(reference(case)), case) == [[]] * int(layout[1:])


def train_on_many_shapes(folder: str, case: Case) -> tuple[int, bool]:
    """Schedule alive after batches of several lengths, and whether one still holds a batch."""
    engine = engine_of(case, folder)
    for seed in range(4):
        lengths = tuple(length + seed for length in LENGTHS)
        engine.train_batch(batch(lengths, seed=seed), loss_of(case), loss_token_count)
    gc.collect()
    stages = [x for x in gc.get_objects() if isinstance(x, _Stage) and x.submod in engine.model.modules()]
    return len(stages), any(hasattr(stage, "run") for stage in stages)


def test_a_pipeline_keeps_no_schedule_of_an_earlier_shape(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    """Each holds receive buffers for all its micro-batches, and packed batches have ever new shapes."""
    case = Case("p2")
    assert ranks(2).run(train_on_many_shapes, str(reference(case)), case) == [(1, False)] * 2


def train_after_an_error(folder: str, case: Case) -> str:
    engine = engine_of(case, folder)
    if engine.ranks.pp.rank == 1:  # the other would wait for it
        fails = mock.patch.object(PipelineRunner, "accumulate", side_effect=ZeroDivisionError)
        with fails, suppress(ZeroDivisionError):
            engine.train_batch(rank_rows(engine), loss_of(case), loss_token_count)
        try:
            engine.forward_batch(rank_rows(engine))
        except Exception as error:  # noqa: BLE001
            return str(error)
    return ""


def test_an_error_inside_a_step_ends_a_pipelines_engine(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    case = Case("p2")
    found = ranks(2).run(train_after_an_error, str(reference(case)), case)
    assert "an error interrupted an earlier train_batch" in found[1]


def stages_cut_by_the_family(folder: str, case: Case) -> tuple[list[int], list[str]]:
    """Stages that the family's own function was asked for on this rank, and the layers that the rank holds."""
    asked = []

    def cut(model: Any, plan: StagePlan, stage: int) -> None:
        asked.append(stage)
        prune(model, plan, stage)

    spec = replace(get_model_spec("qwen3"), pipelining_fn=cut)
    with mock.patch("archon.checkpoint.hf_io.get_model_spec", return_value=spec):
        engine = engine_of(case, folder)
    return asked, sorted({name.split(".")[1] for name, _ in engine.model.named_parameters() if "layers." in name})


def test_pipelining_fn_of_a_family_cuts_its_stages(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    case = Case("p2", config={"pipeline": {"schedule": "zbv"}})
    found = ranks(2).run(stages_cut_by_the_family, str(reference(case)), case)
    assert found == [([0, 3], ["0", "3"]), ([1, 2], ["1", "2"])]


# Of two micro-batches the second is short and long documents in turn, which are computed in the order of their
# lengths; it is filled up by two tokens, fewer than any document has.
MIXED, MIXED_TOKENS = (50, 3, 9, 3, 9, 3, 9, 3, 9), 50


def router_counts(folder: str, case: Case) -> tuple[dict[str, list[float]], dict[str, Tensor], bool]:
    """Return how often each expert was chosen in a step, by layer; the biases after it; whether documents of a
    micro-batch that is padded were reordered."""
    engine = engine_of(case, folder)
    rows = batch(MIXED, seed=3)
    parts = engine._split(rows)[1]
    planner = engine.built.runner.planner
    most = max(planner.rows(mb) for mb in parts)
    reordered = any(mb.order.rows is not None and planner.rows(mb) < most for mb in parts)
    engine.train_batch(rows, loss_of(case), loss_token_count)
    counts = {}
    for load in engine.built.runner.loads:
        assert load._counts is not None
        counts.update(zip(expert_biases(load.model), load._counts.tolist(), strict=True))
    return counts, {name: x for name, x in engine.weights() if name.endswith("expert_bias")}, reordered


def test_padding_of_a_pipelines_micro_batches_is_counted_by_no_router(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    balanced = {"router_bias_update_rate": 0.01, "max_tokens_per_mb": MIXED_TOKENS}
    case = Case("p2", "moe", config={"pipeline": {"schedule": "1f1b"}} | balanced)
    folder = str(reference(case))
    expected, biases, _ = router_counts(folder, Case("d1", "moe", config=balanced))
    found = ranks(2).run(router_counts, folder, case)
    assert all(reordered for *_, reordered in found), "these documents are meant to be sorted around their padding"
    assert found[0][0] | found[1][0] == expected
    for _, of_rank, _ in found:
        assert all(torch.equal(of_rank[name], bias) for name, bias in biases.items())


class _UnderWay(torch.autograd.Function):
    """Counts the forward passes that no backward pass has come back from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: list[int]) -> Tensor:
        ctx.numbers = numbers
        numbers.append(numbers[-1] + 1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.numbers.append(ctx.numbers[-1] - 1)
        return grad.clone(), None


def most_under_way(schedule: Any, stages_per_rank: int, wanted: int) -> tuple[int, int]:
    """Of this rank in a step of the real schedule, stages being one small matrix each, and as the planner has it."""
    world = default_group()
    group = Group(world.group_name, world.size(), world.rank())
    config = PipelineConfig(schedule=schedule, stages_per_rank=stages_per_rank, head_weight=0.0)
    plan = plan_stages(config, group.size, 12)
    model = StagedModel(plan, {stage: nn.Linear(4, 4) for stage in plan.rank_stages(group.rank)})
    layers, numbers = dict(zip(model.numbers, model.stages, strict=True)), [0]

    def run(stage: int, index: int, hidden: Tensor | None) -> Tensor:
        out = _UnderWay.apply(layers[stage](torch.ones(2, 4) if hidden is None else hidden), numbers)
        return out.sum() if stage == plan.n_stages - 1 else out

    count = plan.micro_batches(wanted)
    Pipeline(model, group, torch.device("cpu"), torch.float32, 4).backward(run, count, 2)
    assert numbers[-1] == 0
    return max(numbers), in_flight(plan, group.rank, count)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("interleaved_zero_bubble", 2),
        ("interleaved_zero_bubble", 3),
        ("zbv", 2),
    ],
)
def test_as_many_passes_are_under_way_as_the_planner_counts(
    ranks: Callable[[int], Pool], pp: int, schedule: str, stages_per_rank: int
) -> None:
    for wanted in (pp, 2 * pp, 4 * pp):
        for real, planned in ranks(pp).run(most_under_way, schedule, stages_per_rank, wanted):
            assert real == planned, wanted
