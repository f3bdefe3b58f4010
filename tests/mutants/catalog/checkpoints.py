"""Mistakes in reading and writing checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every piece of a matrix cut by columns is read from its first rows",
        "archon/checkpoint/tensor_reader.py",
        "first + row * row_bytes, view, shape[1:], tuple(inner)",
        "first, view, shape[1:], tuple(inner)",
        ("tests/checkpoint/test_parts.py",),
    ),
    Mutant(
        "a part of a state that lies in one stretch is read from the first row",
        "archon/checkpoint/tensor_reader.py",
        "first + offset, view",
        "entry.start + offset, view",
        ("tests/checkpoint/test_parts.py",),
    ),
    Mutant(
        "a part of a state is read from the first row of its file",
        "archon/checkpoint/tensor_reader.py",
        "first + row * row_bytes, view",
        "entry.start + row * row_bytes, view",
        ("tests/checkpoint/test_parts.py",),
    ),
    Mutant(
        "two tensors are the same when their first pieces are",
        "archon/checkpoint/hf_reader.py",
        "for offset in range(0, first.end - first.start, CHUNK_BYTES):",
        "for offset in range(0, min(first.end - first.start, CHUNK_BYTES), CHUNK_BYTES):",
        ("tests/checkpoint/test_parts.py",),
    ),
    Mutant(
        "an asynchronous save sees the steps that come after it",
        "archon/checkpoint/native.py",
        'data.detach().to("cpu", copy=True)',
        'data.detach().to("cpu")',
        ("tests/distributed/test_checkpoints.py::test_asynchronous_save_is_that_of_its_moment",),
    ),
    Mutant(
        "only the first file of a checkpoint is checked",
        "archon/checkpoint/state_file.py",
        "sorted(files)[rank::ranks]",
        "sorted(files)[rank:ranks]",
        ("tests/checkpoint/test_state.py",),
    ),
    Mutant(
        "one checkpoint more is kept than was asked for",
        "archon/checkpoint/native.py",
        "others[: max(0, len(others) - (keep - 1))]",
        "others[: max(0, len(others) - keep)]",
        ("tests/checkpoint/test_state.py",),
    ),
    Mutant(
        "without a pointer the oldest checkpoint is the latest",
        "archon/checkpoint/native.py",
        "return found[-1] if found else None",
        "return found[0] if found else None",
        ("tests/checkpoint/test_state.py",),
    ),
    Mutant(
        "what went wrong in the background is logged and forgotten",
        "archon/checkpoint/saver.py",
        "                self._error = error\n",
        "                pass\n",
        (
            "tests/distributed/test_checkpoints.py::test_a_save_that_one_rank_cannot_write_is_raised_later_on_every_rank",
        ),
    ),
    Mutant(
        "a file gets its name before its bytes are on the disk",
        "archon/checkpoint/safetensors_file.py",
        "        os.fsync(file.fileno())\n",
        "",
        ("tests/checkpoint/test_state.py", "tests/checkpoint/test_export.py"),
    ),
    Mutant(
        "gate and up of a fused matrix are cut together for tensor ranks",
        "archon/checkpoint/megatron/sharding.py",
        "return [part for key in keys for part in context.own_rows([context.full(key)])]",
        "return context.own_rows([context.full(key) for key in keys])",
        ("tests/checkpoint/test_megatron_files.py", "tests/checkpoint/test_megatron_core.py"),
    ),
    Mutant(
        "queries, keys and values are fused one below the other, not group by group",
        "archon/checkpoint/megatron/sharding.py",
        "    for group in range(groups):\n        for key in keys:\n",
        "    for key in keys:\n        for group in range(groups):\n",
        ("tests/checkpoint/test_megatron_files.py", "tests/checkpoint/test_megatron_core.py"),
    ),
    Mutant(
        "an export says the dtype of its first weight",
        "archon/checkpoint/hf_export.py",
        "widest = functools.reduce(torch.promote_types, dtypes)",
        "widest = next(iter(dtypes))",
        ("tests/checkpoint/test_export.py",),
    ),
    Mutant(
        "a sum that overflows makes finite weights infinite",
        "archon/checkpoint/hf_export.py",
        "return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())",
        "return bool(tensor.sum().isfinite())",
        ("tests/checkpoint/test_export.py::test_finite_weights_whose_sum_is_not_are_exported",),
    ),
)
