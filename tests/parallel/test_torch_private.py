"""Private PyTorch APIs: each one exists, works, and has no public replacement yet.

A failure of a `test_<entry>` asks for a look at the release notes: either archon must follow a change of PyTorch, or a
public API can replace the entry of `PRIVATE_APIS`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils import checkpoint

from archon.parallel import torch_private
from archon.parallel.activation_checkpoint import apply_activation_checkpointing
from archon.parallel.dims import ensure_process_group
from archon.parallel.mesh import default_group
from archon.parallel.torch_private import PRIVATE_APIS, has_private_api, require_private_apis
from archon.schema.config import ActivationCheckpointConfig
from archon.schema.errors import ConfigError

ROOT = Path(__file__).parents[2]
PRODUCT = [
    path for package in ("archon", "models", "parallel", "rl") for path in sorted((ROOT / package).rglob("*.py"))
]
NAMES = [(entry, name) for entry, api in PRIVATE_APIS.items() for name in api.names]
LIMIT = timedelta(seconds=7)
MODULE_PRIVATE = {name for name in (*vars(nn.Module), *vars(nn.Module())) if name[0] == "_" != name[1]}
# Private names of classes outside PyTorch, or of modules of the standard library, that the product uses on an object.
OTHER_PRIVATE = {"_asdict", "_base", "_exit", "_from_config", "_make", "_registry", "_replace", "_supports_sdpa"}


@pytest.mark.parametrize(("entry", "name"), NAMES, ids=[name for _, name in NAMES])
def test_private_api_exists(entry: str, name: str) -> None:
    assert has_private_api(name), f"PyTorch {torch.__version__} has no {name}; see PRIVATE_APIS[{entry!r}]"


def test_every_entry_is_documented_and_tested() -> None:
    untested = [entry for entry in PRIVATE_APIS if f"test_{entry}" not in globals()]
    assert untested == []
    assert all(api.purpose and api.reason and api.torch and api.feature for api in PRIVATE_APIS.values())


def test_missing_api_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.device_mesh.DeviceMesh._no_such"
    entry = torch_private.PrivateApi("meshes", ("torch.distributed", name), "", "")
    monkeypatch.setitem(PRIVATE_APIS, "missing", entry)
    with pytest.raises(ConfigError) as refused:
        require_private_apis("missing")
    assert str(refused.value) == (
        f"PyTorch {torch.__version__} has no {name}, which archon's meshes needs; archon is made for PyTorch "
        "2.11 to 2.13: install one of these"
    )
    assert not has_private_api("torch.no_such_module.anything")
    assert not has_private_api("torch.ops.aten.no_such_operator.default")


# One test per entry


def public(owner: Any, *words: str) -> set[str]:
    """Return the public names of an object that contain one of the words."""
    return {name for name in dir(owner) if name[0] != "_" and any(word in name.lower() for word in words)}


def test_gloo() -> None:
    ensure_process_group("cpu")
    stock = torch_private._stock_gloo()
    assert stock(dist.HashStore(), 0, 1, LIMIT).options._threads == 2, "PyTorch's default is one worker: drop the patch"
    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, LIMIT)
    assert isinstance(group, stock)
    assert (group.options._threads, group.options._timeout) == (1, LIMIT)
    separate = torch_private.separate_group(dist.HashStore(), 0, 1, "gloo", "127.0.0.1", LIMIT)
    assert (separate.options._threads, separate.options._timeout) == (1, LIMIT)
    assert separate not in torch_private.all_groups()


def test_groups() -> None:
    ensure_process_group("cpu")
    group = dist.new_group([0])
    assert {default_group(), group} <= set(torch_private.all_groups())
    assert torch_private.group_by_name(group.group_name) is group
    torch_private.run_store().set("from a thread", "1")
    known = {"Group", "GroupMember", "GroupName", "ProcessGroup", "ProcessGroupGloo", "destroy_process_group"}
    known |= {"get_group_rank", "get_process_group_ranks", "group", "init_process_group", "new_group", "new_subgroups"}
    known |= {"new_subgroups_by_enumeration", "shrink_group", "split_group", "ProcessGroupNCCL", "ProcessGroupMPI"}
    known |= {"ProcessGroupUCC", "ProcessGroupXCCL", "default_pg_timeout"}
    known |= {"Store", "FileStore", "HashStore", "PrefixStore", "TCPStore", "DistStoreError"}
    assert public(dist, "group", "store") <= known, "can a new public function replace an entry?"


def test_fsdp() -> None:
    ensure_process_group("cpu")
    dtypes: list[torch.dtype] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            dtypes.append(x.dtype)
            return super().forward(x.to(self.weight.dtype))

    mesh = init_device_mesh("cpu", (1,))
    module = fully_shard(Inner(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    module(torch.ones(1, 2))
    torch_private.keep_input_dtypes(module)
    module(torch.ones(1, 2))
    assert dtypes == [torch.bfloat16, torch.float32]
    assert public(FSDPModule, "policy", "cast") == set(), "can a new public method change the policy?"


def test_versions() -> None:
    tensor = torch.empty(2, device="meta")
    assert not torch_private.is_changed(tensor)
    with torch.no_grad():
        tensor.mul_(2)
    assert torch_private.is_changed(tensor)
    assert public(Tensor, "version", "mutat") == set(), "can a public method replace the entry?"


def test_timeouts() -> None:
    ensure_process_group("cpu")
    group = dist.new_group([0])
    torch_private.set_time_limit(group, LIMIT)
    assert torch_private.time_limit(group) == LIMIT
    assert public(dist.ProcessGroup, "timeout") <= {"set_timeout"}, "can a new public method read a time limit?"
    before = dist.distributed_c10d.default_pg_timeout
    torch_private.set_default_time_limit(LIMIT)
    try:
        assert torch_private.time_limit(dist.new_group([0])) == LIMIT
    finally:
        torch_private.set_default_time_limit(before)


FAKE = """
import torch, torch.distributed as dist
from datetime import timedelta

def refused(action):
    try:
        action()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]

print(refused(lambda: dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)))

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from archon.parallel import torch_private

torch_private.join_fake_group(0, 2)
print(refused(lambda: dist.group.WORLD.set_timeout(timedelta(seconds=1))))
torch_private.set_time_limit(dist.group.WORLD, timedelta(seconds=1))
one, both = dist.new_group([0]), dist.new_group([0, 1])
column = DeviceMesh.from_group([both, one], "cpu", mesh=[[0], [1]], mesh_dim_names=("a", "b"))
row = DeviceMesh.from_group([one, both], "cpu", mesh=[[0, 1]], mesh_dim_names=("c", "d"))
print(column["b"]._get_root_mesh() is row["d"]._get_root_mesh())
root = init_device_mesh("cpu", (2,))
for mesh in (column, row):
    torch_private.set_root_mesh(mesh, root)
print(torch_private.concat_meshes((column["b"], row["d"])).mesh_dim_names)
torch_private.clear_mesh_caches()
gathered = torch_private.wait_tensor(
    torch_private.functional_collectives.all_gather_into_tensor(torch.ones(3), 2, dist.group.WORLD.group_name)
)
print(tuple(gathered.shape))
"""


@pytest.fixture(scope="module")
def fake_lines() -> list[str]:
    """Output of a process with a fake group, a line per fact."""
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_fake_group(fake_lines: list[str]) -> None:
    assert fake_lines[0] != "None", "the fake backend needs no import: drop the entry"
    assert fake_lines[1] != "None", "ProcessGroup.set_timeout accepts a fake group: use it"


def test_meshes(fake_lines: list[str]) -> None:
    assert fake_lines[2] == "False", "meshes of the same ranks have one root: drop set_root_mesh"
    assert fake_lines[3] == "('b', 'd')"


def test_mesh_caches() -> None:
    program = (
        "import sys, torch\n"
        "from torch.distributed.tensor import DTensor, Replicate, init_device_mesh\n"
        "from archon.parallel import torch_private\n"
        "torch_private.join_fake_group(0, 1)\n"
        "print('torch._dynamo' in sys.modules)\n"
        "mesh = init_device_mesh('cpu', (1,))\n"
        "_ = DTensor.from_local(torch.ones(2), mesh, [Replicate()]) + 1\n"
        "from torch.distributed.tensor import debug\n"
        "count = lambda: debug._get_python_sharding_prop_cache_info().misses "
        "+ debug._get_fast_path_sharding_prop_cache_stats()[1]\n"
        "before = count()\n"
        "torch_private.clear_mesh_caches()\n"
        "print(before > 0, count())\n"
    )
    lines = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT, timeout=120).splitlines()
    assert lines[0] == "False", "importing torch_private imports torch.compile"
    assert lines[1] == "True 0"


def test_collectives(fake_lines: list[str]) -> None:
    assert fake_lines[4] == "(6,)"
    assert not has_private_api("torch.distributed.functional_collectives"), (
        "functional collectives are public: use them"
    )


def test_dispatch() -> None:
    @dataclass
    class Inputs:
        x: Tensor
        y: Tensor

    torch_private.register_dataclass(Inputs)
    x, y = torch.ones(2), torch.ones(3)
    assert [leaf.shape[0] for leaf in torch_private.tree_leaves(Inputs(x, y))] == [2, 3]
    with torch_private.FakeTensorMode():
        fake = torch.empty(10**15)
        assert isinstance(fake, torch_private.FakeTensor)
        with torch_private.unset_fake_temporarily():
            assert not isinstance(torch.empty(1), torch_private.FakeTensor)
    ensure_process_group("cpu")
    assert "ProcessGroup" in torch_private.script_type(default_group().boxed())
    for module in ("torch.utils.pytree", "torch.utils.python_dispatch", "torch.subclasses"):
        assert not has_private_api(module), f"{module} is public: use it"


class Block(nn.Module):
    """Linear layer; torch.compile skips a bare `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Gathering(nn.Module):
    """Block that emits one profiler mark more when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.profiler.record_function("gather") if self.calls == 2 else nullcontext():
            return self.linear(x)


def recompute() -> None:
    block = Gathering()
    names = list(dict(block.named_parameters()))
    apply_activation_checkpointing([block], ActivationCheckpointConfig(mode="selective", selective="op"))
    assert isinstance(block, Gathering)
    assert list(dict(block.named_parameters())) == names
    block(torch.ones(2, 2, requires_grad=True)).sum().backward()


def test_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    recompute()
    marks = {op for op in checkpoint.SAC_IGNORED_OPS if "profiler" in str(op)}
    monkeypatch.setattr(checkpoint, "SAC_IGNORED_OPS", checkpoint.SAC_IGNORED_OPS - marks)
    with pytest.raises((RuntimeError, AssertionError)):  # else PyTorch ignores profiler marks: drop the entry
        recompute()


def test_compile() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    def compilations(compile_module: Any) -> int:
        torch._dynamo.reset()
        graphs.clear()
        module = Block()
        compile_module(module)
        for rows in (4, 5, 6):
            module(torch.ones(rows, 4))
        return len(graphs)

    assert compilations(lambda module: torch_private.compile_without_duck_shapes(module, backend)) == 1
    stock = compilations(lambda module: module.compile(backend=backend, dynamic=True))
    assert stock == 2, "torch.compile does not assume equal sizes: drop the entry"


def test_memory_budget() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: (x.sin() * 2).sum(), backend=torch_private.backend_with_memory_budget("aot_eager", 0.5)
    )
    x = torch.ones(3, requires_grad=True)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(3).cos())
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):  # else it is a public option: use it
        torch.compile(lambda x: x, options={"activation_memory_budget": 0.5})


def test_pipeline() -> None:
    ensure_process_group("cpu")
    scalar = torch.empty((), device="meta")
    stage = PipelineStage(
        torch.nn.Identity(), 0, 1, torch.device("cpu"), input_args=scalar, output_args=scalar.clone().requires_grad_()
    )
    schedule = schedules.Schedule1F1B(stage, 1, loss_fn=lambda output, target: output)
    assert schedule._internal_losses == []
    assert all(hasattr(stage, name) for name in ("has_backward", "submod", "stage_index"))
    assert public(schedules.Schedule1F1B, "step", "micro") == {"step"}, "can a new public method take micro-batches?"


def test_clipping() -> None:
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])]
    torch.testing.assert_close(torch.stack(torch_private.foreach_norm(grads)), torch.tensor([5.0, 10.0]))
    torch_private.foreach_mul_(grads, 0.5)
    torch.testing.assert_close(grads[1], torch.tensor([3.0, 4.0]))
    assert torch.nn.utils.get_total_norm(grads).dim() == 0, "get_total_norm returns a norm per tensor: use it"


def test_mixed_precision() -> None:
    module = nn.Linear(2, 2, bias=False)
    weight = torch.empty_like(module.weight, dtype=torch.float64)
    torch_private.foreach_copy_([weight], [module.weight])
    with pytest.raises(TypeError, match="cannot assign"):
        module.weight = weight  # type: ignore[assignment]
    torch_private.put_weight(module, "weight", weight)
    assert module.weight is weight and module(weight).dtype == torch.float64
    assert public(torch, "foreach") == set(), "does a public function copy lists of tensors?"


def test_fp8_experts() -> None:
    """The compiler knows the shape of the result: operators of the meta device have it from the same function."""
    rows, matrices = (
        torch.empty(*shape, dtype=torch.float8_e4m3fn, device="meta") for shape in ((40, 64), (3, 32, 64))
    )
    scales = torch.empty(40, device="meta"), torch.empty(3, 32, device="meta")
    offs = torch.empty(3, dtype=torch.int32, device="meta")
    out = torch_private.scaled_grouped_mm(
        rows, matrices.transpose(1, 2), *scales, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    assert (out.shape, out.dtype) == ((40, 32), torch.bfloat16)


def test_varlen() -> None:
    """The kernel runs on a GPU only; tests/gpu compares its gradients."""
    from torch.nn.attention import varlen

    arguments = [argument.name for argument in torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments]
    assert arguments == [
        *("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal"),
        *("rng_state", "scale", "window_size"),
    ]
    assert not any("backward" in name for name in public(varlen, "varlen")), "the backward is public: use it"


def test_softmax() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    grad, p = torch.randn(3, 4, dtype=torch.float64), torch.softmax(x, -1)
    p.backward(grad)
    torch.testing.assert_close(torch_private.softmax_backward(grad, p.detach(), -1, torch.float64), x.grad)
    assert public(torch.nn.functional, "softmax_backward") == set(), "the backward is public: use it"


def test_work() -> None:
    ensure_process_group("cpu")
    kinds: list[int] = []

    @contextmanager
    def label(kind: int) -> Iterator[None]:
        kinds.append(kind)
        yield

    with torch_private.wrap_waits(label):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        work.wait()
    assert kinds == [1]  # all-reduce
    assert public(dist.Work, "type", "kind") == set(), "the kind of a collective is public: use it"


def test_onednn() -> None:
    x, weight, bias = torch.randn(5, 16), torch.randn(8, 16), torch.randn(8)
    expected = torch.nn.functional.linear(x, weight, bias)
    if not torch.backends.mkldnn.is_available():
        assert torch_private.has_onednn_linear() in (True, False)
        return
    assert torch_private.has_onednn_linear()
    for matrix in (weight, torch_private.onednn_pack(weight, 5)):
        torch.testing.assert_close(torch_private.onednn_linear(x, matrix, bias), expected)
    assert public(torch.ops.mkldnn, "linear") <= {"linear"}, "oneDNN's matmul is public: use it"


def test_conversion() -> None:
    class Wide(torch_private.ConversionHook):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)

        def adjust_converted(self, before: Tensor, after: Tensor) -> Tensor:
            return before if before is self.scale else after

    module = Wide().to(torch.bfloat16)
    assert (module.scale.dtype, module.linear.weight.dtype) == (torch.float32, torch.bfloat16)
    known = {"backward_hook", "buffer", "forward_hook", "forward_pre_hook", "full_backward_hook"}
    known |= {"full_backward_pre_hook", "load_state_dict_post_hook", "load_state_dict_pre_hook", "module", "parameter"}
    known |= {"state_dict_post_hook", "state_dict_pre_hook"}
    hooks = {name.removeprefix("register_") for name in public(nn.Module, "register_")}
    assert hooks <= known, "can a new public hook adjust converted tensors?"


# No other module uses private names


def private_uses(path: Path) -> Iterator[str]:
    """Yield the uses of private PyTorch names in a module, and its changes of PyTorch classes."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    imports = [
        (local, name, node.lineno)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for local, name in imported_names(node)
        if name.split(".")[0] == "torch"
    ]
    yield from (f"{line}: import of {name}" for _, name, line in imports if any(map(is_private, name.split("."))))
    torch_names = {local for local, _, _ in imports}
    known = OTHER_PRIVATE | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    known |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
    for node in attributes:
        text, stored = ast.unparse(node), isinstance(node.ctx, ast.Store)
        of_torch = text.split(".")[0] in torch_names
        # The private methods of a base class are archon's, except of nn.Module.
        inherited = is_self(node.value) and node.attr not in MODULE_PRIVATE
        uses_private = is_private(node.attr) and (of_torch or not (node.attr in known or inherited))
        overrides = text.startswith("super()._") and node.attr in MODULE_PRIVATE
        if uses_private or overrides or (stored and (of_torch or node.attr == "__class__")):
            yield f"{node.lineno}: {text}"
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            changes = ast.unparse(node.func) == "setattr" and ast.unparse(node.args[0]).split(".")[0] in torch_names
            if changes or (is_private(name) and name not in known):
                yield f"{node.lineno}: {ast.unparse(node)}"


def imported_names(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Return the (local name, dotted name) of each import."""
    if isinstance(node, ast.ImportFrom):
        return [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    return [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.expr) -> bool:
    """Return whether a node is `self`, `cls` or `super()`."""
    return ast.unparse(node) in ("self", "cls", "super()")


def test_no_other_module_uses_private_names() -> None:
    found = {path: list(private_uses(path)) for path in PRODUCT if path.name != "torch_private.py"}
    assert {str(path): uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "code",
    [
        "from torch._dynamo import reset",
        "from torch.utils._pytree import tree_leaves",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "import torch\ntorch._foreach_norm([])",
        "import torch\ntorch.nn.Linear.forward = None",
        "import torch\nsetattr(torch.nn.Linear, 'forward', None)",
        "def f(mesh):\n    return getattr(mesh, '_pg_registry', {})",
        "def f(block, block_class):\n    block.__class__ = block_class",
        "def f(group):\n    return group._get_backend('cpu')",
        "class Block(Module):\n    def _apply(self, fn):\n        return super()._apply(fn)",
        "class Block(Module):\n    def part(self, name):\n        return self._modules[name]",
    ],
)
def test_uses_of_private_names_are_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(private_uses(tmp_path / "module.py"))
