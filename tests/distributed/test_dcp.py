"""What several ranks save by torch.distributed.checkpoint, each its own shards, is read whole and bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from archon.checkpoint.convert import convert
from archon.checkpoint.formats.dcp.metadata import read_metadata
from archon.parallel.layout import parse_layout
from archon.tools.check.rank_pool import Pool
from tests.checkpoint.tiny_checkpoints import assert_bitwise, random_weights, write_checkpoint
from tests.distributed.cases import MODELS, Case
from tests.distributed.checkpoints import engine_of

pytestmark = pytest.mark.xdist_group("ranks")
ODD = MODELS["tied"] | {"vocab_size": 101, "hidden_size": 50, "num_hidden_layers": 2}
CASES = [
    Case("d2", "tied"),
    *(
        pytest.param(Case(layout, model), marks=pytest.mark.slow)
        for layout, model in (("t2", "tied"), ("d2e2", "moe"), ("d2t2", "dense"), ("r2d2", "tied"), ("d2t2e4", "moe"))
    ),
]


def save(case: Case, model: str, folder: str) -> None:
    engine = engine_of(case, model)
    state = {"model": engine.model.state_dict(), "optim": {"step": 3}}
    dcp.save(state, checkpoint_id=folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.model}")
def test_shards_of_ranks_are_read(tmp_path: Path, ranks: Callable[[int], Pool], case: Case) -> None:
    config = ODD if case.layout == "d2" else MODELS[case.model]
    weights = random_weights(config, torch.float64)
    folder = write_checkpoint(tmp_path / "hf", config, weights)

    ranks(parse_layout(case.layout).world_size).run(save, case, str(folder), str(tmp_path / "dcp"))
    stored = read_metadata(tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "out", "hf", like=folder)

    assert max(len(tensor.chunks) for tensor in stored.values()) > 1
    assert_bitwise(load_file(tmp_path / "out" / "model.safetensors"), weights)
