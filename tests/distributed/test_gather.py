"""The whole weights on every rank, from the shards of any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from archon.checkpoint.hf_io import load_model
from archon.engine.engine import ArchonEngine
from archon.parallel import gather
from archon.parallel.layout import parse_layout
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case, engine_config

pytestmark = pytest.mark.xdist_group("ranks")

# Sizes that the ranks do not divide, copies over HSDP, two cuts of one axis, experts of a mesh of their own, stages.
CASES = [
    Case("d4"),
    Case("d2t2", "tied"),
    Case("d2t2", "bias"),
    Case("r2d2"),
    Case("d2c2"),
    Case("d2e2", "moe"),
    Case("t2p2", "tied"),
    Case("d2p2", "moe"),
]


def differences(folder: str, case: Case, bucket_bytes: int) -> tuple[list[str], int]:
    """Name of weights that are not those of the checkpoint, and how many collectives it took to gather them all."""
    path = f"{folder}/checkpoint"
    engine = ArchonEngine(engine_config(case, path, case.layout))
    engine.initialize()
    with mock.patch.object(gather, "all_gather", side_effect=gather.all_gather) as collective:
        found = dict(engine.weights(bucket_bytes))
    expected = dict(load_model(path, dtype=torch.float64).named_parameters())
    wrong = [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]
    return wrong + sorted(found.keys() - expected.keys()), collective.call_count


@pytest.mark.parametrize("bucket_bytes", [0, 100_000, 2**24], ids=["one", "some", "all"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_gathered_weights_are_the_checkpoints(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path], case: Case, bucket_bytes: int
) -> None:
    size = parse_layout(case.layout).world_size
    for wrong, _ in ranks(size).run(differences, str(reference(case)), case, bucket_bytes):
        assert wrong == []


def test_many_weights_come_with_one_collective(ranks: Callable[[int], Pool], reference: Callable[[Case], Path]) -> None:
    case = Case("d2t2", "tied")
    counts = {most: ranks(4).run(differences, str(reference(case)), case, most)[0][1] for most in (0, 2**24)}
    assert counts[2**24] == 2  # one a cut
    assert counts[0] > 60
