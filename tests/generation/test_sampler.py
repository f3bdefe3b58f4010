"""Sampling against plain loops and against the distribution it claims."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from archon.generation.sampler import (
    LogitChanges,
    SamplingParams,
    counter_uniform,
    filter_top_k_top_p,
    inverse_cdf_sample,
    most_likely,
    sample,
)
from archon.generation.types import GenerationHyperparameters
from archon.models.cpu import operations
from tests.tolerances import CHI_SQUARE_P, FORMULA_FP32, FORMULA_FP64


@pytest.fixture(params=["a C function", "PyTorch"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "PyTorch":
        monkeypatch.setattr(operations, "can_use", lambda *_: False)
    return str(request.param)


def params(rows: int, **given: Any) -> SamplingParams:
    values = {"temperature": 1.0, "greedy": False, "top_p": 1.0, "top_k": 0, "seed": 0, "index": 0} | given
    dtypes = {"temperature": float, "greedy": bool, "top_p": float, "top_k": np.int64, "seed": np.uint64}
    lists = {name: values.pop(name, []) for name in ("banned", "changed")}
    arrays = {key: np.broadcast_to(np.array(v, dtypes.get(key, np.uint64)), rows).copy() for key, v in values.items()}
    return SamplingParams(**arrays, **lists)


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """How often a correct sampler deviates at least this much: the upper tail of chi-square with n − 1 degrees."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic.double() / 2).item()


def plain_filter(probs: list[float], top_k: int, top_p: float) -> list[float]:
    """Most likely first: stop after top_k tokens, or once those taken hold top_p of what top-k left."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[:top_k] if top_k else order
    mass = sum(probs[i] for i in order)
    kept, taken = [0.0] * len(probs), 0.0
    for i in order:
        if top_p < 1 and taken / mass >= top_p:
            break
        kept[i] = probs[i]
        taken += probs[i]
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_top_k_and_top_p_equal_a_plain_loop(top_k: int, top_p: float) -> None:
    probs = torch.randn(20, 13, dtype=torch.float64).mul(2).softmax(-1)
    probs[0] = 1 / 13  # all equal: ties go to the lower id
    got = filter_top_k_top_p(probs, torch.full((20,), top_k), torch.full((20,), top_p, dtype=torch.float64))
    wanted = torch.tensor([plain_filter(row, top_k, top_p) for row in probs.tolist()], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=0, atol=FORMULA_FP64)


@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 1000])
def test_inverse_cumulative_equals_a_plain_loop(vocab: int) -> None:
    probs = torch.rand(200, vocab, dtype=torch.float64)
    probs[:, ::3] = 0 if vocab > 1 else 1
    probs[0, : vocab // 2] = 0  # whole blocks of nothing before the first possible token
    uniform = torch.rand(200, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    got = inverse_cdf_sample(probs, uniform).tolist()
    for row, u, token in zip(probs.tolist(), uniform.tolist(), got, strict=True):
        running, target = 0.0, u * math.fsum(row)
        possible = [i for i, p in enumerate(row) if p > 0]
        wanted = next(i for i in possible if (running := running + row[i]) > target or i == possible[-1])
        assert token == wanted
        assert row[token] > 0


def test_a_token_of_probability_zero_is_never_drawn_at_the_edge_of_a_block() -> None:
    """Block of 128 that begin and end with impossible tokens, and uniform numbers one rounding next to each edge."""
    for _ in range(20):
        probs = torch.rand(9, 128, dtype=torch.float64) ** 6
        probs[:, 0] = probs[:, -1] = 0
        edges = probs.sum(1).cumsum(0)
        edges = edges / edges[-1]
        around = [torch.nextafter(edges, torch.full_like(edges, side)) for side in (0.0, 1.0)]
        uniform = torch.cat([*around, edges])
        uniform = uniform[uniform < 1]
        rows = probs.reshape(1, -1).expand(len(uniform), -1)
        tokens = inverse_cdf_sample(rows, uniform)
        assert (rows.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_tokens_follow_the_softmax(temperature: float) -> None:
    draws, vocab = 40_000, 37
    logits = torch.randn(vocab).mul(1.5)
    tokens, _ = sample(logits.expand(draws, -1), params(draws, temperature=temperature, seed=3, index=np.arange(draws)))
    observed = torch.bincount(tokens, minlength=vocab).double()
    expected = (logits.double() / temperature).softmax(-1) * draws
    common = expected >= 5  # the usual condition of the test; the rare ones are pooled
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    assert chi_square_p(observed, expected.clamp(min=1e-9)) > CHI_SQUARE_P


def test_sampled_tokens_follow_the_softmax_across_seeds() -> None:
    """Neighboring seeds are independent streams: the first token of many requests follows the softmax as well."""
    draws, vocab = 40_000, 11
    logits = torch.linspace(-1, 1, vocab)
    tokens, _ = sample(logits.expand(draws, -1), params(draws, seed=np.arange(draws)))
    observed, expected = torch.bincount(tokens, minlength=vocab).double(), logits.double().softmax(-1) * draws
    assert chi_square_p(observed, expected) > CHI_SQUARE_P


def test_noise_is_uniform_and_depends_on_seed_and_index_only() -> None:
    seeds, indices = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    noise = counter_uniform(seeds.ravel(), indices.ravel())
    assert len(np.unique(noise)) == noise.size
    assert noise.min() >= 0
    assert noise.max() < 1
    observed, _ = np.histogram(noise, bins=100, range=(0, 1))
    assert chi_square_p(torch.from_numpy(observed).double(), torch.full((100,), 900.0)) > CHI_SQUARE_P
    shuffled = np.random.default_rng(0).permutation(noise.size)
    again = counter_uniform(seeds.ravel()[shuffled], indices.ravel()[shuffled])
    assert (again == noise[shuffled]).all()


def test_seeds_near_two_to_the_63_are_fine() -> None:
    assert 0 <= counter_uniform(np.array([2**63 - 1], np.uint64), np.array([2**40], np.uint64))[0] < 1


def test_logprob_is_of_the_full_vocabulary_whatever_was_filtered() -> None:
    logits = torch.randn(6, 50)
    wanted = (logits / 0.7).log_softmax(-1)
    for given in ({}, {"top_k": 2}, {"top_p": 0.2}, {"greedy": True}, {"banned": [(0, [1, 2]), (3, [4])]}):
        tokens, logprobs = sample(logits, params(6, temperature=0.7, seed=np.arange(6), **given))
        torch.testing.assert_close(logprobs, wanted[torch.arange(6), tokens], rtol=0, atol=2e-6)


def test_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(1, 40).expand(300, -1)
    order = logits[0].argsort(descending=True)
    greedy, few = np.arange(300) < 100, np.where(np.arange(300) >= 200, 3, 0)
    tokens, _ = sample(logits, params(300, greedy=greedy, top_k=few, seed=np.arange(300)))
    assert (tokens[:100] == order[0]).all()
    assert len(tokens[100:200].unique()) > 5
    assert set(tokens[200:].tolist()) == set(order[:3].tolist())


def test_banned_tokens_are_not_sampled() -> None:
    logits = torch.zeros(2000, 4)
    tokens, _ = sample(logits, params(2000, index=np.arange(2000), banned=[(row, [0, 3]) for row in range(1000)]))
    assert set(tokens[:1000].tolist()) == {1, 2}
    assert set(tokens[1000:].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_not_finite_are_an_error(wrong: float, greedy: bool) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = wrong
    with pytest.raises(ArithmeticError, match=r"rows \[1\] of 3 are not finite"):
        sample(logits, params(3, greedy=greedy))
    with pytest.raises(ArithmeticError, match=r"rows \[0\] of 1 are not finite"):
        sample(torch.full((1, 5), -torch.inf), params(1, greedy=greedy))


def test_tokens_that_a_model_excludes_are_not_sampled() -> None:
    logits = torch.zeros(2000, 300)
    logits[:, 4:] = logits[:, :2] = -torch.inf
    tokens, logprobs = sample(logits, params(2000, index=np.arange(2000)))
    assert set(tokens.tolist()) == {2, 3}
    torch.testing.assert_close(logprobs, torch.full((2000,), -math.log(2)), rtol=0, atol=1e-6)


def test_what_a_row_draws_does_not_depend_on_others() -> None:
    """Also where others sample from a part of the vocabulary, which PyTorch's operations do."""
    logits = torch.randn(300, 3000)
    alone = params(300, seed=np.arange(300), temperature=np.linspace(0.5, 2, 300))
    tokens, logprobs = sample(logits, alone)
    assert len({*tokens.tolist()}) > 100
    few = np.arange(300) % 7 == 1
    next_to = params(
        300,
        seed=np.arange(300),
        temperature=np.linspace(0.5, 2, 300),
        top_k=np.where(few, 5, 0),
        banned=[(row, [int(tokens[row])]) for row in range(2, 300, 7)],
    )
    mixed_tokens, mixed_logprobs = sample(logits, next_to)
    others = np.flatnonzero(~few & (np.arange(300) % 7 != 2))
    assert mixed_tokens[others].equal(tokens[others]) and mixed_logprobs[others].equal(logprobs[others])
    assert (mixed_tokens[2::7] != tokens[2::7]).all()
    few_best = logits[few].topk(5).indices
    assert (mixed_tokens[few][:, None] == few_best).any(1).all()


def test_the_c_function_never_draws_a_token_of_probability_zero() -> None:
    """At both ends of the uniform numbers, with impossible tokens at the ends of blocks and of the vocabulary."""
    for vocab in (1, 2, 130, 500, 70_000):
        logits = torch.full((2, vocab), -torch.inf)
        possible = torch.randperm(vocab)[: max(1, vocab // 50)]
        logits[:, possible] = torch.randn(len(possible)) * 3
        uniform = np.array([0.0, 1 - 2.0**-53])
        tokens, logprobs = operations.draw(logits, np.ones(2), np.zeros(2, dtype=bool), uniform)
        assert tokens.tolist() == [possible.min(), possible.max()] and logprobs.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [1, 16, 127, 128, 129, 50_001])
def test_the_c_function_draws_the_tokens_that_operations_draw(
    vocab: int, threads: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that lie apart, with temperatures and greedy rows of their own; logprobs are as near to float64."""
    called = list[int]()
    one = operations.draw
    monkeypatch.setattr(operations, "draw", lambda *args: (called.append(1), one(*args))[1])
    logits = (torch.randn(40, vocab + 3) * 4)[:, 1:-2]
    given = params(40, temperature=np.linspace(0.2, 3, 40), greedy=np.arange(40) % 5 == 0, seed=7, index=np.arange(40))
    torch.set_num_threads(threads)
    try:
        ours = sample(logits, given)
    finally:
        torch.set_num_threads(1)
    assert len(called) == (by == "a C function")
    monkeypatch.setattr(operations, "can_use", lambda *_: False)
    theirs = sample(logits, given)
    assert ours[0].equal(theirs[0])
    exact = (logits.double() / torch.from_numpy(given.temperature)[:, None]).log_softmax(-1).gather(1, ours[0][:, None])
    distances = [(logprobs - exact[:, 0]).abs().max().item() for _, logprobs in (ours, theirs)]
    assert distances[0] <= max(distances[1], FORMULA_FP32 * exact.abs().max().item())


def test_banned_rows_next_to_rows_that_are_drawn_by_the_kernel() -> None:
    """Rows without a limit are drawn from the whole vocabulary by other code; the others keep their banned tokens."""
    logits = torch.zeros(2000, 200)
    logits[:, 4:] = -torch.inf
    banned = [(row, [0, 3] if row % 4 == 1 else [1]) for row in range(1, 2000, 2)]
    tokens, _ = sample(logits, params(2000, index=np.arange(2000), banned=banned))
    assert set(tokens[0::2].tolist()) == {0, 1, 2, 3}
    assert set(tokens[1::4].tolist()) == {1, 2}
    assert set(tokens[3::4].tolist()) == {0, 2, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2])])
def test_a_nucleus_ends_where_its_mass_reaches_top_p(top_p: float, kept: list[int]) -> None:
    """Halves and quarters are exact: a token is kept while the mass of the more likely ones is below top_p."""
    probs = torch.tensor([[0.5, 0.25, 0.25]])
    filtered = filter_top_k_top_p(probs, torch.tensor([0]), torch.tensor([top_p], dtype=torch.float64))
    assert filtered.nonzero()[:, 1].tolist() == kept


PROMPT, OUTPUT = [0, 1], [1, 2, 2]
CHANGES: list[tuple[dict[str, Any], list[float]]] = [
    ({"presence_penalty": 1.5}, [3.0, 0.5, -2.5, 0.5]),
    ({"frequency_penalty": 0.5}, [3.0, 1.5, -2.0, 0.5]),
    ({"presence_penalty": -1.0, "frequency_penalty": 0.5}, [3.0, 2.5, -1.0, 0.5]),
    ({"repetition_penalty": 2.0}, [1.5, 1.0, -2.0, 0.5]),
    ({"logit_bias": {3: 4.0, 0: -100.0}}, [-97.0, 2.0, -1.0, 4.5]),
    ({"logit_bias": {2: 3.0}, "repetition_penalty": 2.0, "presence_penalty": 1.0}, [1.5, 0.0, 0.0, 0.5]),
]


@pytest.mark.parametrize(("fields", "expected"), CHANGES)
def test_penalties_and_bias_change_the_logits_that_are_drawn_from(
    fields: dict[str, Any], expected: list[float]
) -> None:
    """Presence and frequency count the answer, repetition also the prompt; reported logprobs are those without them."""
    logits, temperature, rows = torch.tensor([3.0, 2.0, -1.0, 0.5]), 0.7, 4000
    changes = LogitChanges(GenerationHyperparameters(**fields), PROMPT, OUTPUT)
    torch.testing.assert_close(changes.apply(logits), torch.tensor(expected), rtol=FORMULA_FP32, atol=0)
    changed = [(row, changes) for row in range(0, 2 * rows, 2)]
    both = params(2 * rows, temperature=temperature, index=np.arange(2 * rows), changed=changed)
    tokens, logprobs = sample(logits.expand(2 * rows, -1), both)
    plain = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, plain[tokens], rtol=FORMULA_FP32, atol=1e-6)
    for drawn, wanted in ((tokens[::2], torch.tensor(expected)), (tokens[1::2], logits)):
        probs = (wanted.double() / temperature).softmax(-1)
        seen = torch.bincount(drawn, minlength=4).double()
        likely = probs > 1e-3
        assert not seen[~likely].sum() > 20
        assert chi_square_p(seen[likely], probs[likely] / probs[likely].sum() * seen[likely].sum()) > CHI_SQUARE_P
    greedy = params(2, greedy=True, changed=[(1, changes)])
    assert sample(logits.expand(2, -1), greedy)[0].tolist() == [0, int(torch.tensor(expected).argmax())]


@pytest.mark.parametrize(("min_p", "kept"), [(0.5, {0}), (0.3, {0, 1}), (0.05, {0, 1, 3}), (1.0, {0})])
def test_min_p_keeps_tokens_near_the_most_likely(min_p: float, kept: set[int]) -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0, 0.5]]).expand(500, -1)
    changes = LogitChanges(GenerationHyperparameters(min_p=min_p), [], [])
    rows = params(500, index=np.arange(500), changed=[(row, changes) for row in range(500)])
    assert set(sample(logits, rows)[0].tolist()) == kept
    rows.banned = [(row, [0]) for row in range(500)]
    assert 0 not in sample(logits, rows)[0].tolist()  # even where nothing else is as likely


def test_the_most_likely_tokens_have_the_logprobs_of_sampling() -> None:
    logits = torch.randn(3, 50)
    temperature = [1.0, 0.5, 2.0]
    tokens, logprobs = sample(logits, params(3, greedy=True, temperature=temperature))
    best = most_likely(logits, temperature, 4)
    assert [top[0][0] for top in best] == tokens.tolist() and all(len(top) == 4 for top in best)
    torch.testing.assert_close(torch.tensor([top[0][1] for top in best]), logprobs, rtol=FORMULA_FP32, atol=1e-6)
    assert all(top == sorted(top, key=lambda pair: -pair[1]) for top in best)
    assert len(most_likely(logits, temperature, 99)[0]) == 50
