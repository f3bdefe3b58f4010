"""What is predicted of a rank that does not exist is what a real rank of the same layout holds and sends."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from archon.checkpoint.hf_reader import read_hf_config
from archon.engine.dry_run import RankReport, documents, dry_run, rank_report
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models import get_model_spec
from archon.parallel.collectives import CollectiveRecorder, CollectiveStats, group_names
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.layout import parse_layout
from archon.parallel.pipeline import plan_stages
from archon.schema.config import EngineConfig, PipelineConfig
from archon.schema.errors import LayoutError
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import write_config

pytestmark = pytest.mark.xdist_group("ranks")

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
TOKENS = 192
# layout, model, engine options, micro-batches
CASES = [
    pytest.param("d2t2", "dense", {}, 2),
    pytest.param("d2c2", "tied", {"context_parallel": "allgather"}, 1, marks=pytest.mark.slow),
    pytest.param("d2t2e4", "moe", {}, 1, marks=pytest.mark.slow),
    pytest.param("p2t2", "tied_moe", {}, 2, marks=pytest.mark.slow),
]


def config(path: str, layout: str, options: dict[str, Any]) -> EngineConfig:
    base = {"path": path, "layout": layout, "device": "cpu", "init_from_scratch": True, "max_tokens_per_mb": TOKENS}
    return EngineConfig.model_validate(base | options)


def real(path: str, layout: str, options: dict[str, Any], micro_batches: int) -> RankReport:
    """On every rank: a step that is really taken."""
    engine = ArchonEngine(config(path, layout, options))
    engine.initialize()
    with CollectiveRecorder(group_names(engine.parallel_dims)) as recorder:
        batch = documents(engine.args.vocab_size, TOKENS * micro_batches)
        engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    return rank_report(engine, dist.get_rank(), recorder.sums)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model", "options", "micro_batches"), CASES, ids=lambda x: str(x))
def test_the_predicted_rank_is_the_real_one(
    layout: str,
    model: str,
    options: dict[str, Any],
    micro_batches: int,
    tmp_path: Path,
) -> None:
    path = write_config(tmp_path, model)
    # Processes of its own: in those that have seen other layouts, one group may bear the name of another's.
    with Pool(parse_layout(layout).world_size) as pool:
        found = pool.run(real, path, layout, options, micro_batches)
    for rank in (0, len(found) - 1):
        predicted = dry_run(config(path, layout, options), rank, TOKENS, micro_batches)
        assert comparable(predicted) == comparable(found[rank])


def comparable(of: RankReport) -> RankReport:
    """Without what depends on values: bytes of tokens sent to experts, and of the metrics told through a pipeline."""
    step = {
        traffic: CollectiveStats(total.count) if traffic.kind in ("all_to_all", "broadcast") else total
        for traffic, total in of.step.items()
    }
    return replace(of, step=step)


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="ranks 0 to 3, got rank 4"):
        dry_run(config(write_config(tmp_path, "dense"), "d2t2", {}), 4, TOKENS)


def test_a_run_that_watches_for_stalls_is_predicted(tmp_path: Path) -> None:
    path = write_config(tmp_path, "dense")
    watched, plain = (dry_run(config(path, "d2", options), 0, TOKENS) for options in ({"stall_s": 60.0}, {}))
    assert watched == plain


def published(model: str) -> int:
    rows = (line.split("\t") for line in (CONFIGS / "PARAMETERS.tsv").read_text().splitlines()[1:])
    return next(int(count) for name, _, count in rows if name == model)


def share(name: str, shape: tuple[int, ...], dims: ArchonParallelDims, kv_heads: int) -> tuple[int, int, int, int]:
    """Rows and elements a row left to FSDP after tensor and expert parallelism, ranks that FSDP cuts them over, and
    ranks that hold the same."""
    rows, row = shape[0], prod(shape[1:])
    if ".experts." in name:
        own, ways = rows // dims.ep, dims.expert_shard
        if own < ways and shape[1] % ways == 0:  # too few experts to deal out, so each one's rows are
            return shape[1], own * shape[2], ways, 1
        return own, row, ways, 1
    ways = dims.dp_shard * dims.cp
    whole = len(shape) == 1 or "router" in name or (("wk." in name or "wv." in name) and kv_heads < dims.tp)
    if whole:
        return rows, row, ways, dims.tp
    if "wo." in name or ".w2." in name:
        return rows, row // dims.tp, ways, 1
    return rows // dims.tp, row, ways, 1


def cut(rows: int, ways: int, index: int) -> int:
    """Rows of part `index` where `rows` are cut as torch.chunk cuts them."""
    step = -(-rows // ways)
    return max(0, min(step, rows - index * step))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the two steps take a minute of one core, and the machine may be shared
@pytest.mark.parametrize(
    ("model", "layout", "rank"), [("Qwen3-32B", "d512t8", 17), ("Qwen3-235B-A22B", "d64t8p8e64", 4095)]
)
def test_real_models_on_4096_ranks(model: str, layout: str, rank: int) -> None:
    path = str(CONFIGS / model)
    dims = parse_layout(layout).dims()
    assert dims.world_size == 4096
    found = dry_run(config(path, layout, {"dtype": "bfloat16"}), rank, 1024)

    hf_config = json.loads((CONFIGS / model / "config.json").read_text())
    shapes = get_model_spec(hf_config["model_type"]).state_dict_adapter_class(read_hf_config(path)).native_shapes
    plan = plan_stages(PipelineConfig(), dims.pp, hf_config["num_hidden_layers"])
    stage = rank // (4096 // dims.pp)
    own = total = 0
    for name, shape in shapes.items():
        rows, row, ways, copies = share(name, shape, dims, hf_config["num_key_value_heads"])
        parts = [cut(rows, ways, index) for index in range(ways)]
        total += sum(parts) * row * (4096 // dims.pp // ways) // copies
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        first, end = plan.layers[stage]
        mine = first <= layer < end if layer >= 0 else stage == (0 if "embed" in name else dims.pp - 1)
        sparse = rank % (4096 // dims.pp) // dims.ep
        own += mine * parts[sparse if ".experts." in name else rank // dims.tp % ways] * row
    assert total == published(model), "all ranks together hold the model"
    assert found.parameters == own
    assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == (4 * own, 4 * own, 8 * own)
    assert found.stages == (plan.layers[stage],)
    kinds = {traffic.kind for traffic in found.step}
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= kinds
    assert ("all_to_all" in kinds) == dims.ep_enabled and ("recv" in kinds) == dims.pp_enabled
