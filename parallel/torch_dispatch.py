"""Private PyTorch APIs of the dry run: dispatch modes, fake tensors and the fake process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from archon.parallel.torch_parts import require_private_apis

PRIVATE_APIS = (
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch.ops.aten.mm.default._opname",
    "torch.ops._c10d_functional.wait_tensor.default",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.ops.aten._fused_adamw_.default",
    "torch.ops.aten._grouped_mm.default",
    "torch.ops.aten._local_scalar_dense.default",
)
require_private_apis("dry run and count of collectives", PRIVATE_APIS)

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: E402

wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def join_fake_group(rank: int, world_size: int) -> None:
    """Join the `fake` backend of torch: collectives return at once and send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
