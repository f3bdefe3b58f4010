"""Mistakes in data and supervised training."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the token that follows an answer is trained",
        "archon/data/encoding.py",
        "any(start <= begin < end for start, end in example.spans)",
        "any(start <= begin <= end for start, end in example.spans)",
        ("tests/data/test_encoding.py",),
    ),
    Mutant(
        "every answer of a conversation is preferred, not the last alone",
        "archon/data/pairs.py",
        "examples.append(text._replace(spans=text.spans[-1:]))",
        "examples.append(text)",
        ("tests/data/test_pairs.py",),
    ),
    Mutant(
        "rows come in the same order in every epoch",
        "archon/data/loader.py",
        'random.Random(f"rows {self.seed} {epoch}")',
        'random.Random(f"rows {self.seed} 0")',
        ("tests/data/test_loader.py",),
    ),
    Mutant(
        "the preference of an answer is not taken less the reference's",
        "archon/training/preference.py",
        "            numbers = numbers - self._numbers(self.reference, batch)\n",
        "            self._numbers(self.reference, batch)\n",
        ("tests/rl/test_preference.py",),
    ),
    Mutant(
        "a held-out loss is the mean of the batches' means",
        "archon/training/sft.py",
        'weight = measured.pop("loss_weight")\n',
        'measured.pop("loss_weight")\n            weight = 1.0\n',
        ("tests/rl/test_sft.py::test_evaluation_loss_is_per_token_whatever_the_batch_size",),
    ),
    Mutant(
        "a stand-in for a missing document is trained on",
        "archon/training/batch_sharding.py",
        '    spare["loss_mask"].zero_()\n',
        "",
        ("tests/rl/test_sharding.py",),
    ),
)
