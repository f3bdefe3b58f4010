"""The contract of a model: names, shapes, actor and critic, tying, dtypes, fresh weights, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForSequenceClassification

from archon.models import RopeConfig, TokenScores, WeightedLoss
from archon.models.qwen2 import Qwen2Model, Qwen2ModelArgs
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import build_pair, pack, random_config, reference_logits, relative_error
from tests.tolerances import BF16_COMPUTE, FORMULA_FP64, HEAD_FP32, PARITY_FP32

LENGTHS = [5, 1, 150, 8]
SIZES: dict[str, Any] = {
    "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 24, "vocab_size": 31
}  # fmt: skip


def build(model_class: type = Qwen3Model, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    args_class = Qwen3ModelArgs if model_class is Qwen3Model else Qwen2ModelArgs
    model = model_class(args_class(**(SIZES | {"initializer_range": 0.2} | changes))).to(dtype)
    model.init_weights()
    return model


def packed() -> tuple[Tensor, Tensor, Tensor, int]:
    return pack(LENGTHS, 31, 0)


BLOCK = ["attention_norm.weight", "ffn_norm.weight"] + [
    f"{module}.weight" for module in ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
] + [f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")]  # fmt: skip


@pytest.mark.parametrize(
    ("model_class", "changes", "extra"),
    [
        (Qwen2Model, {}, ["attention.wq.bias", "attention.wk.bias", "attention.wv.bias"]),
        (Qwen3Model, {}, ["attention.q_norm.weight", "attention.k_norm.weight"]),
        (
            Qwen3Model,
            {"attention_bias": True},
            ["attention.q_norm.weight", "attention.k_norm.weight"]
            + [f"attention.{w}.bias" for w in ("wq", "wk", "wv", "wo")],
        ),
    ],
)
def test_parameters_are_named_by_the_contract(model_class: type, changes: dict[str, Any], extra: list[str]) -> None:
    outer = ["tok_embeddings.weight", "norm.weight"]
    inner = [f"layers.{i}.{name}" for i in range(2) for name in BLOCK + extra]
    actor, tied, critic = (
        build(model_class, **changes, **kind) for kind in ({}, {"tie_word_embeddings": True}, {"is_critic": True})
    )
    assert {name for name, _ in actor.named_parameters()} == {*outer, *inner, "output.weight"}
    assert {name for name, _ in tied.named_parameters()} == {*outer, *inner}
    assert {name for name, _ in critic.named_parameters()} == {*outer, *inner, "score.weight"}
    assert isinstance(actor.layers, nn.ModuleDict)
    assert list(actor.layers) == ["0", "1"]
    assert not list(actor.buffers())


def test_shapes_with_and_without_a_batch_axis() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(), packed()
    logits = model(tokens, positions, cu_seqlens, longest)
    assert logits.shape == (164, 31)
    batched = model(tokens[None], positions[None], cu_seqlens, longest)
    assert torch.equal(batched, logits[None])

    scores = model(tokens, positions, cu_seqlens, longest, labels=tokens, temperature=0.9)
    assert isinstance(scores, TokenScores)
    again = model(tokens[None], positions[None], cu_seqlens, longest, labels=tokens[None], temperature=0.9)
    assert all(torch.equal(a, b[None]) for a, b in zip(again, scores, strict=True))

    weights = torch.rand(164, dtype=torch.float64)
    loss = model(tokens[None], positions[None], cu_seqlens, longest, labels=tokens[None], loss_weights=weights[None])
    assert isinstance(loss, WeightedLoss)
    torch.testing.assert_close(
        loss.loss, -(model(tokens, positions, cu_seqlens, longest, labels=tokens).logprobs * weights).sum()
    )
    assert loss.logprobs.shape == (1, 164)
    with pytest.raises(ValueError, match=r"positions have shape \(2, 82\)"):
        model(tokens.view(2, 82), positions.view(2, 82), cu_seqlens, longest)


def test_scores_are_the_log_softmax_of_the_logits() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(), packed()
    logp = (model(tokens, positions, cu_seqlens, longest) / 0.7).log_softmax(-1)
    scores = model(tokens, positions, cu_seqlens, longest, labels=tokens, temperature=0.7)
    torch.testing.assert_close(scores.logprobs, logp.gather(1, tokens[:, None])[:, 0], rtol=0, atol=FORMULA_FP64)
    torch.testing.assert_close(scores.entropy, -(logp.exp() * logp).sum(1), rtol=0, atol=FORMULA_FP64)


def test_a_critic_gives_a_value_for_each_token() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(is_critic=True, dtype=torch.float32), packed()
    values = model(tokens, positions, cu_seqlens, longest)
    assert values.shape == (164,)
    assert torch.equal(model(tokens[None], positions[None], cu_seqlens, longest), values[None])
    assert model.to(torch.bfloat16)(tokens, positions, cu_seqlens, longest).dtype == torch.float32


def test_a_critics_values_and_gradients_equal_transformers() -> None:
    config = random_config(7, "qwen3")
    config.num_labels = 1
    # transformers scores the last token that is no padding; without a padding token, that of a single sequence.
    config.pad_token_id = None
    reference = Qwen3ForSequenceClassification(config)
    adapter = Qwen3StateDictAdapter(config, is_critic=True)
    model = Qwen3Model(adapter.args)
    model.load_state_dict(adapter.from_hf(dict(reference.named_parameters())))
    tokens, positions, cu_seqlens, longest = pack([5, 9], config.vocab_size, 0)
    values = model(tokens, positions, cu_seqlens, longest)[[4, 13]]
    expected = torch.cat(
        [reference(input_ids=document[None], use_cache=False).logits[0] for document in tokens.split([5, 9])]
    )
    assert relative_error(values, expected) <= PARITY_FP32
    weight = torch.tensor([1.0, -2.0])
    (values * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in reference.named_parameters():
        ours = model.get_parameter(adapter.hf_to_native(name)[0].name)
        assert relative_error(ours.grad, parameter.grad) <= PARITY_FP32, name


def test_the_padding_token_gets_no_gradient_from_its_embedding_as_in_transformers() -> None:
    config = random_config(
        UNTIED := next(s for s in range(40) if not random_config(s, "qwen3").tie_word_embeddings),
        "qwen3",
    )
    config.pad_token_id = 3
    reference, model, _ = build_pair(config, seed=UNTIED)
    tokens, positions, cu_seqlens, longest = pack([9, 20], config.vocab_size, 0)
    tokens[::4] = 3
    model(tokens, positions, cu_seqlens, longest).sum().backward()
    reference_logits(reference, tokens, [9, 20]).sum().backward()
    assert model.tok_embeddings.weight.grad[3].abs().max() == 0
    assert relative_error(model.tok_embeddings.weight.grad, reference.model.embed_tokens.weight.grad) <= PARITY_FP32


def test_tied_weights_are_one_parameter_with_both_gradients() -> None:
    tied, (tokens, positions, cu_seqlens, longest) = build(tie_word_embeddings=True), packed()
    assert tied.output.weight is tied.tok_embeddings.weight
    apart = build()
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        model(tokens, positions, cu_seqlens, longest, labels=tokens, entropy=False).logprobs.sum().backward()
    both = apart.tok_embeddings.weight.grad + apart.output.weight.grad
    assert relative_error(tied.tok_embeddings.weight.grad, both) <= FORMULA_FP64


def test_documents_are_independent_of_their_neighbours_and_order() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(sliding_window=4), packed()
    logits = model(tokens, positions, cu_seqlens, longest)
    for document, rows in zip(tokens.split(LENGTHS), logits.split(LENGTHS), strict=True):
        alone = model(
            document, torch.arange(len(document)), torch.tensor([0, len(document)], dtype=torch.int32), len(document)
        )
        torch.testing.assert_close(alone, rows, rtol=0, atol=FORMULA_FP64)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_many_short_documents_are_computed_as_each_alone(kind: Any) -> None:
    rope = RopeConfig(kind, factor=None if kind == "default" else 3.0)
    model, lengths = build(sliding_window=4, rope_scaling=rope, max_seq_len=6), [3, 7, 5, 3, 0, 9] * 6 + [7, 9, 3]
    tokens, positions, cu_seqlens, longest = pack(lengths, 31, 0)
    logits = model(tokens, positions, cu_seqlens, longest)
    alone = [
        model(document, torch.arange(len(document)), torch.tensor([0, len(document)], dtype=torch.int32), len(document))
        for document in tokens.split(lengths)
        if len(document)
    ]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=0, atol=FORMULA_FP64)
    weight = torch.randn_like(logits)
    gradients = [torch.autograd.grad((x * weight).sum(), list(model.parameters())) for x in (logits, torch.cat(alone))]
    for ours, theirs in zip(*gradients, strict=True):
        assert relative_error(ours, theirs) <= FORMULA_FP64

    with pytest.raises(ValueError, match=f"documents have {sum(lengths)} tokens, but the input has {sum(lengths) - 1}"):
        model(tokens[1:], positions[1:], cu_seqlens, longest)


def test_a_float64_model_is_float64_throughout() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(), packed()
    single = build(dtype=torch.float32)
    single.load_state_dict(model.state_dict())
    scores = model(tokens, positions, cu_seqlens, longest, labels=tokens)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float64
    nudged = build()
    nudged.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.mul_(1 + 1e-12)
    change = (nudged(tokens, positions, cu_seqlens, longest, labels=tokens).logprobs - scores.logprobs).abs().max()
    assert 1e-14 < change < 1e-9, "a float32 step in between would swallow the nudge or make noise of 1e-7"
    close = single(tokens, positions, cu_seqlens, longest, labels=tokens).logprobs.double()
    torch.testing.assert_close(close, scores.logprobs, rtol=0, atol=HEAD_FP32)


def test_bfloat16_stays_close_to_float32() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(dtype=torch.float32, initializer_range=0.1), packed()
    exact = model(tokens, positions, cu_seqlens, longest)
    rounded = model.to(torch.bfloat16)(tokens, positions, cu_seqlens, longest)
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded.float(), exact) <= BF16_COMPUTE


def test_fresh_weights_are_hugging_faces() -> None:
    model = build(Qwen2Model, dtype=torch.float32, dim=64, hidden_dim=128, vocab_size=500, initializer_range=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert abs(parameter.std().item() / 0.05 - 1) < 0.1, name
            assert abs(parameter.mean().item()) < 0.005, name


def test_built_on_meta_and_materialised_it_is_the_same_model() -> None:
    rope = random_config(0, "qwen3", rope_kind="longrope")
    args = Qwen3ModelArgs.from_hf_config(rope)
    model = Qwen3Model(args)
    with torch.device("meta"):
        empty = Qwen3Model(args)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    empty.tie_weights()
    empty.init_buffers("cpu")
    empty.load_state_dict(model.state_dict())
    batch = pack([5, 30], rope.vocab_size, 0)
    assert torch.equal(empty(*batch), model(*batch))


def test_a_stage_without_embeddings_or_head_copes() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(), packed()
    expected = model(tokens, positions, cu_seqlens, longest)
    first, last = build(), build()
    first.load_state_dict(model.state_dict())
    last.load_state_dict(model.state_dict())
    del first.layers["1"], last.layers["0"]
    first.norm = first.output = last.tok_embeddings = None
    hidden = first(tokens, positions, cu_seqlens, longest)
    assert hidden.shape == (164, 16)
    assert torch.equal(last(hidden, positions, cu_seqlens, longest), expected)


def test_linear_weights_may_be_transposed_views() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(), packed()
    expected = model(tokens, positions, cu_seqlens, longest, labels=tokens).logprobs
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    actual = model(tokens, positions, cu_seqlens, longest, labels=tokens).logprobs
    torch.testing.assert_close(actual, expected, rtol=0, atol=FORMULA_FP64)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradients() -> None:
    model, (tokens, positions, cu_seqlens, longest) = build(), packed()
    twin = build()
    twin.load_state_dict(model.state_dict())
    for block in twin.layers.values():
        block.compile(backend="aot_eager", dynamic=True)
    for each in (model, twin):
        each(tokens, positions, cu_seqlens, longest, labels=tokens).logprobs.sum().backward()
    for (name, ours), theirs in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) <= FORMULA_FP64, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3}, "n_kv_heads is 2; expected a divisor of n_heads 3"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"attn_type": "eager"}, "attn_type is 'eager'"),
        ({"layer_windows": (1, 2, 3)}, "layer_windows has 3 entries; expected one per layer, 2"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3ModelArgs(**(SIZES | changes))
