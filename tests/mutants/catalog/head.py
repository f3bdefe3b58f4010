"""Mistakes in the head: scores of tokens, entropies, values."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import MATRIX
from tests.mutants.mutant import Mutant

KERNEL, TILES = "models/cuda/head.py", "models/layers/logit_tiles.py"
KERNEL_TESTS = "tests/models/cuda/test_head.py"
KERNEL_FORMULA = (f"{KERNEL_TESTS}::test_sums_and_gradient_equal_the_formula",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the head's gradient of hidden states summed over the vocabulary in the compute dtype",
        TILES,
        "x.new_empty(x.shape, dtype=wide) if x is not None and needed",
        "x.new_empty(x.shape, dtype=x.dtype if x is hidden else wide) if x is not None and needed",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the head's gradient of its weight summed over the rows in the compute dtype",
        TILES,
        "x.new_empty(x.shape, dtype=wide) if x is not None and needed",
        "x.new_empty(x.shape, dtype=x.dtype if x is weight else wide) if x is not None and needed",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "a critic's values keep the compute dtype",
        "models/base.py",
        "return values.to(torch.promote_types(values.dtype, torch.float32))",
        "return values",
        ("tests/models/test_model.py",),
    ),
    Mutant(
        "the entropy of the head loses its running maximum",
        TILES,
        "self.weighted.add_(self.total * drop.clamp(min=torch.finfo(drop.dtype).min)).mul_(decay)",
        "self.weighted.mul_(decay)",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "a row's own temperature weighs its logits and not its gradient",
        TILES,
        "factor = weights[r0:r1] * projection.scale(r0, r1)",
        "factor = weights[r0:r1]",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "labels of a split vocabulary are counted from its first row on every rank",
        "models/layers/token_scores.py",
        "return labels if group is None else labels - group.rank * weight.shape[0]",
        "return labels",
        (f"{MATRIX}[dense-t2-float64]",),
    ),
    Mutant(
        "the entropy over a split vocabulary is the sum of the ranks' own",
        TILES,
        "entropy = full - all_reduce((lse - full).exp() * (lse - entropy), group)",
        "entropy = all_reduce((lse - full).exp() * entropy, group)",
        (f"{MATRIX}[dense-t2-float64]",),
    ),
    Mutant(
        "the fused loss leaves out the derivative of the soft cap",
        TILES,
        "                    tile.mul_(cap_slope)\n",
        "",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the gradient of scores leaves out the derivative of the soft cap",
        TILES,
        "tile = tile if cap_slope is None else tile.mul_(cap_slope)",
        "tile = tile if cap_slope is None else tile",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the temperature divides the logits before their soft cap",
        TILES,
        "return tile.div_(self.soft_cap).tanh_().mul_(self.soft_cap * scale)",
        "return tile.mul_(scale).div_(self.soft_cap).tanh_().mul_(self.soft_cap)",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the head's kernel reads the logit after the label's",
        KERNEL,
        "tl.load(logits + label, mask=inside, other=0.0)",
        "tl.load(logits + label + 1, mask=inside, other=0.0)",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel takes the column after the label for the label",
        KERNEL,
        "tl.where(column == label, label_grad, 0.0)",
        "tl.where(column == label + 1, label_grad, 0.0)",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel leaves the temperature out of its gradient",
        KERNEL,
        "* _slope(x, scale, soft_cap)",
        "* _slope(x, 1.0, soft_cap)",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel scales all rows by the first row's temperature",
        KERNEL,
        "scale = tl.load(scales + row)",
        "scale = tl.load(scales)",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel takes the maximum of half a row",
        KERNEL,
        "top = tl.maximum(maximum, tl.max(x, 0))",
        "top = tl.maximum(maximum, tl.max(tl.where(start + columns < VOCAB // 2, x, -3.4e38), 0))",
        (f"{KERNEL_TESTS}::test_large_logits_stay_finite",),
    ),
    Mutant(
        "the head's kernel does not rescale its sum to a new maximum",
        KERNEL,
        "total = total * decay + tl.sum(exponentials, 0)",
        "total = total + tl.sum(exponentials, 0)",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel leaves out the derivative of the soft cap",
        KERNEL,
        "scale = scale * 4.0 * decay / ((1.0 + decay) * (1.0 + decay))",
        "scale = scale * 1.0",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel does not move the terms of the entropy to a new maximum",
        KERNEL,
        "weighted += tl.where(total > 0, total * (maximum - top), 0.0)",
        "weighted += 0.0",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel leaves the entropy out of the entropy's gradient",
        KERNEL,
        "p * row_entropy_grad * (log_p + row_entropy)",
        "p * row_entropy_grad * log_p",
        KERNEL_FORMULA,
    ),
    Mutant(
        "the head's kernel multiplies a probability of 0 by minus infinity",
        KERNEL,
        "tl.where(exponentials > 0, exponentials * (x - top), 0.0)",
        "tl.where(valid, exponentials * (x - top), 0.0)",
        (f"{KERNEL_TESTS}::test_logits_of_minus_infinity_have_probability_0",),
    ),
    Mutant(
        "a later tile of the head's kernel has the labels of the first",
        TILES,
        "return logits, self.labels[tile], self.inv_temperature, None, self.soft_cap",
        "return logits, self.labels[: len(logits)], self.inv_temperature, None, self.soft_cap",
        (f"{KERNEL_TESTS}::test_weighted_loss_of_the_head",),
    ),
    Mutant(
        "a later tile of the head's kernel starts the gradient of the weight again",
        TILES,
        "accumulate_matmul(matrix_grad, grad.t(), rows[tile], first=tile.start == 0)",
        "accumulate_matmul(matrix_grad, grad.t(), rows[tile], first=True)",
        (f"{KERNEL_TESTS}::test_weighted_loss_of_the_head",),
    ),
    Mutant(
        "a rank's kernel takes the sums of its columns for those of the vocabulary",
        TILES,
        "lse[tile], label_logits[tile], _ = _reduce_over_ranks(scores, self.group)",
        "_reduce_over_ranks(scores, self.group)",
        (f"{KERNEL_TESTS}::test_a_vocabulary_split_over_ranks",),
    ),
)
