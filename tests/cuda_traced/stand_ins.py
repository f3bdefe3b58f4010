"""What a trace needs of a GPU that is not there: its number, streams without order, kernels that are not launched."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from archon.models.attention.packed.fa4 import FlashAttention4
from archon.models.attention.packed.flash_kernel import FlashKernelBackend
from archon.parallel.torch_private import join_fake_group
from tests.cuda_traced.kernels import flash_operands
from tests.cuda_traced.trace import MixedDevicesError


def flash_attn_without_kernels() -> None:
    """Let flash-attn's own Python be imported, which registers the fake kernels, without the compiled ones."""
    sys.modules.setdefault("flash_attn_2_cuda", types.ModuleType("flash_attn_2_cuda"))


class Graph:
    """A CUDA graph that runs its code once, during the capture; replays do nothing."""

    replays = 0

    def replay(self) -> None:
        """Count the replay."""
        self.replays += 1


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """Let the backend `fa4` be chosen, with kernels that compute nothing."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        bounds = [options[f"{name}_{side}"] for name in ("cu_seqlens", "max_seqlen") for side in "qk"]
        flash_operands(q, k, v, *bounds)
        if not all(x.is_cuda for x in (q, k, v, *bounds[:2])):
            raise MixedDevicesError("FlashAttention-4 has a tensor that is not on the GPU")
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    interface: Any = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = forward
    modules = {"flash_attn.cute": types.ModuleType("flash_attn.cute"), interface.__name__: interface}
    with (
        one_gpu(),
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(FlashAttention4, "unsupported_reason", FlashKernelBackend.unsupported_reason),
    ):
        yield


@contextmanager
def one_gpu() -> Iterator[None]:
    """Make PyTorch see one GPU, whose streams and events do nothing, as those of the CPU."""
    of_cpu = ("Event", "Stream", "StreamContext", "current_stream", "stream", "synchronize")
    own: dict[str, Any] = {name: getattr(torch.cpu, name) for name in of_cpu}
    own |= {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (2**36, 2**36),
        "empty_cache": lambda: None,
        "CUDAGraph": Graph,
        "graph": lambda graph, **options: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
    }
    with ExitStack() as stack:
        for name, stand_in in own.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        yield


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, which sends nothing: NCCL needs a GPU."""
    join_fake_group(0, 1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _name(kernel: Any) -> str:
    """Return the name of a kernel's function, around which are an autotuner and heuristics."""
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return str(kernel.__name__)


@contextmanager
def triton_without_launches() -> Iterator[list[str]]:
    """Make kernels of Triton do nothing when they are called. Yields the names of those that were.

    Raises MixedDevicesError for a tensor that is not on the GPU.
    """
    from triton.runtime.jit import KernelInterface

    launched = list[str]()

    def launch(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor) and not x.is_cuda:
                    raise MixedDevicesError(f"a kernel of Triton has a tensor on {x.device}")
            launched.append(_name(kernel))

        return run

    with one_gpu(), mock.patch.object(KernelInterface, "__getitem__", launch):
        yield launched
