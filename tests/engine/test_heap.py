"""Holes that freed tensors leave in the C library's heap go back to the system; caches of kernels are bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from archon.engine import heap
from archon.engine.heap import trim_heap_if_grown
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.kernel_caches import limit_kernel_caches
from tests.engine.tiny import make_engine, sft_batch

HOLES = 96 << 20


@pytest.fixture
def holes(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes that this process holds, most of `HOLES` of them free between small tensors."""
    small = 48 << 10  # from the heap: glibc never maps so little by itself
    tensors = [torch.ones(small, dtype=torch.uint8) for _ in range(HOLES // small)]
    kept = tensors[::8]
    del tensors
    monkeypatch.setattr(heap, "_trim_threshold", 0.0)
    monkeypatch.setattr(heap, "_bytes_before_trim", {})
    yield heap._resident_bytes()
    del kept


def test_they_go_back_and_then_only_after_more_growth(holes: int) -> None:
    assert trim_heap_if_grown("a test")
    assert heap._resident_bytes() < holes - HOLES // 2
    assert not trim_heap_if_grown("a test")


def test_they_go_back_at_the_end_of_a_training_step(tmp_path: Path, holes: int) -> None:
    engine = make_engine(tmp_path, optimizer={"lr": 1e-3})
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert heap._resident_bytes() < holes - HOLES // 2


def test_another_c_library_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    monkeypatch.setattr(heap, "_trim_threshold", 0.0)
    assert not trim_heap_if_grown("a test")


def holding(monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> None:
    """Fake the resident sizes of this process, before and after each trim."""
    monkeypatch.setattr(heap, "_trim_threshold", 0.0)
    monkeypatch.setattr(heap, "_bytes_before_trim", {})
    monkeypatch.setattr(heap, "_malloc_trim", lambda: lambda pad: 1)
    monkeypatch.setattr(heap, "_resident_bytes", iter([each << 20 for each in mebibytes]).__next__)


def test_what_a_step_needs_each_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, 1400, 500, 1400, 1400, 1800, 1900, 500, 1400, 1900, 500)
    #   the first time; the next step is what a step needs: 1400 * 1.25 + 64 = 1814 may be held, until 1900 are
    assert [trim_heap_if_grown("training") for _ in range(7)] == [True, False, False, False, True, False, True]


def test_so_is_what_a_turn_of_several_works_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, 1400, 500, 600, 1400, 1400)
    works = ("training", "generation", "training", "generation")
    assert [trim_heap_if_grown(work) for work in works] == [True, False, False, False]


@pytest.mark.parametrize("once", [800, 20_000])
def test_what_is_held_once_goes_back(once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage of an evaluation or of one long batch, just after the step that shows the needed size."""
    holding(monkeypatch, 400, 200, once, 200, 400, 400)
    assert [trim_heap_if_grown("training") for _ in range(4)] == [True, True, False, False]


RAGGED = """
import archon
import torch
from archon.engine.heap import _resident_bytes

torch.set_num_threads(1)
weight = torch.randn(384, 128, dtype=torch.bfloat16, requires_grad=True)
start = _resident_bytes()
for rows in range(16, 266):
    inputs = torch.randn(rows, 128, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(inputs, weight).sum().backward()
print((_resident_bytes() - start) >> 20)
"""


@pytest.mark.slow
def test_products_of_ever_other_shapes_hold_a_bounded_memory() -> None:
    done = subprocess.run([sys.executable, "-c", RAGGED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 240  # MiB; some 160 here, and 330 without a bound, which ends at 1060


def test_what_the_environment_says_of_the_caches_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    limit_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
