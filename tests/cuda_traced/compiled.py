"""Count the launches of a compiled block in the code that inductor generates for a GPU, which need not be there."""

from __future__ import annotations

import ast
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx as inductor
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties

from archon.parallel.compile import apply_compile
from archon.parallel.torch_private import FakeTensorMode
from tests.cuda_traced.models import Pack, build
from tests.cuda_traced.stand_ins import one_gpu
from tests.cuda_traced.trace import CudaTrace, run_backward
from tests.models.cuda.ahead_of_time import AbsentGPU

# An H100 (CUDA C Programming Guide, table of compute capability 9.0).
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024,
    warp_size=32,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
    gcnArchName="",
)


QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B, with one block and a small vocabulary."""
LENGTHS = (2048,) * 4
"""Tokens of the documents."""


class _GeneratedError(BaseException):
    """Ends a compilation at its generated code. Not an Exception, which inductor would wrap."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


class _CompiledError(BaseException):
    """Ends the forward pass at the compiled code, which cannot run without a GPU."""


def compiled_launches(hf: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the launches of a compiled block of a bfloat16 model, by kernel, in `forward` and `backward`.

    The block is compiled as the engine does. Inductor's code is generated and not run. Attention counts as one launch
    in each direction, though its backward pass launches up to three kernels.
    """
    launches: dict[str, Counter[str]] = {}
    compile_inner = inductor.compile_fx_inner

    def generate(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        side = "backward" if kwargs.get("is_backward") else "forward"
        assert side not in launches, f"the {side} pass is not one graph"
        try:
            with (
                one_gpu(),
                mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
                mock.patch("torch.utils._triton.has_triton", return_value=True),
                mock.patch.object(torch.cuda, "is_available", return_value=True),
                mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
                mock.patch("torch._subclasses.fake_tensor.init_gpu_context"),
            ):
                compile_inner(graph, inputs, **kwargs)
        except _GeneratedError as generated:
            launches[side] = launches_of(generated.code)

        def run(*args: Any) -> Any:
            raise _CompiledError

        return run

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return inductor.compile_fx(graph, inputs, inner_compile=generate)

    def stop(graph: GraphLowering) -> Any:
        raise _GeneratedError(graph.codegen()[0].value)

    def grad(outs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple[Tensor | None, ...]:
        (out,), (tangent,) = outs, grad_outputs
        leaves = run_backward(out, tangent, inputs)
        assert all(grad.shape == x.shape for x, grad in leaves.items())
        return tuple(leaves.get(x) for x in inputs)

    torch._dynamo.reset()
    DeviceProperties.create.cache_clear()
    try:
        with (
            mock.patch.object(triton.runtime.driver, "_active", AbsentGPU(90)),
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=H100),
            mock.patch.multiple(
                CudaInterface,
                get_device_properties=lambda device=None: H100,
                current_device=lambda: 0,
                device_count=lambda: 1,
                exchange_device=lambda device: 0,
                maybe_exchange_device=lambda device: 0,
                is_bf16_supported=lambda including_emulation=False: True,
                is_triton_capable=lambda device=None: True,
                get_compute_capability=lambda device=None: 90,
            ),
            mock.patch.object(CudaInterface.Worker, "get_device_properties", return_value=H100),
            mock.patch.object(torch.autograd, "grad", grad),
            mock.patch.object(GraphLowering, "compile_to_module", stop),
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
            # Folding of constants computes a tensor on the GPU.
            torch._inductor.config.patch(
                force_disable_caches=True, compile_threads=1, joint_graph_constant_folding=False
            ),
        ):
            with one_gpu(), CudaTrace():  # which computes tensors of the host
                model, calls = build(hf, "auto"), []
                (block,) = model.layers.values()
                hook = block.register_forward_pre_hook(lambda module, args: calls.append(args))
                Pack("varlen", LENGTHS).run(model)
                hook.remove()
            apply_compile(model.layers, backend=backend)
            with suppress(_CompiledError):
                hidden, *others = calls[0]
                block(hidden.detach().requires_grad_(), *others)  # a leaf, at which `run_backward` ends
    finally:
        DeviceProperties.create.cache_clear()
        torch._dynamo.reset()
    return launches


def launches_of(code: str) -> Counter[str]:
    """Return how often the generated code launches each kernel of Triton, of a library, and of an operator."""
    counts: Counter[str] = Counter()
    (call,) = (x for x in ast.walk(ast.parse(code)) if isinstance(x, ast.FunctionDef) and x.name == "call")
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if node.func.attr == "run" or name.startswith(("extern_kernels.", "torch.ops.")):
                counts[name] += 1
            elif node.func.attr in ("sum", "to", "copy_", "zero_", "fill_"):  # of partial sums, and of a workspace
                counts[node.func.attr] += 1
    return counts
