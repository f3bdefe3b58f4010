"""Records the largest tensor that any operation makes, in the forward and in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestAllocation(TorchDispatchMode):
    """`elements`: the most elements of one storage among all operations' results; `operation`: which made it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                elements = max(leaf.numel(), leaf.untyped_storage().nbytes() // leaf.element_size())
                if elements > self.elements:
                    self.elements, self.operation = elements, str(func)
        return result
