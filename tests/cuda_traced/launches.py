"""Count the operators that launch a kernel: of a block, its weights, a training step and a decode step.

Run it with the CUDA build of torch; no GPU is needed: python -m tests.cuda_traced.launches --record FILE

A figure of a block is the difference of a model with 4 layers and a model with 2, divided by 2. Counts are of eager
operators, where views and allocations do not count and a `foreach` operator counts once. The forward pass, the
optimizer and the decode step are traced on fake CUDA tensors. PyTorch cannot run a backward pass on them without a
GPU, so `backward` and `weights` are counted on CPU tensors, where attention is another kernel, once per document.
`weights` are the operators that the engine adds to a bfloat16 model because its masters are float32: casts and copies
of weights and gradients in forward and backward. `compiled block` counts the kernels in the code that inductor
generates for an H100.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from archon.engine.batch import pack
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.generation import InProcessEngine
from archon.generation.decode_step import StepKind
from archon.parallel.fsdp import set_gradient_reduction
from archon.parallel.phase import phase_listener
from archon.parallel.torch_private import TorchDispatchMode
from archon.tools.bench.origin import commit
from tests.cuda_traced.compiled import QWEN3, compiled_launches
from tests.cuda_traced.models import build, family_config
from tests.cuda_traced.stand_ins import flash_attn_without_kernels, one_gpu, one_process
from tests.cuda_traced.test_engine import gradients_of_zeros, made
from tests.cuda_traced.trace import CudaTrace, cuda_trace, launches_kernel
from tests.engine.tiny import CONFIG, make_engine, padded, sft_batch
from tests.lora.random_lora import random_lora

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 64, "vocab_size": 104}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": CONFIG | SIZES,
    "experts": CONFIG | SIZES | EXPERTS | {"model_type": "qwen3_moe"},
}
LAYERS = (2, 4)
COMPILED = "compiled block of Qwen3-0.6B"


class LaunchCounter(TorchDispatchMode):
    """Counter of the operators that launch a kernel, on tensors of any device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(x, nn.Parameter) and x is not Tensor for x in types):
            return NotImplemented  # a DTensor, dispatched again with its local tensor
        self.operators[str(func)] += launches_kernel(func)
        return func(*args, **(kwargs or {}))


def _subtract(counts: Counter[str], base: Counter[str], blocks: int = 1) -> Counter[str]:
    """Return the operators per block that `counts` has more or fewer than `base`."""
    return Counter({name: (counts[name] - base[name]) / blocks for name in counts | base if counts[name] != base[name]})


def count_weights(hf: dict[str, Any], dtype: str = "bfloat16", micro_batches: int = 1) -> Counter[str]:
    """Return the operators per block that float32 masters add to forward and backward, on CPU tensors."""
    batch, counter = pack(sft_batch([16])), LaunchCounter()

    def operators(layers: int, masters: bool) -> Counter[str]:
        counter.operators = Counter()
        with one_process(), tempfile.TemporaryDirectory() as folder:
            config = hf | {"num_hidden_layers": layers}
            model: nn.Module = make_engine(Path(folder), hf=config, dtype=dtype if masters else "float32").model
            model = model if masters else model.to(getattr(torch, dtype))
            for index in range(micro_batches):
                set_gradient_reduction(model, index == micro_batches - 1)
                with counter:
                    out = model(
                        batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, labels=batch.loss_labels()
                    )
                    out.logprobs.sum().backward()
            return counter.operators

    few, many = (_subtract(operators(layers, True), operators(layers, False)) for layers in LAYERS)
    return _subtract(many, few, LAYERS[1] - LAYERS[0])


def count_backward(hf: dict[str, Any]) -> float:
    """Return the operators per block of the backward pass of a bfloat16 model, on CPU tensors."""
    batch, totals = pack(sft_batch([16])), []
    for layers in LAYERS:
        with one_process(), tempfile.TemporaryDirectory() as folder:
            model = make_engine(Path(folder), hf=hf | {"num_hidden_layers": layers}).model.bfloat16()
        out = model(batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, labels=batch.loss_labels())
        with LaunchCounter() as counter:
            out.logprobs.sum().backward()
        totals.append(counter.operators.total())
    return (totals[1] - totals[0]) / (LAYERS[1] - LAYERS[0])


@contextmanager
def _phases(trace: CudaTrace) -> Iterator[dict[str, int]]:
    """Yield the launches of each phase of a training step."""
    counts: dict[str, int] = {}

    @contextmanager
    def listen(name: str) -> Iterator[None]:
        before = trace.launches
        yield
        counts[name] = counts.get(name, 0) + trace.launches - before

    with phase_listener(listen):
        yield counts


def count_step(hf: dict[str, Any], shares_prefixes: bool) -> tuple[float, int, int]:
    """Return forward launches per block, optimizer launches of the step, and host waits of the step."""
    if shares_prefixes:
        prefix = torch.arange(90) % 50
        documents = [torch.cat([prefix, torch.arange(n) + 3 * n]) for n in (3, 9, 14, 20)]
        batch = padded(documents, loss_mask=[torch.ones_like(x) for x in documents])
    else:
        batch = sft_batch([16])
    steps = []
    for layers in LAYERS:
        config = hf | {"num_hidden_layers": layers}
        with (
            tempfile.TemporaryDirectory() as folder,
            made(Path(folder), config, max_tokens_per_mb=600) as (engine, trace),
            mock.patch.object(Tensor, "backward", gradients_of_zeros(engine.model)),
        ):
            engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)  # allocates the moments
            trace.waits.clear()
            with _phases(trace) as counts:
                engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
            steps.append(counts)
            waits = trace.waits.total()
    forward = (steps[1]["forward"] - steps[0]["forward"]) / (LAYERS[1] - LAYERS[0])
    return forward, steps[1]["optimizer"], waits


def count_decode(family: str, loras: int = 0) -> float:
    """Return the launches per block of a decode step, with this number of LoRAs of all matrices."""
    launches = []
    for layers in (4, 8):
        with one_gpu(), cuda_trace() as trace:
            config = family_config(family, num_hidden_layers=layers, hidden_act="silu")
            model = build(config, "auto").requires_grad_(False)
            engine = InProcessEngine.from_model(
                model, max_slots=8, page_size=8, n_pages=40, eos_token_ids=(), weights="snapshot"
            )
            for seed in range(loras):
                engine.load_lora(str(seed), random_lora(model, seed, rank=8))
            step = engine._generator._decode_step
            assert step is not None
            trace.launches = 0
            with torch.inference_mode():
                step._run(StepKind(8, "sampled", has_lora=loras > 0))
            launches.append(trace.launches)
    return (launches[1] - launches[0]) / 4


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model of `MODELS`: the launches of each part, and the host waits of a step."""
    hf = MODELS[name]
    for what in ("block: forward", "block: forward, shared prefixes"):
        forward, optimizer, waits = count_step(hf, shares_prefixes="shared" in what)
        yield {"model": name, "what": what, "launches": forward, "host_waits": waits}
    yield {"model": name, "what": "step: gradient norm, clipping and AdamW", "launches": optimizer}
    yield {"model": name, "what": "block: backward", "launches": count_backward(hf)}
    for micro_batches in (1, 2):
        operators = count_weights(hf, micro_batches=micro_batches)
        yield {
            "model": name,
            "what": f"block: weights, {micro_batches} micro-batch{'es' * (micro_batches > 1)}",
            "launches": operators.total(),
            "operators": dict(sorted(operators.items())),
        }
    yield {"model": name, "what": "block: decode step", "launches": count_decode(hf["model_type"])}
    if name == "dense":
        yield from compiled_rows()


def compiled_rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of a compiled block, which are of the model `dense`."""
    flash_attn_without_kernels()
    for side, kernels in compiled_launches(QWEN3).items():
        what = f"{COMPILED}: {side}"
        yield {"model": "dense", "what": what, "launches": kernels.total(), "operators": dict(sorted(kernels.items()))}


def main() -> None:
    """Print the rows, and append them to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="JSON lines file to which the rows are appended")
    options = parser.parse_args()
    origin = {"torch": torch.__version__, "commit": commit()}
    for row in (row for name in MODELS for row in rows(name)):
        line = json.dumps(row | origin)
        print(line, flush=True)
        if options.record is not None:
            with options.record.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
