"""bfloat16 compute over float32 masters, recompute policies and compilation: the same training, cheaper."""

from __future__ import annotations

import copy
import gc
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from archon.engine.batch import PackedBatch, pack
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.parallel.compile import apply_compile
from archon.parallel.fsdp import local_tensor
from archon.parallel.phase import phase_listener
from archon.schema.errors import ConfigError
from tests.engine.tiny import LENGTHS, assert_gradients_close, engine_gradients, make_engine, sft_batch
from tests.tolerances import BF16_COMPUTE, FORMULA_FP32, REORDER_FP32

SFT = CrossEntropyLoss()
PLAIN_SFT = SFT.__call__  # a bare function, so that the head gives logprobs one by one
RECOMPUTE: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "selective", "selective": "op"},
    {"mode": "selective", "selective": 2},
    {"mode": "selective", "selective": "first 1"},
]


def name_of(policy: dict[str, Any]) -> str:
    return "-".join(map(str, policy.values()))


class LiveStorages(TorchDispatchMode):
    """Remembers every storage that operators make, so that those still alive can be added up."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes_alive(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def kept_bytes(engine: ArchonEngine, batch: dict[str, Tensor]) -> int:
    """Bytes alive between forward and backward that were not alive before."""
    storages, kept = LiveStorages(), []

    def measure(part: str) -> AbstractContextManager[Any]:
        if part == "backward":
            gc.collect()
            kept.append(storages.bytes_alive())
        return storages if part == "forward" else nullcontext()

    with phase_listener(measure):
        engine.gradients(batch, SFT, loss_token_count)
    assert len(kept) == 1  # one micro-batch
    return kept[0]


def test_bf16_compute_keeps_fp32_masters(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16", optimizer={"lr": 1e-4, "weight_decay": 0.0})
    seen = []
    for block in engine.model.layers.values():
        block.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    norm = local_tensor(engine.model.norm.weight.detach())

    for _ in range(10):
        engine.train_batch(sft_batch(), SFT, loss_token_count)

    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    for name, tensor in engine.state_dict()["model"].items():
        assert tensor.dtype == torch.float32, name
    assert engine.optimizer is not None
    for moments in engine.optimizer.state.values():
        assert {value.dtype for value in moments.values()} == {torch.float32}
    # Ten steps of 1e-4 from 1.0: each is lost in bfloat16, whose next number below 1 is 0.004 away.
    moved = (norm - 1).abs()
    assert 5e-4 < moved.max() < 2e-3
    assert torch.equal(norm.bfloat16(), torch.ones_like(norm).bfloat16())


def test_bf16_gradients_are_those_of_a_bf16_copy_of_the_masters(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16")
    narrow = make_engine(tmp_path).model.bfloat16()
    mb = pack(sft_batch())
    out = narrow(mb.tokens, mb.positions, mb.cu_seqlens, mb.max_seqlen, labels=mb.loss_labels())
    (-out.logprobs.sum() / loss_token_count(mb)).backward()

    _, grads = engine_gradients(engine, sft_batch(), PLAIN_SFT, loss_token_count)

    for name, parameter in narrow.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name], parameter.grad.float()), name


def test_bf16_compute_does_not_narrow_the_weights_of_a_loss(tmp_path: Path) -> None:
    class Heavier(CrossEntropyLoss):
        def token_weights(self, mb: PackedBatch) -> Tensor:
            return super().token_weights(mb) * 1.001  # 1.0 in bfloat16

    engine = make_engine(tmp_path, dtype="bfloat16")
    plain, heavier = (engine.eval_batch(sft_batch(), loss, loss_token_count)["loss"] for loss in (SFT, Heavier()))
    assert heavier / plain == pytest.approx(1.001, rel=FORMULA_FP32)


def test_bf16_gradients_of_micro_batches_are_added_up_in_fp32(tmp_path: Path) -> None:
    """Sixteen equal micro-batches: sums in bfloat16 would have lost a fifth of the bits on the way."""
    engine = make_engine(tmp_path, dtype="bfloat16")
    one = sft_batch([9, 9])
    many = {name: x.repeat(16, 1) for name, x in one.items()}
    _, single = engine_gradients(engine, one, SFT, loss_token_count, max_tokens=18)
    _, summed = engine_gradients(engine, many, SFT, loss_token_count, max_tokens=18)
    assert_gradients_close(summed, single, REORDER_FP32)


def test_gradients_reduced_once_or_every_micro_batch_are_the_same(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16")
    once = engine_gradients(engine, sft_batch(), SFT, loss_token_count, max_tokens=21)
    every = engine_gradients(engine, sft_batch(), SFT, loss_token_count, max_tokens=21, reduce_every=True)
    assert once[0] == every[0]
    assert_gradients_close(every[1], once[1], REORDER_FP32)


@pytest.mark.parametrize("reduction", ["per_step", "per_microbatch"])
def test_gradient_reduction_is_what_the_config_says(
    tmp_path: Path, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import archon.engine.train_step

    calls: list[bool] = []
    monkeypatch.setattr(
        archon.engine.train_step, "set_gradient_reduction", lambda model, enabled: calls.append(enabled)
    )
    engine = make_engine(tmp_path, dtype="bfloat16", gradient_reduction=reduction, max_tokens_per_mb=21)
    engine.train_batch(sft_batch(), SFT, loss_token_count)
    assert len(calls) == 3
    assert calls == [reduction == "per_microbatch"] * 2 + [True]


def test_an_evaluation_engine_holds_the_compute_dtype_and_does_not_train(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16", optimizer=None)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert not any(isinstance(p, DTensor) for p in engine.model.parameters())
    assert torch.isfinite(engine.forward_batch(sft_batch())).all()
    with pytest.raises(ConfigError, match="configured without an optimizer"):
        engine.train_batch(sft_batch(), SFT, loss_token_count)


def test_parameters_are_the_masters_again_after_a_forward_without_backward(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16")
    for call in (
        lambda: engine.forward_batch(sft_batch()),
        lambda: engine.eval_batch(sft_batch(), SFT, loss_token_count),
    ):
        call()
        assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}


@pytest.mark.parametrize("policy", RECOMPUTE, ids=name_of)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recompute_policies_give_the_same_gradients(tmp_path: Path, policy: dict[str, Any], dtype: str) -> None:
    plain = make_engine(tmp_path, dtype=dtype)
    engine = make_engine(tmp_path, dtype=dtype, activation_checkpoint=policy)
    assert [n for n, _ in engine.model.named_modules()] == [n for n, _ in plain.model.named_modules()]
    for lengths in (LENGTHS, [150, 9]):  # short documents and long ones attend by different kernels
        batch = sft_batch(lengths)
        expected, grads = engine_gradients(plain, batch, SFT, loss_token_count, max_tokens=160)
        loss, actual = engine_gradients(engine, batch, SFT, loss_token_count, max_tokens=160)
        assert loss == expected
        assert all(torch.equal(actual[name], grads[name]) for name in grads)


def test_each_recompute_policy_keeps_less_than_the_one_before(tmp_path: Path) -> None:
    sizes = {"none": kept_bytes(make_engine(tmp_path), sft_batch())}
    for policy in RECOMPUTE:
        engine = make_engine(tmp_path, activation_checkpoint=policy)
        sizes[name_of(policy)] = kept_bytes(engine, sft_batch())
    assert sizes["full"] < sizes["selective-op"] < sizes["none"]
    assert sizes["full"] < sizes["selective-2"] < sizes["none"]  # one layer of three recomputes
    assert sizes["selective-first 1"] == sizes["selective-2"]


def test_selective_by_op_does_not_run_matrix_products_and_attention_again(tmp_path: Path) -> None:
    """Counted: mm and attention of forward and backward are as many as without recompute; `full` runs more."""

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.products, self.attentions = 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            self.products += name in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
            self.attentions += name == "aten._scaled_dot_product_flash_attention_for_cpu.default"
            return func(*args, **(kwargs or {}))

    counts = {}
    for policy in ({"mode": "none"}, {"mode": "selective"}, {"mode": "full"}):
        engine = make_engine(tmp_path, activation_checkpoint=policy)
        with Counter() as counter:
            engine_gradients(engine, sft_batch(), SFT, loss_token_count)
        counts[policy["mode"]] = (counter.products, counter.attentions)
    assert counts["selective"] == counts["none"]
    assert counts["full"][0] > counts["none"][0] and counts["full"][1] == 2 * counts["none"][1]


def test_memory_budget_needs_compile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_budget needs torch\.compile, which is off"):
        make_engine(tmp_path, activation_checkpoint={"mode": "memory_budget"})


def compiled_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, dtype: str, policy: dict[str, Any]
) -> ArchonEngine:
    import archon.parallel.decoder

    def with_backend(layers: Any, memory_budget: float | None) -> None:
        apply_compile(layers, memory_budget=memory_budget, backend=backend)

    monkeypatch.setattr(archon.parallel.decoder, "apply_compile", with_backend)
    torch._dynamo.reset()
    counters.clear()
    return make_engine(tmp_path, dtype=dtype, activation_checkpoint=policy, compile=True, hf={"num_hidden_layers": 10})


def check_compiled(engine: ArchonEngine, plain: ArchonEngine) -> None:
    """The same gradients over ragged batches, from one compilation for ten layers and all batches."""
    for lengths in ([13, 5, 5, 2], [7, 130], [3] * 9, [2, 2, 40]):
        batch = sft_batch(lengths, seed=len(lengths))
        expected, grads = engine_gradients(plain, batch, SFT, loss_token_count, max_tokens=160)
        loss, actual = engine_gradients(engine, batch, SFT, loss_token_count, max_tokens=160)
        if engine.config.dtype == "float32":
            assert loss == pytest.approx(expected, rel=REORDER_FP32)
            assert_gradients_close(actual, grads, REORDER_FP32)
        else:
            actual_flat, expected_flat = (torch.cat([g[name].flatten() for name in grads]) for g in (actual, grads))
            assert (actual_flat - expected_flat).norm() <= BF16_COMPUTE * expected_flat.norm()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        pytest.param("float32", {"mode": "selective"}, marks=pytest.mark.slow),
        pytest.param("float32", {"mode": "none"}, marks=pytest.mark.slow),
        pytest.param("bfloat16", {"mode": "full"}, marks=pytest.mark.slow),
    ],
    ids=["float32-selective", "float32-none", "bfloat16-full"],
)
def test_compiled_blocks_give_the_same_gradients_without_recompiling_for_ragged_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, policy: dict[str, Any]
) -> None:
    plain = make_engine(tmp_path, dtype=dtype, hf={"num_hidden_layers": 10})
    check_compiled(compiled_engine(tmp_path, monkeypatch, "aot_eager", dtype, policy), plain)


@pytest.mark.slow
def test_sizes_that_only_the_first_batch_has_in_common_are_not_compiled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = compiled_engine(tmp_path, monkeypatch, "aot_eager", "float32", {"mode": "none"})
    compiled = []
    features, pairs = engine.args.dim, engine.args.head_dim // 2
    for lengths in ([features // pairs] * pairs, [7, 13], [3] * 9):
        engine.train_batch(sft_batch(lengths), SFT, loss_token_count)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [1, 1, 1]
    assert torch.fx.experimental._config.use_duck_shape


def saved_bytes(engine: ArchonEngine, batch: dict[str, Tensor]) -> int:
    """Bytes that autograd saves for the backward, compiled blocks included; parameters and all."""
    saved: dict[int, int] = {}

    def remember(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def remember_in_forward(part: str) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(remember, lambda x: x) if part == "forward" else nullcontext()

    with phase_listener(remember_in_forward):
        engine.gradients(batch, SFT, loss_token_count)
    return sum(saved.values())


@pytest.mark.slow
def test_inductor_and_its_memory_budget_give_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine(tmp_path, hf={"num_hidden_layers": 10})
    saved = {}
    for budget in (None, 0.05):
        policy = {"mode": "none"} if budget is None else {"mode": "memory_budget", "memory_budget": budget}
        engine = compiled_engine(tmp_path, monkeypatch, "inductor", "float32", policy)
        check_compiled(engine, plain)
        saved[budget] = saved_bytes(engine, sft_batch([40, 20]))
    parameters = sum(p.nbytes for p in plain.model.parameters())
    assert saved[0.05] - parameters < 0.5 * (saved[None] - parameters)


def test_a_copy_of_a_recomputing_model_is_independent(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, activation_checkpoint={"mode": "full"})
    twin = copy.deepcopy(engine.model)
    with torch.no_grad():
        for p in engine.model.parameters():
            p.zero_()
    tokens, ends = torch.arange(5), torch.tensor([0, 5], dtype=torch.int32)
    assert twin(tokens, torch.arange(5), ends, 5).abs().max() > 0


EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": 112, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fp8", ["none", "rowwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_experts_have_the_gradient_of_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, fp8: str
) -> None:
    """Also where torch's compiler refuses their products, which then run as they are."""
    import archon.parallel.decoder

    def with_aot_eager(layers: Any, memory_budget: float | None) -> None:
        apply_compile(layers, memory_budget=memory_budget, backend="aot_eager")

    monkeypatch.setattr(archon.parallel.decoder, "apply_compile", with_aot_eager)
    torch._dynamo.reset()
    gradients = []
    for chosen in (True, False):
        engine = make_engine(tmp_path, hf=EXPERTS, dtype=dtype, fp8=fp8, compile=chosen)
        _, grads = engine_gradients(engine, sft_batch(), SFT, loss_token_count)
        gradients.append(torch.cat([grads[name].flatten() for name in sorted(grads)]))
    # A number that rounds otherwise to 8 bits than its equal does is 6e-2 away from it, and not 4e-3.
    rounding = BF16_COMPUTE if fp8 == "none" else 3 * BF16_COMPUTE
    assert (gradients[0] - gradients[1]).norm() <= (REORDER_FP32 if dtype == "float32" else rounding) * gradients[
        1
    ].norm()
