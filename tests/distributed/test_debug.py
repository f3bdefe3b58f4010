"""`check_tensor_consistency` and `patch_dist_group_timeout` on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from archon.parallel import check_tensor_consistency, patch_dist_group_timeout
from archon.parallel.mesh import default_group
from archon.parallel.torch_private import time_limit
from archon.schema.errors import LayoutError
from archon.tools.check.rank_pool import Pool

pytestmark = pytest.mark.xdist_group("ranks")


def compare() -> list[Any]:
    rank, value = dist.get_rank(), torch.tensor([1.0, 2.0])
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    swapped = value.flip(0) if rank == 3 else value  # with the same sum
    answers = [
        check_tensor_consistency(value, "same"),
        check_tensor_consistency(swapped, "swapped"),
        check_tensor_consistency(swapped, "swapped", group=pair),
        check_tensor_consistency(value.double() if rank == 1 else value, "wider"),
        check_tensor_consistency(value[: 1 + (rank > 0)], "shorter"),
        check_tensor_consistency(torch.tensor([float("nan")], dtype=torch.bfloat16), "nan"),
    ]
    sharded = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    try:
        check_tensor_consistency(sharded, "sharded")
    except LayoutError as error:
        answers.append(str(error))
    answers.append(check_tensor_consistency(sharded.full_tensor(), "gathered"))
    return answers


def test_ranks_learn_whether_they_hold_the_same_tensor(ranks: Callable[[int], Pool]) -> None:
    for rank, found in enumerate(ranks(4).run(compare)):
        assert found[:6] == [True, False, rank % 2 == 0, False, False, True]
        assert "give sharded.full_tensor(), or its shard" in found[6] and found[7]


def limit() -> list[float]:
    old = time_limit(default_group()), distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
    try:
        patch_dist_group_timeout(timedelta(seconds=77))
        later = dist.new_group()
        return [time_limit(group).total_seconds() for group in (default_group(), later)]
    finally:
        patch_dist_group_timeout(old[0])
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = old[1:]


def test_the_limit_is_that_of_groups_there_and_to_come(ranks: Callable[[int], Pool]) -> None:
    assert ranks(4).run(limit) == [[77.0, 77.0]] * 4
    with pytest.raises(LayoutError, match="expected a positive duration"):
        patch_dist_group_timeout(timedelta(0))
