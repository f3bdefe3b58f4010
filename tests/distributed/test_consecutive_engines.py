"""Engines of different layouts, one after another in the same processes, use the process groups of their own layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.engine.optim import gradient_norm
from archon.parallel.layout import parse_layout
from archon.tools.check.layouts import FP64_TOLERANCE, rank_rows
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import LENGTHS, Case, batch, engine_config, loss_of, write_config
from tests.warm import run_code

pytestmark = pytest.mark.xdist_group("ranks")

DENSE = ("p2t2", "d2t2", "d2p2", "r2t2", "c2t2", "p4")
SPARSE = ("p2t2e2", "d2t2e2", "(attn:d2t2|ffn:d1t2e2)", "d2p2e2", "r2t2e2")


class Result(NamedTuple):
    """A rank's metrics of one engine, and its tensors on a mesh with process groups of another layout."""

    loss: float
    norm: float
    foreign: list[str]


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[Pool]:
    """Four processes in which no earlier test has built an engine."""
    with Pool(4) as pool:
        yield pool


def every_ordered_pair(layouts: Sequence[str]) -> list[str]:
    """Return a sequence in which every layout directly follows every other one (an Eulerian circuit)."""
    unused = {layout: [other for other in layouts if other != layout] for layout in layouts}
    path, circuit = [layouts[0]], list[str]()
    while path:
        if unused[path[-1]]:
            path.append(unused[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return circuit[::-1]


def foreign_tensors(engine: ArchonEngine, grads: dict[str, Tensor]) -> list[str]:
    """Return the names of parameters and gradients whose mesh has a group that the engine's layout does not."""
    dims = engine.parallel_dims
    names = {name for sizes in dims.grids.values() for name in sizes if name != "cp_tp"}
    known = {dims.get_group(name).group_name for name in names}
    tensors = [*engine.model.named_parameters(), *((f"grad of {name}", grad) for name, grad in grads.items())]
    return [
        name
        for name, tensor in tensors
        if isinstance(tensor, DTensor) and {g.group_name for g in tensor.device_mesh.get_all_groups()} - known
    ]


def train_in_turn(path: str, case: Case, layouts: Sequence[str]) -> list[Result]:
    """Take a training step with a new engine of each layout; all have the same weights and batch."""
    results = []
    for layout in layouts:
        engine = ArchonEngine(engine_config(case, path, layout, init_from_scratch=True))
        engine.initialize()
        dp = engine.ranks.dp
        rows = rank_rows(batch(LENGTHS, 1), dp.rank, dp.size)
        grads, _ = engine.gradients(rows, loss_of(case), loss_token_count, full=False)
        foreign = foreign_tensors(engine, grads)
        metrics = engine.train_batch(rows, loss_of(case), loss_token_count)
        results.append(Result(metrics["loss"], metrics["grad_norm"], foreign))
    return results


@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        # The last stage has no embedding. DTensor's caches there hold the `tp` mesh of the first engine for every
        # parameter but the embedding, and the second engine's `tp` mesh is equal to it.
        pytest.param(Case("", "few_kv", critic=True), ("p2t2", "d2t2"), id="critic"),
        pytest.param(Case("", "tied"), ("p4", "d2t2", "p2t2"), id="tied"),
        pytest.param(Case("", "moe"), ("d2t2e2", "p2t2e2", "d2p2e2"), id="moe"),
        *(
            pytest.param(
                Case("", model, critic=critic),
                every_ordered_pair(layouts),
                id=f"{model}-{'critic' if critic else 'actor'}-all pairs",
                marks=pytest.mark.slow,
            )
            for model, critic, layouts in (
                ("few_kv", True, DENSE),
                ("few_kv", False, DENSE),
                ("tied", False, DENSE),
                ("moe", False, SPARSE),
                ("moe", True, SPARSE),
                ("latent", False, SPARSE),
                ("delta", False, DENSE[:5]),
            )
        ),
    ],
)
def test_consecutive_engines_use_their_own_groups(
    new_ranks: Pool, tmp_path: Path, case: Case, layouts: Sequence[str]
) -> None:
    """Every step ends, and its loss and gradient norm are the same in all layouts."""
    path = write_config(tmp_path / "model", case.model)
    for results in new_ranks.run(train_in_turn, path, case, layouts, timeout=30.0 + 10.0 * len(layouts)):
        assert [result.foreign for result in results] == [[]] * len(layouts)
        for result in results:
            assert result.loss == pytest.approx(results[0].loss, rel=FP64_TOLERANCE)
            assert result.norm == pytest.approx(results[0].norm, rel=FP64_TOLERANCE)


def norm_with_a_second_group(rank_with_it: int) -> float:
    """Return the norm of four gradients; on one rank, the mesh of the second has another group of the same ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard_cp",))
    other = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("dp_shard_cp",))
    parameters = []
    for index in range(4):
        own = other if index == 1 and dist.get_rank() == rank_with_it else mesh
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(3), own, [Shard(0)]))
        parameter.grad = DTensor.from_local(torch.full((3,), 2.0), own, [Shard(0)])
        parameters.append(parameter)
    return float(gradient_norm(parameters))


def test_groups_of_the_same_ranks_are_one_collective(ranks: Callable[[int], Pool]) -> None:
    """The gradient norm makes equally many collectives on every rank, whatever the names of the groups."""
    norms = ranks(2).run(norm_with_a_second_group, 1, timeout=30.0)
    assert norms == pytest.approx([math.sqrt(4 * 6 * 2.0**2)] * 2)


TWO_DEFAULT_GROUPS = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from archon.parallel.layout import parse_layout
from archon.parallel.torch_private import join_fake_group

for earlier_layouts in ([], ["d4", "c4"]):
    join_fake_group(0, 4)
    for layout in earlier_layouts:  # their groups take the first names
        parse_layout(layout).dims().get_mesh("tp")
    mesh = parse_layout("p2t2").dims().get_mesh("tp")
    product = DTensor.from_local(torch.ones(4), mesh, [Shard(0)]) * 2
    print(dist.get_process_group_ranks(product.device_mesh.get_group()))
    dist.destroy_process_group()
"""


def test_meshes_of_a_destroyed_default_group_are_not_used() -> None:
    done = run_code(TWO_DEFAULT_GROUPS)
    assert done.stdout.splitlines() == ["[0, 1]", "[0, 1]"], done.stderr


def test_grids_share_groups_of_the_same_dimension() -> None:
    """The pipeline dimension, which is in five grids, has one process group per rank."""
    code = """
from archon.parallel.layout import parse_layout
from archon.parallel.dims import _grid_meshes
from archon.parallel.torch_private import join_fake_group
join_fake_group(0, 8)
meshes = _grid_meshes(parse_layout("d2p2t2").dims())
print(len({mesh["pp"].get_group().group_name for mesh in meshes.values()}), len(meshes))
"""
    assert run_code(code).stdout.split() == ["1", "5"]


def test_every_ordered_pair_is_a_circuit() -> None:
    circuit = every_ordered_pair(DENSE)
    assert len(set(pairwise(circuit))) == len(circuit) - 1 == len(DENSE) * (len(DENSE) - 1)


assert all(parse_layout(layout).world_size == 4 for layout in DENSE + SPARSE)
