"""Mistakes in 8-bit products."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX, MATRIX
from tests.mutants.mutant import Mutant

LAYERS = "tests/models/test_fp8.py"
LINEAR = f"{LAYERS}::test_a_linear_layer_computes_what_plain_steps_do"
CONVERTED = f"{LAYERS}::test_which_layers_are_in_8_bits"
TENSOR_PARALLEL = f"{MATRIX}[fp8-t2-float64-fp8=tensorwise]"
ROWS_TENSOR_PARALLEL = f"{MATRIX}[fp8-t2-float64-fp8=rowwise]"
PADDED = (
    "tests/parallel/test_fp8.py::test_micro_batches_are_padded_with_their_first_token_where_they_have_one_scale[True]"
)
STAGES = f"{FURTHER_MATRIX}[fp8-p2-float64-pipeline={{'schedule': 'interleaved_1f1b'}}-fp8=tensorwise_inner]"
EXPERTS = f"{MATRIX}[fp8_moe-(attn:t2|ffn:t2)-float64-fp8=tensorwise]"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a scale is rounded twice, so that ties round the other way",
        "models/layers/fp8.py",
        "torch.finfo(dtype).max / amax.clamp(min=1e-12)",
        "1 / (amax.clamp(min=1e-12) / torch.finfo(dtype).max).float()",
        (f"{LAYERS}::test_scales_equal_those_of_torchao[False]",),
    ),
    Mutant(
        "the scales of rows are not rounded to powers of two, as torchao's are",
        "models/layers/fp8.py",
        "columns if by_row else (*scaling.tokens, *columns), by_row)",
        "columns if by_row else (*scaling.tokens, *columns), False)",
        (f"{LAYERS}::test_a_linear_layer_equals_the_recipe_of_torchao[rowwise-rowwise_with_gw_hp-dtype0]",),
    ),
    Mutant(
        "the scale of the whole weight is not rounded to a power of two in the backward of rowwise",
        "models/layers/fp8.py",
        "scaling.out_features), True)\n            matrix = quantize_with_scale",
        "scaling.out_features), False)\n            matrix = quantize_with_scale",
        (f"{LAYERS}::test_a_linear_layer_equals_the_recipe_of_torchao[rowwise-rowwise_with_gw_hp-dtype0]",),
    ),
    Mutant(
        "a GPU computes rowwise as torchao's recipe of that name, which rounds the operands of a weight's gradient",
        "models/layers/torchao_fp8.py",
        'True: torchao_recipe("rowwise_with_gw_hp")',
        'True: torchao_recipe("rowwise")',
        (f"{LAYERS}::test_the_function_that_cuda_runs_equals_the_emulation",),
    ),
    Mutant(
        "an expert's matrix has one scale in the forward of rowwise",
        "models/layers/fp8.py",
        "matrices = _quantize(weight, E4M3, scaling.by_row, groups, True)",
        "matrices = _quantize(weight, E4M3, False, groups, True)",
        (f"{LAYERS}::test_an_expert_equals_a_linear_layer_of_torchao",),
    ),
    Mutant(
        "compiled blocks hold experts whose products torch's compiler refuses",
        "models/layers/moe.py",
        "self._compute if self._can_compile(x) or not torch.compiler.is_compiling() else self._compute_eager",
        "self._compute",
        ("tests/engine/test_precision.py::test_compiled_experts_have_the_gradient_of_eager_ones[float32-none]",),
    ),
    Mutant(
        "blocks are left out of 8 bits by their place in a rank's stages",
        "parallel/fp8.py",
        "for index, block in layers.items() if blocks is None or int(index) in blocks",
        "for place, (index, block) in enumerate(layers.items()) if blocks is None or place in blocks",
        (STAGES,),
    ),
    Mutant(
        "the planner takes every block to be in 8 bits",
        "archon/tools/planner/time_model.py",
        "mean = share * narrow + (1 - share) * wide",
        "mean = narrow",
        ("tests/tools/planner/test_time.py::test_8_bit_products_take_the_time_of_their_rate",),
    ),
    Mutant(
        "the scale of an input covers only the features of one tensor-parallel rank",
        "parallel/fp8.py",
        "replace(whole, in_features=ranks.tp, tokens=(ranks.cp,))",
        "replace(whole, tokens=(ranks.cp,))",
        (TENSOR_PARALLEL,),
    ),
    Mutant(
        "the scale of a weight covers only the rows of one tensor-parallel rank",
        "models/layers/fp8.py",
        "columns if by_row else (*columns, scaling.out_features), by_row)",
        "columns, by_row)",
        (TENSOR_PARALLEL,),
    ),
    Mutant(
        "the scale of activations covers only the tokens of one context-parallel rank",
        "parallel/fp8.py",
        "replace(whole, out_features=ranks.tp, tokens=(ranks.cp,))",
        "replace(whole, out_features=ranks.tp)",
        (f"{MATRIX}[fp8-c2-float64-context_parallel=allgather-fp8=tensorwise]",),
    ),
    Mutant(
        "the scale of a latent's inputs covers only the tokens of one tensor-parallel rank",
        "parallel/fp8.py",
        "replace(whole, tokens=(ranks.cp, ranks.tp))",
        "replace(whole, tokens=(ranks.cp,))",
        (f"{FURTHER_MATRIX}[fp8_latent-t2-float64-fp8=tensorwise]",),
    ),
    Mutant(
        "padding has values of its own, which change a scale",
        "archon/engine/plan.py",
        "return padded.repeating_first() if self.repeats_first else padded",
        "return padded",
        (PADDED,),
    ),
    Mutant(
        "gradients are rounded as inputs are",
        "models/layers/fp8.py",
        "E4M3 if scaling.by_row else E5M2",
        "E4M3",
        (LINEAR,),
    ),
    Mutant(
        "a scale multiplies where it divides",
        "models/layers/fp8.py",
        "(x.to(scale.dtype) * scale)",
        "(x.to(scale.dtype) / scale)",
        (LINEAR,),
    ),
    Mutant(
        "rowwise rounds the operands of a weight's gradient too",
        "models/layers/fp8.py",
        "weight_grad = mm(grad.t(), x)",
        "weight_grad = mm(grad.t(), quantize_with_scale(x, x_scale, E4M3, True).dequantize(x.dtype))",
        (LINEAR,),
    ),
    Mutant(
        "the scale of an expert's hidden rows covers only the features of one rank",
        "parallel/fp8.py",
        '"w2": replace(whole, in_features=group)',
        '"w2": whole',
        (EXPERTS,),
    ),
    Mutant(
        "the scale of a row of an expert's gradient covers only the features of one rank",
        "models/layers/fp8.py",
        "grads = _quantize(grad, E4M3, True, (scaling.out_features,), True)",
        "grads = _quantize(grad, E4M3, True, (), True)",
        (EXPERTS,),
    ),
    Mutant(
        "the scale of a whole weight covers only the columns of one rank in the input gradient",
        "models/layers/fp8.py",
        "scale = compute_scale(weight, E4M3, False, (scaling.in_features, scaling.out_features), True)\n"
        "            matrix = quantize_with_scale",
        "scale = compute_scale(weight, E4M3, False, (), True)\n            matrix = quantize_with_scale",
        (ROWS_TENSOR_PARALLEL,),
    ),
    Mutant(
        "routers are rounded too",
        "parallel/fp8.py",
        '"latent": replace(',
        '"router": whole,\n        "latent": replace(',
        (CONVERTED,),
    ),
    Mutant(
        "gates of delta nets are rounded too",
        "models/layers/delta_net.py",
        "self.wa.quantizable = self.wb.quantizable = False",
        "self.wa.quantizable = self.wb.quantizable = True",
        (f"{LAYERS}::test_gates_of_delta_nets_are_not",),
    ),
    Mutant(
        "an adapter on an 8-bit base adds nothing",
        "models/layers/linear.py",
        "return self.apply_lora(fp8_linear(x, weight, bias, self.fp8), x, lora_mapping)",
        "return fp8_linear(x, weight, bias, self.fp8)",
        (f"{LAYERS}::test_an_adapter_adds_what_it_does_in_full_precision",),
    ),
    Mutant(
        "common beginnings are computed once, with the rounded sum of their gradients",
        "archon/engine/initialize.py",
        'and not gathers_keys and config.fp8 == "none"',
        "and not gathers_keys",
        (f"{LAYERS}::test_documents_that_begin_alike_are_computed_one_by_one",),
    ),
    Mutant(
        "the planner gives weights' gradients of rowwise products the 8-bit rate",
        "archon/tools/planner/time_model.py",
        'mean if config.fp8_recipe == "tensorwise" and not experts else wide',
        "mean",
        ("tests/tools/planner/test_time.py::test_8_bit_products_take_the_time_of_their_rate",),
    ),
)
