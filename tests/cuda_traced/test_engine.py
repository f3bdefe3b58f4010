"""The engine on `device: cuda`: bfloat16 with float32 masters, scores, evaluation and a step without its backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from archon.engine import build, initialize
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models import get_model_spec
from archon.models.layers.fp8 import fp8_grouped_linear, fp8_linear
from archon.parallel.fp8 import Fp8Scaling
from archon.parallel.fsdp import local_tensor, reshard
from archon.parallel.torch_private import FakeTensorMode
from archon.schema.config import EngineConfig
from tests.cuda_traced.models import family_config
from tests.cuda_traced.stand_ins import flash_attention_4, one_gpu, one_process
from tests.cuda_traced.trace import CUDA, CudaTrace, cuda_trace
from tests.distributed.cases import EVEN as EVEN_SIZES
from tests.engine.test_host_waits import scored
from tests.engine.tiny import padded, sft_batch
from tests.models.vision_language import image_rows, vision_language_config

pytestmark = pytest.mark.cuda_traced

SHAPE = (7, 21)
VOCAB = 104  # of which the batches of `sft_batch` use 101


@contextmanager
def made(folder: Path, hf: dict[str, Any], **config: Any) -> Iterator[tuple[ArchonEngine, CudaTrace]]:
    """An engine for the device, and the trace of what happens after it was made."""
    (folder / "config.json").write_text(json.dumps(hf))
    given = {
        "device": "cuda",
        "dtype": "bfloat16",
        "attn_type": "auto",
        "compile": False,  # which is traced by PyTorch itself
        "init_from_scratch": True,
        "max_tokens_per_mb": 32,
        "optimizer": {"lr": 1e-3},
    }
    with one_gpu(), one_process(), cuda_trace() as trace:
        engine = ArchonEngine(EngineConfig(path=str(folder), **(given | config)))
        engine.initialize()
        trace.waits.clear()
        trace.operators.clear()
        yield engine, trace


def gradients_of_zeros(model: nn.Module) -> Any:
    """What stands in for a backward: each trained parameter is given a gradient, and those gathered are freed."""

    def backward(loss: Tensor) -> None:
        assert loss.requires_grad and loss.device == CUDA
        reshard(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    return backward


def check_step(
    engine: ArchonEngine, trace: CudaTrace, batch: Any, loss_fn: Any, micro_batches: int = 2
) -> dict[str, float]:
    """Take a step, in which the host waits once. Returns its metrics."""
    trace.waits.clear()
    with mock.patch.object(Tensor, "backward", gradients_of_zeros(engine.model)):
        metrics = engine.train_batch(batch, loss_fn, loss_token_count)
    assert engine.optimizer is not None
    assert metrics["micro_batches"] >= micro_batches and not metrics["skipped"]
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            own = [parameter, *engine.optimizer.state[parameter].values()]
            assert {(local_tensor(x).device, x.dtype) for x in own} == {(CUDA, torch.float32)}
    return metrics


MODELS = {
    "dense": family_config("qwen3", vocab_size=VOCAB),
    "experts": family_config("qwen3_moe", vocab_size=VOCAB),
    "sinks": family_config("gpt_oss", vocab_size=VOCAB),
    "latent": family_config("deepseek_v3", vocab_size=VOCAB),
    "delta net": family_config("qwen3_5_text", vocab_size=VOCAB),
}
READ_ONCE = {"archon.engine.metrics.MetricSums.read": 1}
models = pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)


@pytest.mark.parametrize("loss_fn", [CrossEntropyLoss(), scored], ids=["fused", "scores"])
@models
def test_step(traced: Callable[..., None], tmp_path: Path, hf: dict[str, Any], loss_fn: Any) -> None:
    traced(hf["model_type"], "auto", f"engine: step, {'token scores' if loss_fn is scored else 'fused loss'}")
    with made(tmp_path, hf) as (engine, trace):
        check_step(engine, trace, sft_batch(), loss_fn)
        assert trace.waits == READ_ONCE
        assert trace.operators["torch_attn._varlen_attn.default"]


@models
def test_scores_and_evaluation(traced: Callable[..., None], tmp_path: Path, hf: dict[str, Any]) -> None:
    traced(hf["model_type"], "auto", "engine: scores with entropy, evaluation")
    with made(tmp_path, hf) as (engine, trace):
        for scores in engine.forward_with_entropy(sft_batch()):
            assert (scores.shape, scores.dtype, scores.device.type) == (SHAPE, torch.float32, "cpu")
        assert trace.waits == {"archon.engine.engine.ArchonEngine._score": 2}  # logprobs and entropies
        trace.waits.clear()
        engine.eval_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
        assert trace.waits == READ_ONCE


@pytest.mark.parametrize("backend", ["fa4", "varlen", "flash", "sdpa"])
@models
def test_common_beginnings(traced: Callable[..., None], tmp_path: Path, hf: dict[str, Any], backend: str) -> None:
    """Run of tokens that documents share, and trees of short documents, each computed once."""
    traced(hf["model_type"], backend, "engine: step with shared prefixes")
    long, short = torch.arange(90) % 50, torch.arange(9)
    documents = [torch.cat([start, torch.arange(n) + 3 * n]) for start in (long, short) for n in (3, 9, 14, 20)]
    batch = padded(documents, loss_mask=[torch.ones_like(x) for x in documents])
    kernels = flash_attention_4() if backend == "fa4" else nullcontext()
    with kernels, made(tmp_path, hf, attn_type=backend, max_tokens_per_mb=600) as (engine, trace):
        check_step(engine, trace, batch, CrossEntropyLoss(), micro_batches=1)
        assert trace.waits == READ_ONCE
        assert sum(mb.n_computed_tokens for mb in engine._split(batch)[1]) < sum(map(len, documents)) // 2


@pytest.mark.parametrize("attn_type", ["auto", "sdpa"])
def test_images(traced: Callable[..., None], tmp_path: Path, attn_type: str) -> None:
    traced("qwen3_5", attn_type, "engine: step with pictures")
    hf = vision_language_config()
    image = get_model_spec("qwen3_5").model_args_class.from_hf_config(hf).image_format
    assert image is not None
    with made(tmp_path, hf, vision="trained", attn_type=attn_type, max_tokens_per_mb=100) as (engine, trace):
        check_step(engine, trace, image_rows([1, 0, 2, 1], image), CrossEntropyLoss(), micro_batches=1)
        assert trace.waits == READ_ONCE


LORA = {"rank": 4, "alpha": 8, "targets": "all-linear"}


@models
def test_adapter(
    monkeypatch: pytest.MonkeyPatch, traced: Callable[..., None], tmp_path: Path, hf: dict[str, Any]
) -> None:
    """The frozen weights are not read: that is done in threads, which are not traced."""
    traced(hf["model_type"], "auto", "engine: step of a LoRA adapter")
    monkeypatch.setattr(build, "load_hf_weights", lambda *_: None)
    monkeypatch.setattr(initialize, "require_shapes", lambda *_: None)
    with made(tmp_path, hf, lora=LORA, init_from_scratch=False) as (engine, trace):
        check_step(engine, trace, sft_batch(), CrossEntropyLoss())
        assert trace.waits == READ_ONCE


EVEN = {
    "dense": family_config("qwen3", vocab_size=VOCAB, **EVEN_SIZES),
    "experts": family_config("qwen3_moe", vocab_size=VOCAB, **EVEN_SIZES, moe_intermediate_size=32),
}


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("hf", EVEN.values(), ids=EVEN)
def test_8_bit_products(traced: Callable[..., None], tmp_path: Path, hf: dict[str, Any], fp8: str) -> None:
    traced(hf["model_type"], "auto", f"engine: step with 8-bit products, {fp8}")
    with made(tmp_path, hf, fp8=fp8) as (engine, trace):
        check_step(engine, trace, sft_batch(), CrossEntropyLoss())
        assert trace.waits == READ_ONCE
        assert trace.operators["aten._scaled_mm.default"]
        assert bool(trace.operators["aten._scaled_grouped_mm.default"]) == ("num_experts" in hf)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_8_bit_products_are_traced_whole(traced: Callable[..., None], by_row: bool, sharded: bool) -> None:
    """Dynamo finds one graph, forward and backward, so that quantization is fused with its neighbors."""
    traced("", "auto", f"FP8 matmuls in one graph, {'rowwise' if by_row else 'tensorwise'}{', sharded' * sharded}")

    def compute(x: Tensor, weight: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        return fp8_grouped_linear(fp8_linear(x, weight, None, scaling), matrices, counts, scaling)

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    scaling, graphs = Fp8Scaling(by_row), list[torch.fx.GraphModule]()
    compiled = torch.compile(compute, fullgraph=True, dynamic=True, backend=keep)
    torch.compiler.reset()
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # Dynamo reads functions of torch.cuda when first used
    sharding = mock.patch.object(Fp8Scaling, "is_sharded", sharded)
    with one_gpu(), FakeTensorMode(allow_non_fake_inputs=True), sharding:
        for tokens in (37, 64):  # a multiple of 16 too
            x, weight, matrices = (
                torch.empty(*shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
                for shape in ((tokens, 64), (48, 64), (4, 32, 48))
            )
            out = compiled(x, weight, matrices, torch.empty(4, device=CUDA, dtype=torch.int64))
            assert (out.shape, out.requires_grad) == ((tokens, 32), True)
    assert len(graphs) == 1
    assert ("Float8LinearConfig" in graphs[0].code) != sharded


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("hf", EVEN.values(), ids=EVEN)
def test_narrow_moments(traced: Callable[..., None], tmp_path: Path, hf: dict[str, Any], moments: str) -> None:
    traced(hf["model_type"], "auto", f"engine: AdamW with moments in {moments}")
    with made(tmp_path, hf, optimizer={"lr": 1e-3, "moments": moments}) as (engine, trace):
        with mock.patch.object(Tensor, "backward", gradients_of_zeros(engine.model)):
            engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
        assert trace.waits == READ_ONCE
        assert engine.optimizer is not None
        state = [local_tensor(x) for values in engine.optimizer.state.values() for x in values.values()]
        assert {x.device for x in state} == {CUDA}
        assert (torch.bfloat16 if moments == "bfloat16" else torch.uint8) in {x.dtype for x in state}


def test_critic(traced: Callable[..., None], tmp_path: Path) -> None:
    traced("qwen3", "auto", "engine: values of a critic")
    with made(tmp_path, MODELS["dense"], is_critic=True) as (engine, trace):
        values = engine.forward_batch(sft_batch())
        assert (values.shape, values.dtype) == (SHAPE, torch.float32)
        assert trace.waits == {"archon.engine.engine.ArchonEngine._score": 1}
