"""Layout strings and their rules, all checked before any process group exists."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from archon.parallel.dims import MESH_NAMES, ArchonParallelDims
from archon.parallel.layout import ParallelLayout, nearest_layouts, parse_layout
from archon.schema.errors import LayoutError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d1", ParallelLayout()),
        ("d4p2t2c1e1", ParallelLayout(dp_shard=4, pp=2, tp=2)),
        ("archon:d2c2", ParallelLayout(dp_shard=2, cp=2)),
        ("t2d3", ParallelLayout(dp_shard=3, tp=2)),
        ("r2", ParallelLayout(dp_replicate=2)),
        ("r2d4e8t2", ParallelLayout(dp_shard=4, dp_replicate=2, tp=2, ep=8)),
        ("(attn:d1p4t2c2|ffn:d1p4t1e4)", ParallelLayout(pp=4, tp=2, cp=2, ep=4)),
        ("archon:( attn:d4t2 | ffn:d2t2e2 )", ParallelLayout(dp_shard=4, tp=2, ep=2, etp=2)),
    ],
)
def test_layout_strings_parse_and_print_back(text: str, expected: ParallelLayout) -> None:
    layout = parse_layout(text)
    assert layout == expected
    assert parse_layout(str(layout)) == layout
    assert parse_layout(text, world_size=layout.world_size) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a layout string; expected letters d"),
        ("4d", "is not a layout string"),
        ("d4x2", "'x' is not one of"),
        ("d0", "d0 is below 1"),
        ("d2d2", "gives 'd' twice"),
        ("d-1", "is not a layout string"),
        ("d2e3", r"ep = 3 must divide dp_shard × cp × tp = 2 \(etp = 1\); nearest legal layouts: d2e2"),
        ("(attn:d2|ffn:d1p2)", "attn has p1 and ffn has p2"),
        ("(attn:d4|ffn:d1e2)", "attn spans d × p × t × c = 4 ranks and ffn d × p × t × e = 2"),
        ("(attn:d2e2|ffn:d2)", "'e' is not one of d, r, p, t, c here"),
        ("(attn:d2r2|ffn:d2)", "attn has r2 and ffn has r1"),
        ("(attn:d4t2|ffn:d1t4e2)", "etp must be 1 or tp = 2, got 4"),
    ],
)
def test_an_illegal_layout_says_which_rule_it_breaks(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_layout(text)
    assert not dist.is_initialized() or dist.get_world_size() == 1


def test_a_layout_of_another_size_names_the_nearest_legal_ones() -> None:
    with pytest.raises(
        LayoutError, match=r"'d4t2' needs 8 processes, but 4 are running; nearest legal layouts: d2t2, d4"
    ):
        parse_layout("d4t2", world_size=4)


@pytest.mark.parametrize(("wanted", "size"), [("d4t2", 6), ("p3t4", 8), ("(attn:d4t2|ffn:d2t2e2)", 12), ("d2e8t4", 16)])
def test_suggested_layouts_are_legal_and_of_the_right_size(wanted: str, size: int) -> None:
    suggestions = nearest_layouts(parse_layout(wanted), size)
    assert len(suggestions) == 3
    for layout in suggestions:
        assert layout.world_size == size
        layout.dims()


def test_dp_shard_minus_one_fills_the_rest() -> None:
    dims = ArchonParallelDims(tp=2, pp=2, world_size=16)
    assert dims.dp_shard == 4
    with pytest.raises(LayoutError, match="divisible by dp_replicate × cp × tp × pp = 3, got 8"):
        ArchonParallelDims(tp=3, world_size=8)


def test_derived_sizes() -> None:
    dims = ArchonParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=4, etp=2, world_size=32)
    flags = (dims.pp_enabled, dims.dp_shard_enabled, dims.dp_replicate_enabled, dims.cp_enabled)
    assert all((*flags, dims.tp_enabled, dims.ep_enabled, dims.etp_enabled, dims.fsdp_enabled))
    assert dims.context_and_model_parallel_size == 8
    assert dims.fsdp_gradient_divide_factor == 8
    assert dims.seq_len_divisor == 4
    one = ArchonParallelDims()
    flags = (one.pp_enabled, one.dp_shard_enabled, one.dp_replicate_enabled, one.cp_enabled)
    assert not any((*flags, one.tp_enabled, one.ep_enabled, one.etp_enabled, one.fsdp_enabled))
    assert (one.dp_shard, one.seq_len_divisor, one.fsdp_gradient_divide_factor) == (1, 1, 1)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp_shard": 2, "world_size": 3}, "1 × 2 × 1 × 1 × 1 = 2, but the world size is 3"),
        ({"tp": 0}, "tp must be an integer of at least 1, got 0"),
        ({"cp": 1.0}, "cp must be an integer of at least 1, got 1.0"),
        ({"dp_shard": -2}, "dp_shard must be an integer of at least 1, got -2"),
        ({"ep": 4, "tp": 2, "etp": 2, "world_size": 4}, r"ep = 4 must divide dp_shard × cp = 2 \(etp = 2\)"),
        ({"etp": 2, "world_size": 2}, "etp must be 1 or tp = 1, got 2"),
    ],
)
def test_broken_rules_are_named(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ArchonParallelDims(**degrees)


def test_on_one_process_every_mesh_is_that_rank() -> None:
    dims = ArchonParallelDims()
    for name in MESH_NAMES:
        assert dims.get_mesh(name).size() == 1
        if name != "ep_tp":
            assert dims.get_group(name).size() == 1
    with pytest.raises(LayoutError, match="ep_tp has two dimensions; get the groups of ep and etp instead"):
        dims.get_group("ep_tp")
    with pytest.raises(LayoutError, match="unknown mesh 'dp_tp'; known are pp"):
        dims.get_mesh("dp_tp")


def test_the_room_refuses_another_name() -> None:
    import importlib.util
    from pathlib import Path

    source = Path(__file__).parents[2] / "parallel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("parallel", source)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"imported as 'parallel'; import it as `archon\.parallel`"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
