"""Mistakes in what ranks share: tensors, experts, sequences, pipelines."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import MATRIX, PIPELINE
from tests.mutants.mutant import Mutant

CONSECUTIVE = "tests/distributed/test_consecutive_engines.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "equal meshes of two layouts have different process groups",
        "parallel/mesh.py",
        "@cache\ndef shared_group(",
        "def shared_group(",
        (f"{CONSECUTIVE}::test_consecutive_engines_use_their_own_groups[tied]",),
    ),
    Mutant(
        "the gradient norm distinguishes groups of the same ranks by name",
        "archon/engine/optim.py",
        "setdefault(tuple(map(ranks_of, groups)), ",
        "setdefault(tuple((group.name,) for group in groups), ",
        (f"{CONSECUTIVE}::test_groups_of_the_same_ranks_are_one_collective",),
    ),
    Mutant(
        "DTensor's caches keep the meshes of a destroyed default group",
        "parallel/mesh.py",
        "    clear_mesh_caches()\n",
        "",
        (f"{CONSECUTIVE}::test_meshes_of_a_destroyed_default_group_are_not_used",),
    ),
    Mutant(
        "the meshes of a layout outlive their default group",
        "parallel/dims.py",
        "return _meshes_of_world(default_group(), dims)",
        "return _meshes_of_world(None, dims)",
        (f"{CONSECUTIVE}::test_meshes_of_a_destroyed_default_group_are_not_used",),
    ),
    Mutant(
        "interleaved 1F1B has one pass, not two, more under way for each later rank",
        "archon/engine/memory/memory_model.py",
        "(stages - 1) * plan.pp + 2 * (plan.pp - 1 - rank) + 1",
        "(stages - 1) * plan.pp + (plan.pp - 1 - rank) + 1",
        (f"{PIPELINE}::test_as_many_passes_are_under_way_as_the_planner_counts",),
    ),
    Mutant(
        "the first token of padding is counted",
        "parallel/context.py",
        "self._layer_tokens < self.tokens",
        "self._layer_tokens <= self.tokens",
        (f"{PIPELINE}::test_padding_of_a_pipelines_micro_batches_is_counted_by_no_router",),
    ),
    Mutant(
        "a padding token's embedding has a gradient under tensor parallelism",
        "models/layers/linear.py",
        "weight, padding if padding in range(rows) else None)",
        "weight, None)",
        (f"{MATRIX}[biased-t4-float64]",),
    ),
    Mutant(
        "the bias of a row product is added on every tensor rank",
        "models/layers/linear.py",
        "out = reduce_scatter(self._product(x, weight, None, lora_mapping), self.tp)\n"
        "            return out if bias is None else out + bias",
        "return reduce_scatter(self._product(x, weight, bias, lora_mapping), self.tp)",
        (f"{MATRIX}[biased-t4-float64]",),
    ),
    Mutant(
        "ranks that share a key head take the first one's bias",
        "models/layers/linear.py",
        "bias = None if bias is None else bias[self.rows]",
        "bias = None if bias is None else bias[: weight.shape[0]]",
        (f"{MATRIX}[biased-t4-float64]",),
    ),
    Mutant(
        "ranks that share key heads take them in turn",
        "parallel/tensor.py",
        "start = group.rank * heads // group.size * rows",
        "start = group.rank % heads * rows",
        (f"{MATRIX}[few_kv-t4-float64]",),
    ),
    Mutant(
        "a rank's part is cut by FSDP before tensor parallelism",
        "parallel/fsdp.py",
        "sorted(range(mesh.ndim), key=lambda d: by_fsdp[d])",
        "sorted(range(mesh.ndim), key=lambda d: not by_fsdp[d])",
        ("tests/distributed/test_gather.py", "tests/distributed/test_checkpoints.py"),
    ),
    Mutant(
        "sums over ranks are means",
        "parallel/comm.py",
        '_ops.reduce_scatter_tensor(x.contiguous(), "sum"',
        '_ops.reduce_scatter_tensor(x.contiguous(), "avg"',
        (f"{MATRIX}[dense-t2-float64]",),
    ),
    Mutant(
        "rows that came from other ranks are given to experts in the order they came",
        "parallel/expert.py",
        "return rows.index_select(0, order), incoming.sum(0)",
        "return rows, incoming.sum(0)",
        (f"{MATRIX}[moe-d2e2-float64-router_aux_loss_coef=0.1]",),
    ),
    Mutant(
        "one block more than the first n recomputes",
        "archon/schema/config.py",
        'return position <= int(self.selective.removeprefix("first "))',
        'return position <= int(self.selective.removeprefix("first ")) + 1',
        ("tests/parallel/test_decoder.py::test_the_first_blocks_recompute",),
    ),
    Mutant(
        "auto recomputes every block where fewer suffice",
        "archon/engine/memory/recompute.py",
        "high, best = middle, trial",
        "high = middle",
        ("tests/engine/test_recompute.py",),
    ),
    Mutant(
        "auto takes all of the free memory",
        "archon/engine/memory/recompute.py",
        "return free - RESERVE[device.type] if budget is None else int(budget * GIB)",
        "return free if budget is None else int(budget * GIB)",
        ("tests/engine/test_recompute.py::test_the_budget_is_configured_or_the_memory_without_a_margin",),
    ),
    Mutant(
        "auto counts on no fragmentation",
        "archon/engine/memory/recompute.py",
        "return self.memory.total + int(FRAGMENTATION * self.memory.step)",
        "return self.memory.total",
        ("tests/engine/test_recompute.py",),
    ),
    Mutant(
        "a layer without a formula is counted by the formula of its base class",
        "archon/engine/memory/activations.py",
        "if type(kind) not in formulas.registry]",
        "if not isinstance(kind, tuple(formulas.registry))]",
        ("tests/engine/test_traced_block.py",),
    ),
    Mutant(
        "a dry run of a block counts its weights among its activations",
        "archon/engine/memory/traced_block.py",
        'if key not in weights and tensor.device.type != "meta":',
        'if tensor.device.type != "meta":',
        ("tests/engine/test_traced_block.py",),
    ),
    Mutant(
        "attention is as fast with few keys as with many",
        "archon/tools/planner/hardware.py",
        "return self.flops * keys / (keys + self.half_keys)",
        "return self.flops",
        ("tests/tools/planner/test_time.py",),
    ),
    Mutant(
        "a recomputed forward of attention takes as long as forward and backward",
        "archon/tools/planner/time_model.py",
        "attention *= ATTENTION_FORWARD_FLOPS / ATTENTION_FLOPS",
        "attention *= 1",
        ("tests/tools/planner/test_time.py::test_a_recomputed_forward_of_attention_is_four_fourteenths_of_it",),
    ),
    Mutant(
        "the planner reads and writes the logits once",
        "archon/tools/planner/time_model.py",
        "elementwise += hw.head_passes * T * vocab / tp * b / self._memory",
        "elementwise += T * vocab / tp * b / self._memory",
        ("tests/tools/planner/test_time.py::test_steps_measured_on_an_h100_are_predicted",),
    ),
    Mutant(
        "the first block is recomputed in place of the n-th",
        "archon/schema/config.py",
        "return position % self.selective == 0",
        "return position % self.selective == 1 % self.selective",
        ("tests/parallel/test_decoder.py",),
    ),
    Mutant(
        "documents of a rank's share begin at its own first token",
        "parallel/context.py",
        "        return positions.index_select(0, self.index)\n",
        "        return positions[: len(self.index)]\n",
        (f"{MATRIX}[window-c2-float64-context_parallel=ulysses]",),
    ),
)
