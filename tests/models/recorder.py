"""Recorders of the operations that a forward or backward pass is made of."""

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


class SummedRows(TorchDispatchMode):
    """`dtypes`: in which each operation that adds rows up by an index, such as `index_select`'s backward, does so."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.index_add.default, torch.ops.aten.index_add_.default):
            self.dtypes.append(result.dtype)
        return result
