"""Mistakes in dequantizing checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

QUANTIZED = "tests/checkpoint/test_quantized.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "scales count rows from the first that a rank reads",
        "archon/checkpoint/quantized.py",
        "rows = torch.arange(first, first + data.shape[0])",
        "rows = torch.arange(data.shape[0])",
        (f"{QUANTIZED}::test_blocks_at_the_edges_are_smaller_and_rows_count_from_the_first_of_their_matrix",),
    ),
    Mutant(
        "the last, smaller block of a matrix shares the next matrix's scale",
        "archon/checkpoint/quantized.py",
        "rows // n_rows * -(-n_rows // height)",
        "rows // n_rows * (n_rows // height)",
        (f"{QUANTIZED}::test_blocks_at_the_edges_are_smaller_and_rows_count_from_the_first_of_their_matrix",),
    ),
    Mutant(
        "scales stored as exponents are read as integers",
        "archon/checkpoint/quantized.py",
        "data = data.view(torch.float8_e8m0fnu)",
        "data = data.to(torch.float32)",
        (f"{QUANTIZED}::test_fp8_is_what_transformers_makes_of_it",),
    ),
    Mutant(
        "the high half of a byte comes first",
        "archon/checkpoint/quantized.py",
        "[_E2M1[byte & 15], _E2M1[byte >> 4]]",
        "[_E2M1[byte >> 4], _E2M1[byte & 15]]",
        (f"{QUANTIZED}::test_mxfp4_is_what_transformers_makes_of_it",),
    ),
    Mutant(
        "a missing scale is no error",
        "archon/checkpoint/quantized.py",
        "if base in expected and (base != key or (quantization is not None and entry.dtype == torch.float8_e4m3fn)):",
        "if base in expected and base != key:",
        (f"{QUANTIZED}::test_a_defect_of_fp8_is_named",),
    ),
    Mutant(
        "carried 8-bit floats keep their scales in an export that is not quantized",
        "archon/checkpoint/hf_reader.py",
        "known = {*adapter.hf_shapes(), *filter(adapter.is_passthrough, weights)}",
        "known = {*adapter.hf_shapes()}",
        (f"{QUANTIZED}::test_deepseek_v3_of_fp8_blocks_computes_what_transformers_does",),
    ),
    Mutant(
        "one further layer is carried, whatever the config says",
        "models/hf/state_dict.py",
        "range(last, last + count)",
        "range(last, last + 1)",
        ("tests/models/test_latent_families.py::test_as_many_further_layers_are_carried_as_the_config_says",),
    ),
    Mutant(
        "OLMo 3's cos and sin are rounded",
        "models/olmo3.py",
        "replace(spec, rounds_once=True)",
        "replace(spec, rounds_once=False)",
        ("tests/models/test_bfloat16.py::test_olmo3_rounds_its_rotation_once_as_transformers_does",),
    ),
    Mutant(
        "ignored_layers is not read",
        "models/hf/quantization.py",
        'for field in ("modules_to_not_convert", "ignored_layers")',
        'for field in ("modules_to_not_convert",)',
        ("tests/checkpoint/test_quantized.py::test_a_module_that_is_not_to_be_quantized_is_not",),
    ),
    Mutant(
        "ignored_layers is read where modules_to_not_convert is missing alone",
        "models/hf/quantization.py",
        '[name for field in ("modules_to_not_convert", "ignored_layers") for name in value.get(field) or ()]',
        'value.get("modules_to_not_convert") or value.get("ignored_layers") or []',
        ("tests/checkpoint/test_quantized.py::test_a_module_that_is_not_to_be_quantized_is_not",),
    ),
    Mutant(
        "4-bit integers are stored without their offset",
        "archon/checkpoint/quantized.py",
        ".sub_(8)",
        "",
        ("tests/checkpoint/test_quantized.py::test_4_bit_integers_are_dequantized_and_exported_as_weights",),
    ),
    Mutant(
        "the stored shape of packed integers is not checked",
        "archon/checkpoint/quantized.py",
        "if tuple(sizes.tolist()) != shape or",
        "if",
        ("tests/checkpoint/test_quantized.py::test_a_defect_of_4_bit_integers_is_named",),
    ),
    Mutant(
        "of a choice of ignored names only the first is unquantized",
        "models/hf/quantization.py",
        'for part in choice[2].split("|")]',
        'for part in choice[2].split("|")[:1]]',
        ("tests/checkpoint/test_quantized.py::test_the_ignored_names_of_kimi_k2_leave_the_experts_alone_in_4_bits",),
    ),
)
