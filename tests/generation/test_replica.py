"""The generator's weights: copied or shared, accounted for by name, proven by a fingerprint."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from archon.generation import InProcessEngine, fingerprint
from archon.generation.replica import build_replica, copy_weights, join_projections, named_weights
from archon.generation.types import GeneratorConfig
from archon.models import BaseArchonModel
from archon.models.layers.attention import Attention
from archon.models.layers.feed_forward import FeedForward
from archon.models.layers.linear import project
from archon.models.layers.moe import expert_biases
from archon.parallel.dims import ensure_process_group
from archon.schema.errors import RolloutError
from tests.generation.models import make_engine, make_model, prompts, request, trainer_logprobs
from tests.tolerances import GENERATED_LOGPROB_FP64, PARITY_FP32


def clone(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def fresh(source: BaseArchonModel) -> BaseArchonModel:
    """The same weights in a model that a test may change."""
    model = type(source)(source.args).to(source.norm.weight.dtype)
    model.load_state_dict(source.state_dict())
    return model


def storages(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_a_snapshot_holds_the_weights_and_not_the_tensors(family: str) -> None:
    model = make_model(family=family)
    replica, shared = build_replica(model, mode="snapshot")
    assert not shared
    assert list(storages(replica)) == list(storages(model))
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(replica.named_parameters())[name], parameter)
        assert storages(replica)[name] != parameter.data_ptr()
    assert not replica.training


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_weights_are_shared_where_dtypes_match_and_the_model_is_not_wrapped(family: str) -> None:
    model = make_model(family=family)
    replica, shared = build_replica(model)
    assert shared
    assert storages(replica) == storages(model)
    assert not any(parameter.requires_grad for parameter in replica.parameters())
    assert not build_replica(model, dtype=torch.bfloat16)[1]
    with pytest.raises(RolloutError, match="or of another dtype"):
        build_replica(model, mode="alias", dtype=torch.bfloat16)


def test_a_narrower_replica_keeps_decays_in_float32() -> None:
    """Rounded to bfloat16, a decay of a long document is another one: it is a product over its tokens."""
    model = fresh(make_model(family="qwen3_5_text"))
    wide = {name for name, _ in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    assert wide == model.full_precision_names() and len(wide) == 4
    replica, shared = build_replica(model, dtype=torch.bfloat16)
    assert not shared
    for update in range(2):
        if update:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.123)
            copy_weights(replica, model)
        trained = dict(model.named_parameters())
        for name, parameter in replica.named_parameters():
            assert parameter.dtype == (torch.float32 if name in wide else torch.bfloat16)
            assert torch.equal(parameter, trained[name].to(parameter.dtype)), name
        assert not any(torch.equal(trained[name].bfloat16().float(), trained[name]) for name in wide if "A_log" in name)
    assert build_replica(fresh(make_model(torch.float64, "qwen3_5_text")), dtype=torch.float64)[1]
    assert build_replica(fresh(model).to(torch.bfloat16), dtype=torch.bfloat16)[1]


def test_a_replica_is_of_the_class_the_model_was_built_as() -> None:
    """Also where `fully_shard` has put one of its own in front, and whatever the class is called."""
    source = make_model()
    own = type("FSDPFriendlyModel", (type(source),), {})
    model = own(source.args)
    model.load_state_dict(source.state_dict())
    model.to(source.norm.weight.dtype)
    ensure_process_group("cpu")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert type(model) is not own
    for source_of_weights in (None, source.named_parameters()):
        assert type(build_replica(model, source=source_of_weights)[0]) is own
    assert fingerprint(build_replica(model)[0]) == fingerprint(source)


def test_a_wrapped_model_is_copied_and_never_run() -> None:
    model = fresh(make_model())
    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    model.layers["1"].forward = None
    replica, shared = build_replica(model)
    assert not shared
    assert fingerprint(replica) == fingerprint(model) == fingerprint(make_model())
    wanted = request(prompts(6)[0], seed=2, max_new_tokens=8)
    (one,), (other,) = (make_engine(m).generate([wanted]) for m in (model, make_model()))
    assert one.output_tokens == other.output_tokens


@pytest.mark.parametrize("mode", ["alias", "snapshot"])
def test_an_update_changes_the_answers(mode: Any) -> None:
    model = fresh(make_model())
    engine = make_engine(model, weights=mode)
    wanted = request(prompts(6)[0], seed=2, max_new_tokens=12)
    (before,) = engine.generate([wanted])
    with torch.no_grad():
        for parameter in model.parameters():
            # A trainer that moves its weights away and back has other tensors afterwards.
            parameter.data = parameter.data * 1.3
    engine.update_weights(model)
    (after,) = engine.generate([wanted])
    assert before.output_tokens != after.output_tokens
    assert set(after.output_versions) == {1}
    assert engine.fingerprint == fingerprint(model)
    assert (storages(engine._generator.model) == storages(model)) == (mode == "alias")


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("mode", ["alias", "snapshot"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_step_reaches_the_generator(mode: Any, fused: bool, family: str) -> None:
    """A fused optimizer writes weights in place and leaves no trace of it in their version counters."""
    model = fresh(make_model(family=family))
    engine = make_engine(model, weights=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    engine.update_weights(model)
    wanted = request(prompts(6)[0], seed=2, max_new_tokens=12)
    (pushed,), (made,) = (e.generate([wanted]) for e in (engine, make_engine(model)))
    assert pushed.output_tokens == made.output_tokens
    assert pushed.output_logprobs == made.output_logprobs


@pytest.mark.parametrize("mode", ["alias", "snapshot"])
def test_balancing_biases_are_weights_too(mode: Any) -> None:
    """Without them the generator would send tokens to other experts than the trainer does."""
    source = make_model(torch.float64, "qwen3_moe")
    model = type(source)(dataclasses.replace(source.args, balance_by_bias=True)).double()
    assert model.load_state_dict(source.state_dict(), strict=False).missing_keys == list(expert_biases(model))
    for bias in expert_biases(model).values():
        bias += torch.linspace(0.5, -0.5, len(bias), dtype=bias.dtype)
    engine = make_engine(model, weights=mode)
    wanted = request(prompts(6)[0], seed=2, max_new_tokens=12)

    def check() -> list[float]:
        (answer,) = engine.generate([wanted])
        trained = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        torch.testing.assert_close(given, trained, rtol=0, atol=GENERATED_LOGPROB_FP64)
        assert engine.fingerprint == fingerprint(model)
        return answer.output_logprobs

    before = check()
    for bias in expert_biases(model).values():
        bias.neg_()
    engine.update_weights(model)
    assert check() != before
    weights = [*model.named_parameters(), *expert_biases(model).items()]
    engine.update_weights((name, tensor.clone()) for name, tensor in weights)
    check()
    kept = {name: bias.clone() for name, bias in expert_biases(model).items()}
    engine.update_weights((name, torch.zeros_like(t) if name in kept else t) for name, t in weights)
    assert all(torch.equal(bias, kept[name]) for name, bias in expert_biases(model).items())
    with pytest.raises(RolloutError, match=r"2 weights are missing, for example 'layers.0.moe.router.expert_bias'"):
        engine.update_weights(model.named_parameters())


def test_weights_from_an_iterator_never_end_up_in_the_trainer() -> None:
    model = fresh(make_model())
    engine = make_engine(model, weights="alias")
    before = fingerprint(model)
    engine.update_weights((name, parameter * 2) for name, parameter in model.named_parameters())
    assert fingerprint(model) == before != engine.fingerprint


def test_shared_weights_of_another_model_are_refused() -> None:
    engine = make_engine(weights="alias")
    with pytest.raises(RolloutError, match="only one side has 'layers"):
        engine.update_weights(make_model(family="qwen2"))
    with pytest.raises(RolloutError, match=r"expected \(\d+, 24\) torch.float32 on cpu"):
        engine.update_weights(make_model(hidden_size=32))


def test_linears_of_the_replica_compute_what_the_model_computes() -> None:
    """The replica's faster product, with and without bias, and on a slice of rows."""
    model = make_model(family="qwen2")
    replica, _ = build_replica(model)
    x = torch.randn(9, 24)
    for name in ("layers.0.attention.wq", "layers.0.feed_forward.w1", "output"):
        wanted = model.get_submodule(name)(x[2:7])
        torch.testing.assert_close(replica.get_submodule(name)(x[2:7]), wanted, rtol=0, atol=PARITY_FP32)


def test_a_replica_of_another_dtype_has_the_fingerprint_of_the_cast_weights() -> None:
    model = make_model()
    replica, _ = build_replica(model, dtype=torch.bfloat16)
    cast = [(name, parameter.bfloat16()) for name, parameter in model.named_parameters()]
    assert fingerprint(replica) == fingerprint(cast) != fingerprint(model)


def test_wrapped_names_are_understood() -> None:
    model = make_model()
    replica, _ = build_replica(model, mode="snapshot")
    wrapped = [
        (name.replace("layers.0.", "layers.0._checkpoint_wrapped_module._orig_mod."), p)
        for name, p in model.named_parameters()
    ]
    assert copy_weights(replica, wrapped)[0] == fingerprint(model)


def test_every_weight_is_accounted_for_by_name() -> None:
    model = make_model()
    weights = clone(model)
    name = "layers.1.attention.wk.weight"

    def update(changed: dict[str, torch.Tensor] | list[tuple[str, torch.Tensor]]) -> None:
        copy_weights(
            build_replica(model, mode="snapshot")[0], changed.items() if isinstance(changed, dict) else changed
        )

    with pytest.raises(RolloutError, match=f"1 weights are missing, for example '{name}'"):
        update({key: value for key, value in weights.items() if key != name})
    with pytest.raises(RolloutError, match=r"'layers\.9\.x' is unknown to the generator"):
        update(weights | {"layers.9.x": torch.zeros(1)})
    with pytest.raises(RolloutError, match=f"'{name}' is sent twice"):
        update([*weights.items(), (name, weights[name])])
    with pytest.raises(RolloutError, match=rf"'{name}' is \(24, 16\), expected \(16, 24\)"):
        update(weights | {name: weights[name].t()})


def test_a_fingerprint_sees_every_change_and_no_storage() -> None:
    model = make_model()
    weights = clone(model)
    reference = fingerprint(weights.items())
    assert fingerprint(model) == reference
    name = "layers.0.feed_forward.w1.weight"
    weight = weights[name]
    assert fingerprint((weights | {name: weight.t().contiguous().t()}).items()) == reference
    one_bit = weight.clone()
    one_bit.view(torch.int32)[3, 4] ^= 1
    changes = {
        "one bit": one_bit,
        "two rows swapped": weight[[1, 0, *range(2, len(weight))]],
        "two columns swapped": weight[:, [1, 0, *range(2, weight.shape[1])]],
        "a sign": torch.where(torch.arange(weight.shape[1]) == 2, -weight, weight),
    }
    for change, tensor in changes.items():
        assert fingerprint((weights | {name: tensor}).items()) != reference, change
    swapped = weights | {name: weights["layers.1.feed_forward.w1.weight"], "layers.1.feed_forward.w1.weight": weight}
    assert fingerprint(swapped.items()) != reference, "two weights swapped"
    one, other = torch.randn(2, 3), torch.randn(2, 3)
    pair = [("layers.12.w", one), ("layers.21.w", other)]
    assert fingerprint(pair) != fingerprint([("layers.12.w", other), ("layers.21.w", one)]), "names of the same letters"


def test_a_replica_that_cannot_fit_is_refused_with_the_estimate() -> None:
    with pytest.raises(
        RolloutError, match=r"does not fit: 0\.00 GiB of weights and [\d.]+ GiB of cache \(1000000000 pages"
    ):
        make_engine(n_pages=10**9)
    with pytest.raises(RolloutError, match="the key-value cache has no page"):
        make_engine(n_pages=None, cache_bytes=10)


def test_the_default_cache_holds_what_the_slots_may_need() -> None:
    engine = make_engine(n_pages=None, max_slots=3, max_seq_len=30, page_size=4)
    assert engine._generator.cache.n_pages == 3 * 8


def test_a_run_and_a_call_by_hand_have_the_same_defaults() -> None:
    by_hand = inspect.signature(InProcessEngine.from_model).parameters
    defaults = GeneratorConfig().model_dump()
    shared = by_hand.keys() & defaults.keys()
    assert shared == {"max_slots", "page_size", "max_seq_len", "prefill_tokens"}
    assert {name: by_hand[name].default for name in shared} == {name: defaults[name] for name in shared}


def test_a_replica_of_no_known_kind_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"dtype is torch\.int8; expected"):
        make_engine(dtype=torch.int8)
    with pytest.raises(RolloutError, match="weights is 'share'; expected one of"):
        make_engine(weights="share")


def test_a_critic_cannot_generate() -> None:
    model = make_model()
    args = type(model.args)(**{**vars(model.args), "is_critic": True})
    with pytest.raises(RolloutError, match="the model is a critic, which has no language-model head"):
        make_engine(type(model)(args))


@pytest.mark.parametrize("name", ["max_slots", "page_size", "prefill_tokens"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(RolloutError, match=f"{name} is 0; expected at least 1"):
        make_engine(**{name: 0})


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss", "starcoder2"])
def test_layers_with_one_input_are_one_product(family: str) -> None:
    """Their biases too, which fresh models have at 0."""
    model = make_model(family=family)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    replica, _ = build_replica(model)
    x = torch.randn(3, model.args.dim)
    modules = [block.attention for block in replica.layers.values()]
    modules += [block.feed_forward for block in replica.layers.values() if block.feed_forward is not None]
    for module in modules:
        layers = module.input_projections()
        assert len(layers) == 1 or layers[0].joint is not None
        with torch.inference_mode():
            together = project(x, layers, None)
            apart = [nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]
        for got, expected in zip(together, apart, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=PARITY_FP32 * float(expected.abs().max()))
        if isinstance(module, FeedForward):
            with torch.inference_mode():
                assert module(x).shape == x.shape


@pytest.mark.parametrize("family", ["qwen2", "gpt_oss", "qwen3_next"])
def test_joined_projections_follow_updates(family: str) -> None:
    """As on CUDA, where a decode step then has fewer matmuls; weights keep their names and shapes."""
    model = make_model(torch.float64, family)
    replica, _ = build_replica(model, mode="snapshot")
    join_projections(replica)
    update = {name: torch.randn_like(x) for name, x in named_weights(model)}
    copy_weights(replica, iter(update.items()))
    x = torch.randn(3, model.args.dim, dtype=torch.float64)
    for module in replica.modules():
        if isinstance(module, Attention | FeedForward):
            layers = module.input_projections()
            assert layers[0].joint is not None
            for got, layer in zip(project(x, layers, None), layers, strict=True):
                expected = nn.functional.linear(x, layer.weight, layer.bias)
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
