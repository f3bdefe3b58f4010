"""Data files of hardware, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from archon.models.flops import PEAK_BF16_FLOPS
from archon.schema.errors import ConfigError
from archon.tools.planner.calibrate import LARGE_BYTES, CollectiveTimes, _check_name, gather_bandwidth
from archon.tools.planner.hardware import known_hardware, read_hardware
from archon.tools.planner.time_model import Link


def test_every_known_name_is_a_whole_file() -> None:
    assert known_hardware() == ["4090", "a100-80gb", "b200", "h100-80gb", "h200", "l40s"]
    for name in known_hardware():
        assert read_hardware(name).name == name


def test_the_peak_is_the_one_that_mfu_is_given_against() -> None:
    for name in known_hardware():
        known, peak = read_hardware(name), PEAK_BF16_FLOPS[name.split("-")[0].upper()]
        assert known.flops("bfloat16") == pytest.approx(peak, rel=1e-3)  # 989.4 rounded


def test_8_bit_products_are_twice_as_fast_where_there_are_some() -> None:
    for name in ("h100-80gb", "h200", "b200", "l40s", "4090"):
        known = read_hardware(name)
        assert known.matmul_flops("bfloat16", "rowwise") == pytest.approx(
            2 * known.bf16_flops, rel=0.02
        )  # data sheets round
    with pytest.raises(ConfigError, match="fp8 is rowwise, but a100-80gb has no FP8 matmuls"):
        read_hardware("a100-80gb").matmul_flops("bfloat16", "rowwise")


def test_a_gpu_is_not_taken_for_another_one() -> None:
    _check_name("h100-80gb", "NVIDIA H100 80GB HBM3")
    _check_name("h100-80gb", "NVIDIA GB10")  # not a known GPU
    _check_name("mine.yaml", "NVIDIA H200")
    with pytest.raises(ConfigError, match=r"this GPU is NVIDIA A100-SXM4-80GB, not h100-80gb; set --gpu a100-80gb"):
        _check_name("h100-80gb", "NVIDIA A100-SXM4-80GB")


def test_a_file_of_ones_own_comes_back(tmp_path: Path) -> None:
    file, h200 = tmp_path / "mine.yaml", read_hardware("h200")
    file.write_text(h200.model_copy(update={"name": "mine"}).to_yaml())
    assert read_hardware(str(file)).model_dump() == h200.model_dump() | {"name": "mine"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a list", "expected fields"),
        ("{", "not valid YAML"),
        ("memory_bytes: " + "1" * 5000, "not valid YAML: Exceeds the limit"),
        ("[" * 5000, "not valid YAML"),
        ("name: x\nnode_bandwith: 1", "did you mean 'node_bandwidth'"),
        ("name: x", "bf16_flops: field required"),
    ],
)
def test_a_wrong_file_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_hardware(str(file))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"gpu is 'h300'; expected one of 4090, a100-80gb, b200, h100-80gb"):
        read_hardware("h300")


def test_a_group_within_a_node_uses_the_fast_link() -> None:
    h100 = read_hardware("h100-80gb")
    inside, across = Link(h100, 8, 1), Link(h100, 8, 8)
    assert inside.in_node and not across.in_node
    assert (inside.members, across.members) == (8, 1)
    moved = 7 / 8 * 2**30
    assert inside.seconds(2**30, 1) == pytest.approx(1e-5 + moved / (450e9 * h100.link_efficiency))
    assert across.seconds(2**30, 1) == pytest.approx(2e-5 + moved / (50e9 * h100.link_efficiency))
    assert Link(h100, 1, 1).seconds(2**30, 1) == 0


def test_a_large_gather_gives_the_rate_without_what_it_takes_to_begin() -> None:
    found = {2: CollectiveTimes(0.1, 0.2, 9.0), 4: CollectiveTimes(0.5, 2.0, 3.5)}
    assert gather_bandwidth(found) == 3 * LARGE_BYTES / 3.0
