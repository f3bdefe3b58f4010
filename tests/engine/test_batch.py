"""Packing: nothing is lost, shifted wrongly, or moved between documents, and the way back is exact."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archon.engine.batch import PackedBatch, first_fit_decreasing, merge, pack, split, unpack
from archon.engine.micro_batch import MicroBatch, TokenOrder
from archon.engine.plan import ForwardPlanner
from archon.models.layers.head import IGNORE_INDEX
from archon.parallel.ranks import Ranks
from archon.schema.errors import BatchError
from tests.engine.tiny import documents, padded

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def make(lengths: list[int], side: str = "right", extra: int = 0) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    docs = documents(lengths, seed=sum(lengths))
    values = [torch.randn(len(doc)) for doc in docs]
    rewards = [torch.tensor(float(i)) for i in range(len(docs))]
    masks = [torch.ones_like(doc) for doc in docs]
    return docs, padded(docs, side=side, extra=extra, fill=77, loss_mask=masks, advantages=values, rewards=rewards)


@given(lengths=LENGTHS, side=st.sampled_from(["left", "right"]), extra=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_pack_matches_a_loop_over_documents(lengths: list[int], side: str, extra: int) -> None:
    docs, batch = make(lengths, side, extra)
    rows = [row[mask] for row, mask in zip(batch["advantages"], batch["attention_mask"], strict=True)]

    packed = pack(batch)

    assert torch.equal(packed.tokens, torch.cat(docs))
    assert packed.positions.tolist() == [t for n in lengths for t in range(n)]
    assert packed.labels.tolist() == [x for doc in docs for x in [*doc.tolist()[1:], IGNORE_INDEX]]
    assert packed.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths)]
    assert packed.cu_seqlens.dtype == torch.int32
    assert (packed.max_seqlen, packed.lengths) == (max(lengths), tuple(lengths))
    assert packed["advantages"].tolist() == [x for row in rows for x in [*row.tolist()[1:], 0.0]]
    assert packed["loss_mask"].tolist() == [x for n in lengths for x in [1] * (n - 1) + [0]]
    assert packed["rewards"].tolist() == [float(i) for i in range(len(lengths))]


@given(lengths=LENGTHS, limit=st.integers(12, 40), side=st.sampled_from(["left", "right"]))
@settings(max_examples=50, deadline=None)
def test_token_aligned_values_come_back_to_their_place(lengths: list[int], limit: int, side: str) -> None:
    _, batch = make(lengths, side, extra=2)
    packed = pack(batch)
    parts = split(packed, limit)

    back = unpack(packed, merge(packed, parts, [mb["advantages"] for mb in parts]), batch["input_ids"].shape)

    starts = batch["attention_mask"].int().argmax(1)
    expected = batch["advantages"].masked_fill(~batch["attention_mask"], 0)
    expected[torch.arange(len(lengths)), starts] = 0  # nothing predicts a first token
    assert torch.equal(back, expected)


@given(lengths=LENGTHS, limit=st.integers(12, 40))
@settings(max_examples=50, deadline=None)
def test_split_keeps_documents_whole_and_in_order(lengths: list[int], limit: int) -> None:
    _, batch = make(lengths)
    packed = pack(batch)

    parts = split(packed, limit)

    seen: list[float] = []
    for mb in parts:
        assert mb.n_tokens <= limit
        assert mb.lengths == tuple(lengths[int(i)] for i in mb["rewards"])
        assert mb["rewards"].tolist() == sorted(mb["rewards"].tolist())
        assert torch.equal(mb.tokens, packed.tokens[mb.source])
        assert torch.equal(mb.labels, packed.labels[mb.source])
        assert torch.equal(mb["advantages"], packed["advantages"][mb.source])
        assert mb.cu_seqlens.tolist() == [0, *itertools.accumulate(mb.lengths)]
        seen += mb["rewards"].tolist()
    assert sorted(seen) == [float(i) for i in range(len(lengths))]


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=40), limit=st.integers(10, 25))
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing_properties(lengths: list[int], limit: int) -> None:
    bins = first_fit_decreasing(lengths, limit)

    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert max(loads) <= limit
    # First fit: no document of a bin would have fitted into another bin whole, so no two bins can be merged.
    assert all(a + b > limit for a, b in itertools.combinations(loads, 2))
    assert all(b == sorted(b) for b in bins) and [b[0] for b in bins] == sorted(b[0] for b in bins)
    assert first_fit_decreasing(lengths, limit) == bins


def fewest_bins(lengths: list[int], limit: int) -> int:
    """Brute force: assign each document to any of k bins."""
    for count in range(1, len(lengths) + 1):
        for choice in itertools.product(range(count), repeat=len(lengths)):
            if all(sum(n for n, c in zip(lengths, choice, strict=True) if c == b) <= limit for b in range(count)):
                return count
    raise AssertionError


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=6), limit=st.integers(10, 20))
@settings(max_examples=40, deadline=None)
def test_first_fit_decreasing_is_near_the_fewest_micro_batches(lengths: list[int], limit: int) -> None:
    best = fewest_bins(lengths, limit)
    assert best <= len(first_fit_decreasing(lengths, limit)) <= math.floor(11 / 9 * best + 6 / 9)


def test_long_documents_are_placed_first() -> None:
    assert first_fit_decreasing([2, 2, 2, 8, 8, 8], 10) == [[0, 3], [1, 4], [2, 5]]


def test_a_document_longer_than_a_micro_batch_names_length_and_limit() -> None:
    _, batch = make([4, 11, 3])
    with pytest.raises(BatchError, match=r"document 1 has 11 tokens, more than max_tokens_per_mb = 10.*at least 11"):
        split(pack(batch), 10)


def test_a_packed_batch_splits_like_a_padded_one() -> None:
    _, batch = make([4, 9, 3, 7])
    packed = pack(batch)
    by_hand = PackedBatch(
        tokens=packed.tokens,
        positions=packed.positions,
        labels=packed.labels,
        cu_seqlens=packed.cu_seqlens,
        max_seqlen=packed.max_seqlen,
        lengths=packed.lengths,
        fields={"loss_mask": packed["loss_mask"]},
    )
    for from_pack, from_padded in zip(split(by_hand, 12), split(packed, 12), strict=True):
        assert torch.equal(from_pack.tokens, from_padded.tokens)
        assert torch.equal(from_pack["loss_mask"], from_padded["loss_mask"])


@given(lengths=st.lists(st.integers(1, 4), min_size=9, max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_model_is_given_documents_by_length_and_nothing_else_moves(lengths: list[int]) -> None:
    _, batch = make(lengths)
    packed, planner = pack(batch), ForwardPlanner(Ranks(), torch.device("cpu"), "allgather", "sdpa")

    order = TokenOrder.by_length(packed)
    trained, labeled = (planner.plan(MicroBatch(packed, order), scored) for scored in ("trained", "labeled"))

    runs = len(list(itertools.groupby(lengths)))
    assert (order.rows is None) == (runs <= 2 * len(set(lengths)))
    for name in ("tokens", "positions", "labels", "cu_seqlens", "lengths"):
        assert torch.equal(torch.as_tensor(getattr(trained.documents, name)), torch.as_tensor(getattr(packed, name)))
    assert torch.equal(order.in_pack_order(order.computed(packed.tokens)), packed.tokens)
    rows = (order.scored(packed.loss_labels()) != IGNORE_INDEX).nonzero().squeeze(1)
    assert trained.label_rows is not None and trained.label_rows.tolist() == rows.tolist()
    assert labeled.labels is not None and (labeled.labels[labeled.label_rows] != IGNORE_INDEX).all()
    if order.rows is not None:
        inputs = trained.model_inputs()
        assert order.lengths == tuple(sorted(lengths))
        assert order.cu_seqlens.tolist() == [0, *itertools.accumulate(sorted(lengths))]
        assert inputs.positions.tolist() == [t for n in sorted(lengths) for t in range(n)]
        assert torch.equal(inputs.tokens, torch.cat(sorted(packed.tokens.split(lengths), key=len)))


def test_untrained_tokens_are_not_scored() -> None:
    _, batch = make([4, 3])
    batch["loss_mask"][0, 1] = 0
    packed = pack(batch)
    assert packed.loss_labels().tolist() == [-100, *packed.labels.tolist()[1:]]
    assert (packed.labels != IGNORE_INDEX).sum() == 5


def test_per_token_fields_may_have_trailing_dimensions() -> None:
    _, batch = make([4, 3])
    batch["features"] = torch.arange(2 * 4 * 2.0).view(2, 4, 2)
    packed = pack(batch)
    assert packed["features"].shape == (7, 2)
    assert torch.equal(packed["features"][0], batch["features"][0, 1])
    assert torch.equal(packed["features"][6], torch.zeros(2))


def change(name: str, value: object) -> dict[str, object]:
    _, batch = make([4, 3])
    return batch | {name: value}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"attention_mask": torch.ones(2, 3)}, "no 'input_ids'; it has attention_mask"),
        ({"input_ids": torch.ones(2, 3).long()}, "no 'attention_mask'"),
        (change("input_ids", torch.ones(2, 4)), r"integers \[B, S\].*float32 \(2, 4\)"),
        (change("input_ids", torch.ones(0, 4).long()), "B >= 1"),
        (change("attention_mask", torch.ones(2, 5)), r"attention_mask is \(2, 5\), but input_ids is \(2, 4\)"),
        (change("attention_mask", torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])), "row 1 of attention_mask has no token"),
        (change("attention_mask", torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])), "row 0 of attention_mask has a gap"),
        (change("rewards", torch.ones(3)), r"'rewards' is float32 \(3,\); expected \(2, 4\).*or \(2,\)"),
        (change("advantages", torch.ones(2, 3)), r"'advantages' is float32 \(2, 3\)"),
        (change("labels", torch.ones(2, 4)), "derives field 'labels'"),
        (change("input_ids", torch.zeros(2, 0, dtype=torch.long)), "S >= 1, got int64 \\(2, 0\\)"),
        (change("texts", ["a", "b"]), "'texts' is a list; expected a tensor"),
    ],
)
def test_a_malformed_batch_names_what_is_wrong(batch: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        pack(batch)


def test_a_missing_field_names_those_that_are_there() -> None:
    _, batch = make([4, 3])
    with pytest.raises(BatchError, match="no field 'values', only advantages, loss_mask, rewards"):
        pack(batch)["values"]
