"""Every private PyTorch API of archon. No other module uses a private name of PyTorch or changes one of its classes.

`PRIVATE_APIS` lists the names, with the reason why no public API does the same. Names of modules that `import torch`
loads are checked on import; `require_private_apis` checks the others before their first use, so an unsupported version
of PyTorch fails with one line. tests/parallel/test_torch_private.py fails once an entry is no longer needed.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from archon.schema.errors import ConfigError

SUPPORTED_TORCH = "2.11 to 2.13"


@dataclass(frozen=True)
class PrivateApi:
    """Private PyTorch names of one feature.

    Attributes:
        feature: the feature that fails without them.
        names: dotted names of modules or attributes.
        purpose: their use in archon.
        reason: why no public API does the same.
        torch: the versions of PyTorch with which they work.
        on_import: check the names when this module is imported.
    """

    feature: str
    names: tuple[str, ...]
    purpose: str
    reason: str
    torch: str = SUPPORTED_TORCH
    on_import: bool = True


def _names(*groups: str) -> tuple[str, ...]:
    """Return the dotted names of groups such as "torch.ops.aten: mm addmm"."""
    split = (group.split(": ") for group in groups)
    return tuple(f"{owner}.{name}" for owner, names in split for name in names.split())


PRIVATE_APIS = {
    "gloo": PrivateApi(
        "gloo groups",
        _names(
            "torch.distributed.distributed_c10d.ProcessGroupGloo: create_device create_default_device options",
            "torch.distributed.distributed_c10d.ProcessGroupGloo: _Options._devices _Options._threads",
            "torch.distributed.distributed_c10d.ProcessGroupGloo: _Options._timeout",
        ),
        "one worker thread per gloo group and one device per process; groups apart from the default group",
        "init_process_group takes no gloo options, and two workers of one group corrupt the heap",
        on_import=False,  # a build of PyTorch may lack gloo
    ),
    "groups": PrivateApi(
        "process groups",
        _names("torch.distributed.distributed_c10d: _world.pg_map _get_default_store _resolve_process_group"),
        "list all groups, connect to the rendezvous store from a thread, find a group by its name",
        "PyTorch has public access to the default group only",
    ),
    "timeouts": PrivateApi(
        "time limits of collectives",
        _names(
            "torch.distributed.distributed_c10d: default_pg_nccl_timeout default_pg_timeout",
            "torch.distributed.ProcessGroup: _device_types _get_backend",
        ),
        "read and change the time limit of existing and future groups",
        "meshes create groups without a limit; set_timeout refuses the fake group; no public API reads a limit",
    ),
    "meshes": PrivateApi(
        "device meshes",
        _names(
            "torch.distributed.device_mesh.DeviceMesh: _root_mesh _concatenate",
        ),
        "shard a parameter over dimensions of several meshes",
        "DeviceMesh.from_group makes another root per mesh; torch.compile finds the groups of a mesh in its root",
    ),
    "mesh_caches": PrivateApi(
        "device meshes",
        _names("torch.distributed.tensor.debug: _clear_sharding_prop_cache"),
        "drop cached meshes of a destroyed default group",
        "DTensor caches meshes by ranks, and a new default group gives their groups other names",
        on_import=False,  # its module imports torch.compile, a second of start-up
    ),
    "collectives": PrivateApi(
        "collectives",
        _names(
            "torch.ops._c10d_functional: all_gather_into_tensor.default reduce_scatter_tensor.default",
            "torch.ops._c10d_functional: all_to_all_single.default all_reduce.default wait_tensor.default",
        ),
        "collectives that torch.compile and the fake process group support",
        "torch.distributed._functional_collectives, which wraps these operators, is private too",
    ),
    "dispatch": PrivateApi(
        "dry run and count of collectives",
        _names(
            "torch.utils._python_dispatch: TorchDispatchMode",
            "torch.utils._pytree: tree_leaves register_dataclass",
            "torch._subclasses.fake_tensor: FakeTensor FakeTensorMode unset_fake_temporarily",
            "torch.ScriptObject: _type",
            "torch.ops.aten: _fused_adamw_.default _grouped_mm.default _local_scalar_dense.default",
        ),
        "run a step with fake tensors, count collectives, and find the tensors of a dataclass of model inputs",
        "PyTorch has no public dispatch modes, fake tensors or pytrees",
    ),
    "fake_group": PrivateApi(
        "dry run",
        _names("torch.testing._internal.distributed.fake_pg: FakeStore"),
        "run one rank of a layout without the other ranks",
        "the backend `fake` is registered by this module only",
        on_import=False,
    ),
    "checkpointing": PrivateApi(
        "activation checkpointing",
        _names(
            "torch.utils.checkpoint: SAC_IGNORED_OPS",
            "torch.ops.profiler: _record_function_enter_new.default _record_function_exit._RecordFunction",
        ),
        "recompute blocks in which FSDP gathers experts; checkpoint a block without renaming its modules",
        "selective checkpointing counts profiler marks as operators, and their number differs in recomputation",
    ),
    "compile": PrivateApi(
        "compiled blocks",
        _names("torch.fx.experimental._config: use_duck_shape", "torch.nn.Module: _compiled_call_impl"),
        "compile blocks without the assumption that equal sizes of the first batch stay equal",
        "torch.compile has no option for duck shapes",
    ),
    "memory_budget": PrivateApi(
        "activation_checkpoint.mode = memory_budget",
        _names(
            "torch._dynamo.backends.registry: lookup_backend", "torch._functorch.config: activation_memory_budget patch"
        ),
        "compile blocks with a memory budget",
        "the budget is a global setting, which would leak into a second engine",
        on_import=False,
    ),
    "fsdp": PrivateApi(
        "families with a parallelize function of their own",
        _names("torch.distributed.fsdp: FSDPModule._get_fsdp_state"),
        "stop FSDP from casting the inputs of modules that a family has sharded",
        "the policy of a module is fixed by fully_shard",
    ),
    "pipeline": PrivateApi(
        "pipelines",
        _names(
            "torch.distributed.pipelining.schedules: Schedule1F1B._step_microbatches",
            "torch.distributed.pipelining.schedules: ScheduleInterleaved1F1B._step_microbatches",
            "torch.distributed.pipelining.schedules: ScheduleInterleavedZeroBubble._step_microbatches",
            "torch.distributed.pipelining.schedules: ScheduleZBVZeroBubble._step_microbatches",
            "torch.distributed.pipelining.PipelineStage: forward_maybe_with_nosync backward_one_chunk",
            "torch.distributed.pipelining.PipelineStage: backward_weight_one_chunk is_first",
        ),
        "run micro-batches of packed documents through a schedule",
        "schedule.step splits tensors into equal chunks, and packed micro-batches have no common batch dimension",
        on_import=False,
    ),
    "clipping": PrivateApi(
        "gradient clipping",
        _names("torch: _foreach_norm _foreach_mul_"),
        "one kernel for the norms of all gradients, and one to scale them",
        "torch.nn.utils.get_total_norm returns one norm for all tensors, and sharded gradients need separate norms",
    ),
    "mixed_precision": PrivateApi(
        "bfloat16 compute with float32 masters on one process",
        _names("torch: _foreach_copy_"),
        "copy all weights of a block to another dtype by one kernel, and put the copies in its modules",
        "no public function copies a list of tensors, and modules refuse a tensor in the place of a parameter",
    ),
    "fp8_experts": PrivateApi(
        "FP8 matmuls of experts on CUDA",
        _names("torch: _scaled_grouped_mm"),
        "multiply each expert's rows in FP8 in code that torch.compile traces",
        "torch.nn.functional.scaled_grouped_mm calls an operator that the compiler of torch 2.11 does not know",
    ),
    "varlen": PrivateApi(
        "attention sinks and shared prefixes with attn_type varlen",
        _names("torch.nn.attention.varlen: _varlen_attn_backward"),
        "combine the gradients of several calls of the attention kernel",
        "varlen_attn returns log-sum-exp values without a gradient",
        on_import=False,
    ),
    "softmax": PrivateApi(
        "blockwise attention",
        _names("torch.ops.aten: _softmax_backward_data.default"),
        "the backward pass of a softmax from its output",
        "autograd reaches the kernel only through a graph, which blockwise attention does not build",
    ),
    "work": PrivateApi(
        "archon bench --profile",
        _names("torch.distributed.Work: _get_op_type"),
        "name the collective that a profiled step waits for",
        "the profiler does not record waits in Python",
    ),
    "onednn": PrivateApi(
        "float32 matmuls by oneDNN",
        _names("torch.ops.mkldnn: _linear_pointwise.default _reorder_linear_weight.default"),
        "float32 matmuls on AMD processors, where oneDNN is up to twice as fast as MKL",
        "torch.nn.functional.linear uses MKL for float32",
        on_import=False,  # without it archon uses other kernels
    ),
    "versions": PrivateApi(
        "families with state-dict conversions of their own",
        _names("torch.Tensor: _version"),
        "detect a conversion that changes its input in place",
        "no public API counts in-place operations",
    ),
    "conversion": PrivateApi(
        "modules with float32 tensors",
        _names("torch.nn.Module: _apply"),
        "keep single tensors in float32 when a module is converted to another dtype",
        "Module.to has no hook",
    ),
}


def require_private_apis(*entries: str) -> None:
    """Raise ConfigError if PyTorch lacks a name of these entries of `PRIVATE_APIS`."""
    for entry in entries:
        api = PRIVATE_APIS[entry]
        for name in api.names:
            if not has_private_api(name):
                raise ConfigError(
                    f"PyTorch {torch.__version__} has no {name}, which archon's {api.feature} needs; archon is made "
                    f"for PyTorch {SUPPORTED_TORCH}: install one of these"
                )


def has_private_api(name: str) -> bool:
    """Return whether a dotted name of a module or attribute exists."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


require_private_apis(*(entry for entry, api in PRIVATE_APIS.items() if api.on_import))

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: E402
from torch.utils._pytree import register_dataclass as register_dataclass  # noqa: E402
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: E402

# Operators without a public name.
functional_collectives = torch.ops._c10d_functional
wait_tensor = torch.ops._c10d_functional.wait_tensor.default
fused_adamw = torch.ops.aten._fused_adamw_.default
grouped_mm = torch.ops.aten._grouped_mm.default
local_scalar_dense = torch.ops.aten._local_scalar_dense.default
softmax_backward = torch.ops.aten._softmax_backward_data
scaled_grouped_mm = torch._scaled_grouped_mm
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_


# Process groups: gloo


def gloo_options(devices: Sequence[Any], limit: timedelta) -> Any:
    """Return the options of a gloo group with one worker thread."""
    options: Any = _stock_gloo()._Options()
    options._devices, options._threads, options._timeout = list(devices), 1, limit
    return options


@functools.cache
def _stock_gloo() -> Any:
    """Return PyTorch's class of gloo groups; `replace_gloo_class` replaces its name."""
    require_private_apis("gloo")
    return distributed_c10d.ProcessGroupGloo


def replace_gloo_class() -> None:
    """Make PyTorch create gloo groups with one worker thread and a shared device.

    By default a group has two worker threads, and each assigns the same `std::string` of the group without a lock after
    a collective (`lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, as of PyTorch 2.13). When both do so at once
    the heap is corrupted, and a run crashes or hangs after some ten thousand collectives. With one worker the
    collectives of one group run one after the other, as NCCL's do.

    Also by default, each group has a separate device, with a thread that wakes a hundred times a second, and a layout
    has about twenty groups.
    """
    gloo: Any = _stock_gloo()

    @functools.cache
    def devices() -> list[Any]:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if interfaces:
            return [gloo.create_device(interface=name) for name in interfaces.split(",")]
        return [gloo.create_default_device()]

    class GlooMeta(type(gloo)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            # PyTorch returns the base class for a group without a live Python object, and checks its type.
            return isinstance(instance, gloo)

    class SingleWorkerGloo(gloo, metaclass=GlooMeta):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **further: Any) -> None:
            options = gloo_options(devices(), timeout)
            for name, value in further.items():  # of PyTorch 2.14: enable_reconfigure
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SingleWorkerGloo  # type: ignore[misc]


def separate_group(store: dist.Store, rank: int, size: int, backend: str, address: str, limit: timedelta) -> Any:
    """Return a process group apart from the default one; gloo listens on `address`."""
    distributed: Any = dist  # a build without CUDA has no NCCL
    if backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = limit
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo = _stock_gloo()
    return gloo(store, rank, size, gloo_options([gloo.create_device(hostname=address)], limit))


# Process groups: lookup and time limits


def run_store() -> dist.Store:
    """Return a separate connection to the rendezvous store, for use by one thread."""
    store: Any = distributed_c10d._get_default_store()
    return store.clone()  # missing in the type stubs


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the group that functional collectives know by `name`."""
    return distributed_c10d._resolve_process_group(cast(Any, name))


def all_groups() -> list[dist.ProcessGroup]:
    """Return every group that this process belongs to."""
    return list(distributed_c10d._world.pg_map)


def script_type(value: torch.ScriptObject) -> str:
    """Return the type of a boxed argument of an operator."""
    return str(cast(Any, value)._type())


def set_time_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the time limit of the group's later collectives, on all its devices."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):  # a fake group has none
            backend._set_default_timeout(limit)


def set_default_time_limit(limit: timedelta) -> None:
    """Set the time limit of groups that are made without one."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, limit)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of the group's CPU collectives; PyTorch's default for a group without options."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)


def join_fake_group(rank: int, world_size: int) -> None:
    """Join the `fake` backend of torch: collectives return at once and send nothing."""
    require_private_apis("fake_group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@contextmanager
def wrap_waits(label: Callable[[int], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `label(operation type)` around every wait for a collective in Python."""
    work_class: Any = dist.Work
    wait = work_class.wait

    def labeled_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        with label(work._get_op_type()):
            return wait(work, *args, **kwargs)

    work_class.wait = labeled_wait
    try:
        yield
    finally:
        work_class.wait = wait


# Device meshes


def clear_mesh_caches() -> None:
    """Clear the meshes in DTensor's caches."""
    require_private_apis("mesh_caches")
    import torch.distributed.tensor.debug as debug

    debug._clear_sharding_prop_cache()


def set_root_mesh(mesh: DeviceMesh, root: DeviceMesh) -> None:
    """Make `mesh` a part of `root`."""
    mesh._root_mesh = root
    # torch.compile looks up the groups of a mesh in its root's registry, if this version of PyTorch has one.
    getattr(root, "_pg_registry", {}).update(getattr(mesh, "_pg_registry", {}))


def concat_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of all, which must be of one root."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))


# Modules: checkpointing, compilation, conversion


def ignore_profiler_marks() -> None:
    """Let a recomputed block emit another number of profiler marks.

    FSDP gathers separately sharded experts inside the block. PyTorch compares the counts of all operators that are not
    ignored, and would raise an error.
    """
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update({marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction})


def replace_class(module: nn.Module, module_class: type[nn.Module]) -> None:
    """Change the class of a module in place, as `fully_shard` does; its parameters keep their names."""
    module.__class__ = module_class


def put_weight(module: nn.Module, name: str, weight: Tensor) -> None:
    """Put a tensor, which need not be a parameter, in the place of a module's parameter."""
    module._parameters[name] = weight  # type: ignore[assignment]


def compile_without_duck_shapes(module: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compile a module in place, with dynamic shapes and without duck shapes.

    With duck shapes, torch.compile assumes that sizes which are equal in the first batch are always equal. A first
    batch with as many tokens as the model has features would then force a second compilation. In older versions of
    torch the setting is global, so other threads may compile without this specialization; that is harmless.
    """
    from torch.fx.experimental import _config as shapes

    module.compile(backend=backend, dynamic=True)
    compiled: Any = module._compiled_call_impl
    assert compiled is not None

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, shapes.use_duck_shape = shapes.use_duck_shape, False
        try:
            return compiled(*args, **kwargs)
        finally:
            shapes.use_duck_shape = before

    module._compiled_call_impl = call


def backend_with_memory_budget(backend: str, budget: float) -> Callable[..., Any]:
    """Return a torch.compile backend that keeps this fraction of the activations."""
    require_private_apis("memory_budget")
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    compile_graph = lookup_backend(backend)

    def compile_under_budget(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_graph(graph, inputs, **kwargs)

    return compile_under_budget


def is_changed(tensor: Tensor) -> bool:
    """Return whether an in-place operation has changed a tensor since its creation."""
    return tensor._version > 0


class ConversionHook(nn.Module):
    """Module that adjusts each tensor that `to`, `half`, `to_empty` and similar calls convert."""

    def adjust_converted(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the tensor to keep for `before`, which was converted to `after`."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(lambda x: self.adjust_converted(x, fn(x)), recurse)


# FSDP


def keep_input_dtypes(module: FSDPModule) -> None:
    """Stop FSDP from casting the floating-point inputs of a module to its compute dtype."""
    state = module._get_fsdp_state()
    state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False)


def reduction_dtype(module: FSDPModule) -> torch.dtype | None:
    """Return the dtype in which FSDP reduces the gradients of a module; None for the dtype of its parameters."""
    policy = module._get_fsdp_state()._mp_policy
    dtype: torch.dtype | None = policy.reduce_dtype or policy.param_dtype
    return dtype


# Pipelines


def run_schedule(schedule: Any, args: list[Any], kwargs: list[dict[str, Any]], targets: list[Tensor]) -> None:
    """Run the micro-batches of a pipeline schedule, forward and backward, and drop their losses."""
    schedule._step_microbatches(args, kwargs, target_mbs=targets, return_outputs=False)
    schedule._internal_losses.clear()


# Kernels


def varlen_attn_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `torch.nn.attention.varlen.varlen_attn`."""
    from torch.nn.attention.varlen import _varlen_attn_backward

    return _varlen_attn_backward(*args)


def has_onednn_linear() -> bool:
    """Return whether PyTorch has oneDNN's matmul operators."""
    return all(map(has_private_api, PRIVATE_APIS["onednn"].names))


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias by oneDNN. Not differentiable."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], ""))


def onednn_pack(weight: Tensor, rows: int) -> Tensor:
    """Return `weight` in oneDNN's layout for inputs of `rows` rows."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, rows))
