"""Beginnings that documents share are computed once, and nothing else changes."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.models.attention.meta import PrefixAttention
from archon.models.attention.packed.sdpa import sdpa_attention
from archon.models.attention.prefix.plan import SharedPrefixes, prefix_attention, shared_prefixes
from archon.models.attention.spec import AttentionSpec
from archon.models.cpu import tree_kernel
from archon.tools.check.oracle import relative_error
from archon.tools.check.random_configs import draw_fields
from archon.tools.check.round_trip import fresh_model
from tests.tolerances import FORMULA_FP32, INVARIANCE_FP64


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


def test_last_tokens_predict_none_and_need_not_be_computed() -> None:
    tokens, lengths = answers([6, 9, 6, 2, 1, 80], per_prompt=5, longest=7)
    assert min(lengths) == 1
    every, shared = found(tokens, lengths), shared_prefixes(tokens, lengths, every_token=False)
    assert shared is not None
    starts = [0, *accumulate(lengths)]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    used = set[int]()
    for t in range(len(tokens)):
        start, end = starts[document[t]], starts[document[t] + 1]
        row = int(shared.rows[shared.gather_index[t]])
        other = starts[document[row]]
        if t > start and shared.gather_index[t] == shared.gather_index[t - 1]:
            assert t == end - 1
            assert not any(goes_on(tokens[start:end], tokens[a:b]) for a, b in pairwise(starts))
        else:
            used.add(row)
            assert tokens[start : t + 1].equal(tokens[other : row + 1])
    assert used == {*shared.rows.tolist()} and len(used) < len(every.rows)


def goes_on(beginning: Tensor, document: Tensor) -> bool:
    return len(document) > len(beginning) and document[: len(beginning)].equal(beginning)


def test_runs_of_a_history_that_branches_are_computed_once() -> None:
    """Every turn was tried twice, and the next one continues the second try."""
    generator, history, documents = torch.Generator().manual_seed(0), list[int](), list[list[int]]()
    for _ in range(5):
        tried = [torch.randint(0, 50, (40 + own,), generator=generator).tolist() for own in range(2)]
        documents += [history + own for own in tried]
        history = documents[-1]
    documents.append(documents[0])
    lengths = tuple(map(len, documents))
    shared = found(torch.tensor([token for document in documents for token in document]), lengths)
    assert len(shared.rows) == 5 * (40 + 41)
    assert shared.counts().sum() == sum(lengths)
    assert [level.documents.max_seqlen for level in shared.levels] == [41] * 5


def test_few_common_tokens_of_long_documents_are_not_worth_a_branch() -> None:
    tokens, length = torch.arange(8 * 150), 150
    for document in range(8):
        tokens[document * length] = 0
        tokens[document * length : document * length + 60] %= 150 * (1 + document % 2 * 9)
    shared = found(tokens, (length,) * 8)
    # Four begin with the same 60 tokens; the first one, which all have, is not shared with the others.
    assert len(shared.rows) == 8 * length - 3 * 60
    assert sum(len(batch.index) for batch in shared.runs) == 1 + 4 + 4


def test_padding_is_a_document_that_no_token_uses() -> None:
    shared = found(torch.tensor([*range(200), *range(150), 7, 8]), (200, 152))
    padded = shared.padded(3)
    q, k, v = (torch.randn(len(shared.rows) + 3, 2, 4) for _ in range(3))
    spec = AttentionSpec(0.5)
    alone = prefix_attention(*(x[:-3] for x in (q, k, v)), shared, spec)
    assert torch.equal(prefix_attention(q, k, v, padded, spec)[:-3], alone)
    assert sum(len(level.rows) for level in padded.levels) == len(shared.rows) + 3


@pytest.mark.parametrize("longest", [6, 150], ids=["trees", "runs"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_moe", "deepseek_v3"])
def test_logits_and_gradients_of_models_that_are_not_dense(family: str, longest: int) -> None:
    """Mixers with a state, whose branches continue it, experts and latent attention."""
    vocab = 110
    model = fresh_model({"model_type": family} | draw_fields(1, family, vocab_size=vocab), 1, torch.float64)
    tokens, lengths = answers([6, 70, 90, 6], per_prompt=4, longest=longest, seed=1)
    shared = found(tokens, lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    weight = torch.randn(len(tokens), model.args.vocab_size, dtype=torch.float64)

    def gradients(*given: Any) -> list[Tensor]:
        model.zero_grad()
        logits = model(*given)
        (logits * weight).sum().backward()
        return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = gradients(tokens, positions, bounds, max(lengths))
    inputs = tokens[shared.rows], positions[shared.rows], bounds, max(lengths)
    for ours, wanted in zip(gradients(*inputs, PrefixAttention(shared, "sdpa")), plain, strict=True):
        assert (ours - wanted).abs().max() <= INVARIANCE_FP64 * wanted.abs().max()


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
    assert shared.runs == ()


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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_the_functions_for_trees_are_as_near_to_float64_as_products(
    heads: tuple[int, int], window: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and its gradients, for values of another width than the keys'."""
    tokens, lengths = answers([6, 20, 6, 9, 40], per_prompt=7, longest=6, seed=1)
    shared = found(tokens, lengths)
    torch.manual_seed(0)
    drawn = [torch.randn(len(shared.rows), n, d) for n, d in ((heads[0], 20), (heads[1], 20), (heads[1], 12))]
    gradient = torch.randn(len(shared.rows), heads[0], 12)
    spec = AttentionSpec(0.3, window)

    def results(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in drawn)
        out = prefix_attention(q, k, v, shared, spec)
        return [out, *torch.autograd.grad(out, (q, k, v), gradient.to(dtype))]

    exact = results(torch.float64)
    called = list[int]()
    attend = tree_kernel.attend
    monkeypatch.setattr(tree_kernel, "attend", lambda *args: (called.append(1), attend(*args))[1])
    torch.set_num_threads(threads)
    try:
        ours = results(torch.float32)
    finally:
        torch.set_num_threads(1)
    assert len(called) == sum(trees.routes.longest <= tree_kernel.LONGEST for trees in shared.trees) > 1
    monkeypatch.setattr(tree_kernel, "can_use", lambda *args: False)
    products = results(torch.float32)
    for own, other, wanted in zip(ours, products, exact, strict=True):
        assert relative_error(own.double(), wanted) <= max(2 * relative_error(other.double(), wanted), FORMULA_FP32)


def test_long_paths_sinks_and_soft_caps_are_left_to_products() -> None:
    q, short, long = torch.randn(3, 2, 8), 32, 33
    assert tree_kernel.can_use(q, q, q, short, AttentionSpec(1.0))
    assert not tree_kernel.can_use(q, q, q, long, AttentionSpec(1.0))
    assert not tree_kernel.can_use(q, q, q, short, AttentionSpec(1.0, soft_cap=2.0))
    assert not tree_kernel.can_use(q, q, q, short, AttentionSpec(1.0, sinks=torch.zeros(2)))
    assert not tree_kernel.can_use(*[q.double()] * 3, short, AttentionSpec(1.0))


def test_what_is_not_a_number_stays_so_in_trees() -> None:
    shared = found(torch.tensor([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]), (4, 4, 4))
    for broken in range(3):
        drawn = [torch.randn(len(shared.rows), 2, 8) for _ in range(3)]
        drawn[broken][1, 0, 0] = torch.nan
        q, k, v = (x.requires_grad_() for x in drawn)
        assert tree_kernel.can_use(q, k, v, shared.trees[0].routes.longest, AttentionSpec(0.3))
        out = prefix_attention(q, k, v, shared, AttentionSpec(0.3))
        assert out[1, 0].isnan().any() and not out[0].isnan().any() and not out[1, 1].isnan().any()
        out[1, 0].sum().backward()
        assert all(x.grad is not None and x.grad[1, 0].isnan().any() for x in ((k, q, v) if broken < 2 else (q,)))


def test_what_a_generator_made_of_trees_may_be_trained_with() -> None:
    shared = found(torch.tensor([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]), (4, 4, 4))
    q = torch.randn(len(shared.rows), 2, 8, dtype=torch.float64)
    with torch.inference_mode():
        first = prefix_attention(q, q, q, shared, AttentionSpec(0.3))
    q.requires_grad_()
    second = prefix_attention(q, q, q, shared, AttentionSpec(0.3))
    second.sum().backward()
    assert second.equal(first)
