"""Mistakes in rotations and norms."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rotary angles in the compute dtype",
        "models/layers/rope.py",
        "        wide = torch.promote_types(dtype, torch.float32)\n",
        "        wide = dtype\n",
        ("tests/models/test_rope.py",),
    ),
    Mutant(
        "LongRoPE's long frequencies from the original context on, not beyond it",
        "models/layers/rope.py",
        "is_long = (lengths > original).unsqueeze(-1)",
        "is_long = (lengths >= original).unsqueeze(-1)",
        ("tests/models/test_rope.py",),
    ),
    Mutant(
        "the attention factor of YaRN multiplies the cosine alone",
        "models/layers/rope.py",
        "sin = angles.sin() * self.attention_factor",
        "sin = angles.sin()",
        ("tests/models/test_rope.py",),
    ),
    Mutant(
        "the norm is rounded after its weight",
        "models/layers/fused.py",
        "out.to(x.dtype) * weight",
        "(out * weight).to(x.dtype)",
        ("tests/models/test_layers.py",),
    ),
)
