"""What documents begin alike with is computed once by the engine, with the same loss, gradient, scores and weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from archon.engine.batch import pack, unpack
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.layers.moe import expert_biases
from archon.parallel.compile import apply_compile
from tests.engine.tiny import VOCAB, make_engine, padded
from tests.tolerances import INVARIANCE_FP64


def answers(prompts: int = 4, per_prompt: int = 5) -> dict[str, Tensor]:
    """Answer of uneven length to prompts of uneven length; the answers are trained."""
    generator = torch.Generator().manual_seed(5)
    docs, masks = [], []
    for index in range(prompts):
        prompt = torch.randint(VOCAB, (6 + 3 * index,), generator=generator)
        for size in torch.randint(1, 9, (per_prompt,), generator=generator).tolist():
            docs.append(torch.cat([prompt, torch.randint(VOCAB, (size,), generator=generator)]))
            masks.append(torch.tensor([0] * len(prompt) + [1] * size))
    return padded(docs, loss_mask=masks)


def rows_of_a_block(engine: ArchonEngine) -> list[int]:
    """The number of rows of the second block in each forward."""
    seen: list[int] = []
    block: Any = engine.model.layers["1"]  # type: ignore[union-attr]
    block.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    return seen


VARIANTS: list[dict[str, Any]] = [
    {},
    {"hf": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}},
    {"is_critic": True},
    {"activation_checkpoint": {"mode": "full"}},
    {"max_tokens_per_mb": 97},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_sharing_changes_nothing_but_the_work(tmp_path: Path, variant: dict[str, Any]) -> None:
    options = {"dtype": "float64", "max_tokens_per_mb": 4096, "optimizer": {"lr": 1e-2}} | variant
    engines = [make_engine(tmp_path / str(share), 9, share_prefixes=share, **options) for share in (True, False)]
    batch, critic = answers(), "is_critic" in variant
    seen = [rows_of_a_block(engine) for engine in engines]
    scores = [engine.forward_batch(batch) for engine in engines]
    torch.testing.assert_close(*scores, rtol=INVARIANCE_FP64, atol=INVARIANCE_FP64)
    left_out = 0 if critic else 10  # last tokens predict none, but a critic values them
    assert seen[0][0] < 0.8 * seen[1][0] - left_out

    def loss(numbers: Tensor, entropy: Tensor | None, mb: Any) -> Any:
        return (numbers.square() * mb["loss_mask"]).sum()

    loss_fn = loss if critic else CrossEntropyLoss()
    metrics = [engine.train_batch(batch, loss_fn, loss_token_count) for engine in engines]
    for name in ("loss", "grad_norm"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=INVARIANCE_FP64)
    for one, other in zip(*(engine.model.parameters() for engine in engines), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def assert_nothing_shared(engine: ArchonEngine) -> None:
    """No micro-batch of `answers` has a prefix tree."""
    parts = engine._split(answers())[1]
    assert parts and all(mb.order.prefixes is None for mb in parts)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}),
        ({}, {"share_prefixes": False}),
    ],
    ids=["frequencies of the document's length", "switched off"],
)
def test_where_it_would_not_be_the_same_nothing_is_shared(
    tmp_path: Path, model: dict[str, Any], config: dict[str, Any]
) -> None:
    engine = make_engine(tmp_path, hf=model, max_tokens_per_mb=4096, **config)
    assert_nothing_shared(engine)


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def test_routers_count_a_beginning_for_each_document(tmp_path: Path) -> None:
    """Biases that balance the load and the balancing loss are those of every token, computed or not."""
    options: dict[str, Any] = {"dtype": "float64", "max_tokens_per_mb": 4096, "optimizer": {"lr": 1e-2}}
    options |= {"router_bias_update_rate": 0.01, "router_aux_loss_coef": 0.1}
    engines = [
        make_engine(tmp_path / str(share), 9, hf=MOE | {"norm_topk_prob": True}, share_prefixes=share, **options)
        for share in (True, False)
    ]
    metrics = [engine.train_batch(answers(), CrossEntropyLoss(), loss_token_count) for engine in engines]
    assert metrics[0].pop("tokens_computed") < 0.8 * metrics[1].pop("tokens_computed")
    assert metrics[0] == pytest.approx(metrics[1], rel=INVARIANCE_FP64)
    counts = [load._counts for engine in engines for load in engine.built.runner.loads]
    assert counts[0] is not None and counts[0].equal(counts[1])
    biases = [list(expert_biases(engine.model).values()) for engine in engines]
    assert biases[0] and all(one.equal(other) and one.any() for one, other in zip(*biases, strict=True))


def test_a_last_token_whose_next_one_is_known_is_computed(tmp_path: Path) -> None:
    """As that of a part of a longer text."""
    options: dict[str, Any] = {"dtype": "float64", "max_tokens_per_mb": 4096}
    engines = [make_engine(tmp_path / str(share), 9, share_prefixes=share, **options) for share in (True, False)]
    packed = pack(answers())
    last = packed.cu_seqlens[1:].long() - 1
    packed.labels[last] = torch.arange(len(last)) % VOCAB
    seen = rows_of_a_block(engines[0])
    shared, whole = (engine.forward_batch(packed) for engine in engines)
    assert seen[0] < packed.n_tokens
    torch.testing.assert_close(shared, whole, rtol=INVARIANCE_FP64, atol=INVARIANCE_FP64)
    assert (shared[last] < 0).all()


@pytest.mark.parametrize("share", [True, False])
def test_a_pack_has_the_scores_of_the_padded_batch(share: bool, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, 9, share_prefixes=share, dtype="float64", max_tokens_per_mb=97)
    batch = answers()
    packed = pack(batch)
    scores = engine.forward_batch(packed)
    expected = engine.forward_batch(batch)
    torch.testing.assert_close(unpack(packed, scores, expected.shape), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_code_is_compiled_once_for_all_beginnings(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with mock.patch("archon.parallel.decoder.apply_compile", partial(apply_compile, backend="aot_eager")):
        options: dict[str, Any] = {"max_tokens_per_mb": 4096, "optimizer": {"lr": 1e-2}}
        engine = make_engine(tmp_path, 9, hf={"num_hidden_layers": 2}, compile=True, **options)
    compiled = []
    for prompts, per_prompt in ((4, 5), (3, 6), (4, 7)):
        metrics = engine.train_batch(answers(prompts, per_prompt), CrossEntropyLoss(), loss_token_count)
        assert metrics["tokens_computed"] < 0.8 * metrics["tokens"]
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled == [compiled[0]] * len(compiled)


def histories(turns: int, branches: int, turn: int) -> dict[str, Tensor]:
    """An agent's turns, each with its whole history, in which every turn was tried `branches` times."""
    generator = torch.Generator().manual_seed(3)
    history, docs, masks = torch.zeros(0, dtype=torch.int64), [], []
    for _ in range(turns):
        tried = [torch.randint(VOCAB, (turn + i,), generator=generator) for i in range(branches)]
        docs += [torch.cat([history, answer]) for answer in tried]
        masks += [torch.tensor([0] * len(history) + [1] * len(answer)) for answer in tried]
        history = docs[-1]
    return padded(docs, loss_mask=masks)


def test_each_turn_of_a_history_is_computed_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float64", "max_tokens_per_mb": 4096, "optimizer": {"lr": 1e-2}}
    engines = [make_engine(tmp_path / str(share), 9, share_prefixes=share, **options) for share in (True, False)]
    batch = histories(8, 2, 20)
    metrics = [engine.train_batch(batch, CrossEntropyLoss(), loss_token_count) for engine in engines]
    # The last tokens of documents that no later turn continues predict nothing and are not computed.
    assert metrics[0].pop("tokens_computed") == 8 * (20 + 21) - 8 - 1
    assert metrics[1].pop("tokens_computed") == batch["attention_mask"].sum()
    assert metrics[0] == pytest.approx(metrics[1], rel=INVARIANCE_FP64)
