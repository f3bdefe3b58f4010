"""Mistakes in the head: scores of tokens, entropies, values."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import MATRIX
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the head's gradient of hidden states summed over the vocabulary in the compute dtype",
        "models/layers/token_scores.py",
        "hidden.new_empty(hidden.shape, dtype=wide) if needs_hidden",
        "hidden.new_empty(hidden.shape) if needs_hidden",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the head's gradient of its weight summed over the rows in the compute dtype",
        "models/layers/token_scores.py",
        "weight.new_empty(weight.shape, dtype=wide) if needs_weight",
        "weight.new_empty(weight.shape) if needs_weight",
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
        "models/layers/token_scores.py",
        "self.weighted.add_(self.total * drop.clamp(min=torch.finfo(drop.dtype).min)).mul_(decay)",
        "self.weighted.mul_(decay)",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "a row's own temperature weighs its logits and not its gradient",
        "models/layers/token_scores.py",
        "factor = weights[r0:r1].unsqueeze(1) * projection.scale(r0, r1)",
        "factor = weights[r0:r1].unsqueeze(1)",
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
        "models/layers/token_scores.py",
        "entropy = full - all_reduce((lse - full).exp() * (lse - entropy), group)",
        "entropy = all_reduce((lse - full).exp() * entropy, group)",
        (f"{MATRIX}[dense-t2-float64]",),
    ),
    Mutant(
        "the fused loss leaves out the derivative of the soft cap",
        "models/layers/token_scores.py",
        "                    tile.mul_(cap_slope)\n",
        "",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the gradient of scores leaves out the derivative of the soft cap",
        "models/layers/token_scores.py",
        "tile = tile if cap_slope is None else tile.mul_(cap_slope)",
        "tile = tile if cap_slope is None else tile",
        ("tests/models/test_head.py",),
    ),
    Mutant(
        "the temperature divides the logits before their soft cap",
        "models/layers/token_scores.py",
        "return tile.div_(self.soft_cap).tanh_().mul_(self.soft_cap * scale)",
        "return tile.mul_(scale).div_(self.soft_cap).tanh_().mul_(self.soft_cap)",
        ("tests/models/test_head.py",),
    ),
)
