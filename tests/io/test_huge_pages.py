"""The page size that was cheaper is taken, and a change is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archon.huge_pages import HugePageAdvisor

SMALL, HUGE = False, True


def simulate(cost: Callable[[int, bool], float], pieces: int = 1000) -> list[bool]:
    advisor, choices = HugePageAdvisor(), []
    for number in range(pieces):
        huge = advisor.choose()
        advisor.observe(huge, cost(number, huge))
        choices.append(huge)
    return choices


@pytest.mark.parametrize(("small", "huge"), [(0.45, 0.15), (0.45, 2.5), (3.1, 2.5), (3.1, 0.15)])
def test_the_cheaper_size_is_taken(small: float, huge: float) -> None:
    """The other is tried 20 times in 1,000 pieces, so it costs next to nothing."""
    choices = simulate(lambda _, is_huge: huge if is_huge else small)
    assert {SMALL, HUGE} == {*choices}
    assert choices.count(huge < small) >= 975


def test_both_sizes_are_tried_first() -> None:
    assert simulate(lambda number, huge: 1.0, 2) == [SMALL, HUGE]


def test_a_change_is_noticed() -> None:
    """Huge pages are cheap, then dear for 300 pieces, then cheap again: noticed at once, and within one pause."""
    choices = simulate(lambda number, huge: (2.5 if 300 <= number < 600 else 0.15) if huge else 0.45)
    assert choices[20:300].count(HUGE) >= 270
    assert choices[310:600].count(SMALL) >= 270
    assert choices[670:].count(HUGE) >= 310


def test_filling_leaves_memory_outside_alone() -> None:
    """Advice is for whole pages of 4 KiB; what stands beside the piece keeps its content."""
    memory = torch.arange(3 * 2**20, dtype=torch.int32)
    expected = memory.clone()
    piece = memory[1000 : 1000 + 2 * 2**20]
    advisor = HugePageAdvisor()
    for _ in range(3):
        with advisor.filling(piece.data_ptr(), piece.nbytes):
            piece.fill_(7)
    expected[1000 : 1000 + 2 * 2**20] = 7
    assert torch.equal(memory, expected)
