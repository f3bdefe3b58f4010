"""Mistakes in the maps between a checkpoint's tensors and parameters."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUSED = "tests/checkpoint/test_fused.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "experts of a file are stacked in the order of their names, 10 before 2",
        "models/hf/state_dict.py",
        "for row in sorted(by_row)])",
        "for row in sorted(by_row, key=str)])",
        ("tests/models/test_state_dict.py",),
    ),
    Mutant(
        "gate and up of a model in memory change places",
        "models/hf/names.py",
        'Fused((f"{stack}.w1", f"{stack}.w3"), dim=1)',
        'Fused((f"{stack}.w3", f"{stack}.w1"), dim=1)',
        ("tests/models/test_in_memory.py",),
    ),
    Mutant(
        "the square down projection of gpt-oss is read the other way round",
        "models/gpt_oss.py",
        'Fused((f"{_EXPERTS}w2",), transposed=True)',
        'Fused((f"{_EXPERTS}w2",))',
        ("tests/models/test_gpt_oss.py::test_experts_as_the_checkpoint_stores_them",),
    ),
    Mutant(
        "gate and up of gpt-oss are halves of the columns",
        "models/gpt_oss.py",
        "dim=1, interleaved=True, transposed=True",
        "dim=1, transposed=True",
        ("tests/models/test_gpt_oss.py::test_experts_as_the_checkpoint_stores_them",),
    ),
    Mutant(
        "a square matrix is read in the other orientation",
        "archon/checkpoint/hf_reader.py",
        "transposed = target.is_transposed and not stored.is_native",
        "transposed = False",
        (f"{FUSED}::test_a_square_matrix_is_not_read_in_the_other_orientation",),
    ),
    Mutant(
        "4-bit experts are read in the orientation that the map declares",
        "archon/checkpoint/hf_reader.py",
        "target.is_transposed and not stored.is_native",
        "target.is_transposed",
        ("tests/checkpoint/test_quantized.py::test_gpt_oss_with_4_bit_experts_computes_what_transformers_does",),
    ),
    Mutant(
        "a transposed tensor is taken as it lies",
        "models/hf/fused_tensors.py",
        "(tensor.mT if self.transposed else tensor)",
        "tensor",
        ("tests/models/test_fused_tensors.py",),
    ),
    Mutant(
        "every part of a fused tensor begins with its first row",
        "models/hf/fused_tensors.py",
        "starts = [sum(sizes[:part]) for part in range(len(sizes))]",
        "starts = [0 for _ in sizes]",
        ("tests/models/test_fused_tensors.py",),
    ),
    Mutant(
        "a shard that begins within a block begins with the block",
        "models/hf/fused_tensors.py",
        "inside = slice(self.start + rows.start, self.start + rows.stop)",
        "inside = slice(self.start, self.start + rows.stop - rows.start)",
        ("tests/models/test_fused_tensors.py",),
    ),
    Mutant(
        "alternating columns are read one after the other",
        "models/hf/fused_tensors.py",
        "    if fused.interleaved:\n        blocks = shapes[0][dim]\n",
        "",
        ("tests/models/test_fused_tensors.py",),
    ),
    Mutant(
        "an export leaves out the keys that a model does not compute",
        "archon/checkpoint/hf_export.py",
        "yield partial(checkpoint.passthrough, stored_as)",
        "yield lambda dtype: {}",
        ("tests/checkpoint/test_passthrough.py::test_a_model_is_saved_with_the_carried_keys",),
    ),
    Mutant(
        "a pipeline sends a router's bias in the parameters' dtype",
        "archon/engine/engine_io.py",
        "wide = torch.promote_types(self.built.builder.master_dtype, torch.float32)",
        "wide = self.built.builder.master_dtype",
        ("tests/distributed/test_fused.py::test_a_pipeline_in_bfloat16_exports_the_routers_bias_in_float32",),
    ),
    Mutant(
        "encoders are exported with the names of the file, and the decoder with others",
        "models/hf/state_dict.py",
        'return text.partition("*")[0] + hf_name.removeprefix(other.partition("*")[0])',
        "return hf_name",
        (
            "tests/models/test_composite_names.py::test_every_naming_is_read_and_exported_with_the_names_of_transformers",
        ),
    ),
    Mutant(
        "a composite config may cap logits that its model does not cap",
        "models/hf/config.py",
        "            if text.get(name) is not None:\n",
        "            if False:\n",
        ("tests/models/test_composite_names.py::test_a_soft_cap_that_a_composite_model_does_not_apply_is_refused",),
    ),
    Mutant(
        "of two namings with the same embedding the first is taken, whatever names the layers have",
        "models/hf/state_dict.py",
        "max(known, key=lambda a: len(a._targets.keys() & keys), default=self)",
        "next(iter(known), self)",
        ("tests/models/test_composite_names.py::test_kimi_files_of_transformers_are_read_and_exported_as_released",),
    ),
    Mutant(
        "widths of latent heads are looked for next to the text part alone",
        "models/args/latent.py",
        'config["text_config"] = text = dict(config["text_config"])',
        'config["text_config"] = dict(config["text_config"])',
        ("tests/models/test_composite_names.py::test_published_composite_configs_give_the_decoders_parameter_count",),
    ),
    Mutant(
        "stacked experts of a composite checkpoint are always as released",
        "models/hf/composite.py",
        "return adapter.stacked if tuple(tensors[key].shape)",
        "return adapter if tuple(tensors[key].shape)",
        ("tests/models/test_vision.py::test_experts_are_exported_as_released_and_read_in_both_orientations",),
    ),
    Mutant(
        "stacked experts of a composite checkpoint are exported as transformers 5 writes them",
        "models/qwen3_vl_moe.py",
        'Fused((f"{_EXPERTS}w2",), transposed=True)',
        'f"{_EXPERTS}w2"',
        ("tests/models/test_vision.py::test_experts_are_exported_as_released_and_read_in_both_orientations",),
    ),
    Mutant(
        "expert matrices may be square, so that no shape shows their orientation",
        "models/qwen3_vl_moe.py",
        "is_square = self.dim in (self.moe_hidden_dim, 2 * self.moe_hidden_dim)",
        "is_square = self.dim == self.moe_hidden_dim",
        ("tests/models/test_vision.py::test_experts_that_are_not_computed_are_refused",),
    ),
)
