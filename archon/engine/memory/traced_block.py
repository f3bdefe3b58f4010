"""Activations of a block by a dry run with fake tensors, for kinds of layers without a formula.

A dry run takes 0.2 to 2 s for each kind of block, and a formula microseconds. A block that ranks share would also need
a fake process group for each layout, and a plan compares hundreds of layouts. archon's layers therefore have
formulas. On unshared blocks, the bytes that autograd keeps agree within 6 % (`tests/engine/test_traced_block.py`).
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from archon.engine.fake_execution import FakeExecution, round_robin
from archon.models.attention.meta import PackedAttention
from archon.models.attention.registry import saved_ops
from archon.models.base import TransformerBlock
from archon.models.layers.moe import Router
from archon.models.layers.rope import RotaryEmbedding
from archon.models.layers.spec import LayerSpec
from archon.parallel.activation_checkpoint import SAVED_MATMULS
from archon.parallel.torch_private import FakeTensorMode, TorchDispatchMode, tree_leaves

# Tokens of the traced block and of each document. Activations are proportional to tokens; with this many, weight
# gradients are small next to them.
TOKENS, DOCUMENT = 65536, 64


class TracedBlock(NamedTuple):
    """Bytes of a block for TOKENS tokens.

    Attributes:
        input: its input.
        operators: outputs of matmuls and attention that autograd keeps.
        unsaved_operators: outputs of matmuls and attention that autograd does not keep.
        elementwise: other tensors that autograd keeps.
        working: peak of temporaries in its backward pass, the gradient of its output included.
    """

    input: int
    operators: int
    unsaved_operators: int
    elementwise: int
    working: int


class _Storages(TorchDispatchMode):
    """Live bytes of the storages made while it is active, their peak, and the bytes of the outputs of `ops`."""

    def __init__(self, ops: frozenset[str]) -> None:
        super().__init__()
        self.ops, self.live, self.peak = ops, 0, 0
        self.sizes: dict[StorageWeakRef, int] = {}
        self.op_outputs: dict[StorageWeakRef, int] = {}
        self.freed_outputs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._note(storage)
                if func.name().partition(".")[0] in self.ops:
                    self.op_outputs[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = StorageWeakRef(storage)
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += self.sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: StorageWeakRef) -> None:
        self.live -= self.sizes.pop(key, 0)
        self.freed_outputs += self.op_outputs.pop(key, 0)


@lru_cache(maxsize=1024)
def trace_block(dim: int, layer: LayerSpec, dtype: torch.dtype) -> TracedBlock:
    """Trace a block of width `dim` with all weights trained, and return its bytes for TOKENS tokens."""
    with FakeTensorMode(allow_non_fake_inputs=True), FakeExecution({}):
        # 1. Build the block with weights of the compute dtype; their gradients are not activations.
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            block = TransformerBlock(0, layer, dim)
        finally:
            torch.set_default_dtype(default)
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        for module in block.modules():
            if isinstance(module, Router):
                module.register_forward_hook(round_robin)
        weights = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*block.parameters(), *block.buffers())}

        # 2. Run the forward, and note what autograd keeps.
        bounds = torch.arange(0, TOKENS + 1, DOCUMENT, dtype=torch.int32)
        x = torch.empty(TOKENS, dim, dtype=dtype, requires_grad=True)
        attention = PackedAttention(bounds, DOCUMENT)
        attention.prepare(x)
        rope = layer.mixer.rope
        positions = torch.arange(TOKENS) % DOCUMENT
        rotation = None if rope is None else RotaryEmbedding(rope)(positions, dtype, None)
        kept: dict[StorageWeakRef, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            key = StorageWeakRef(storage)
            if key not in weights and tensor.device.type != "meta":
                kept[key] = storage.nbytes()
            return tensor

        storages = _Storages(SAVED_MATMULS | saved_ops("auto"))
        with storages, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out: Any = block(x, rotation, attention)
        out = out[0] if isinstance(out, tuple) else out
        hidden = x.untyped_storage()
        kept.pop(StorageWeakRef(hidden), None)
        operators = sum(size for key, size in storages.op_outputs.items() if key in kept)
        unsaved = sum(storages.op_outputs.values()) + storages.freed_outputs - operators

        # 3. Run the backward, and note the peak of its temporaries.
        before = storages.peak = storages.live
        with storages:
            out.backward(torch.empty_like(out))
        working = max(storages.peak - before, hidden.nbytes())
    return TracedBlock(hidden.nbytes(), operators, unsaved, sum(kept.values()) - operators, working)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
