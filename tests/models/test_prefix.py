"""Beginnings that documents share are computed once, and nothing else changes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from archon.models.attention.prefix import SharedPrefixes, prefix_attention, shared_prefixes
from archon.models.attention.sdpa import sdpa_attention
from archon.models.attention.spec import AttentionSpec


def answers(prompts: list[int], per_prompt: int, longest: int, seed: int = 0) -> tuple[Tensor, tuple[int, ...]]:
    """Documents that answer prompts of these lengths, several each, of uneven length, shuffled; one alone."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 5, (n,), generator=generator).tolist()

    documents = []
    for index, length in enumerate(prompts):
        prompt = [100 + index, *draw(length - 1)]
        sizes = torch.randint(0, longest, (per_prompt,), generator=generator).tolist()
        documents += [prompt + draw(size) for size in sizes]
    documents.append([7, 7, 7])
    order = torch.randperm(len(documents), generator=generator).tolist()
    documents = [documents[i] for i in order]
    return torch.tensor([x for d in documents for x in d]), tuple(map(len, documents))


def found(tokens: Tensor, lengths: tuple[int, ...]) -> SharedPrefixes:
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None
    return shared


def test_every_token_finds_a_row_of_the_same_beginning() -> None:
    """A token's row must be of a document that is the same up to and with that token."""
    tokens, lengths = answers([6, 9, 6, 2], per_prompt=5, longest=7)
    shared = found(tokens, lengths)
    starts = [0, *accumulate(lengths)]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for t in range(len(tokens)):
        row = int(shared.rows[shared.gather_index[t]])
        own, other = int(document[t]), int(document[row])
        assert t - starts[own] == row - starts[other]
        assert tokens[starts[own] : t + 1].equal(tokens[starts[other] : row + 1])
    assert len(shared.rows) == len(set(shared.rows.tolist()))
    # Each of the four prompts occurs once, not five times.
    assert len(shared.rows) <= len(tokens) - 4 * (6 + 9 + 6 + 2)


def test_nothing_to_share_is_none() -> None:
    assert shared_prefixes(torch.tensor([1, 2, 3, 4, 5, 6]), (2, 2, 2)) is None
    assert shared_prefixes(torch.tensor([1, 2, 3]), (3,)) is None
    # One token of thirty is not worth the reordering.
    tokens = torch.cat([torch.tensor([1]), torch.arange(2, 16), torch.tensor([1]), torch.arange(20, 34)])
    assert shared_prefixes(tokens, (15, 15)) is None


def test_identical_documents_are_one() -> None:
    shared = found(torch.tensor([4, 5, 6] * 3), (3, 3, 3))
    assert shared.rows.tolist() == [0, 1, 2]
    assert shared.gather_index.tolist() == [0, 1, 2] * 3
    assert shared.suffixes == ()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("longest", [6, 150])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_equals_that_of_whole_documents(heads: tuple[int, int], longest: int, window: int | None) -> None:
    tokens, lengths = answers([6, 40, 6], per_prompt=4, longest=longest, seed=1)
    shared = found(tokens, lengths)
    torch.manual_seed(0)
    # What is computed from equal beginnings is equal, also queries, keys and values.
    q, k, v = (
        torch.randn(len(shared.rows), n, 8, dtype=torch.float64, requires_grad=True)
        for n in (heads[0], *[heads[1]] * 2)
    )
    spec = AttentionSpec(0.3, window)
    whole = sdpa_attention(*(x.index_select(0, shared.gather_index) for x in (q, k, v)), lengths, spec)
    gradient = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v), gradient)
    ours = prefix_attention(q, k, v, shared, spec).index_select(0, shared.gather_index)
    torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), gradient), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
