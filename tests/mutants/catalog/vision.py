"""Mistakes in how images are computed, placed among the tokens and shared by ranks."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

VISION = "tests/models/test_vision.py"
PARITY = f"{VISION}::test_logits_and_every_gradient_equal_transformers_one_document_at_a_time"
IMAGES = "tests/engine/test_images.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rows and columns of images turn each other's frequencies",
        "models/layers/rope.py",
        "axes[frequency] = axis",
        "axes[frequency] = 3 - axis",
        (f"{PARITY}[1]", f"{PARITY}[3]"),
    ),
    Mutant(
        "text goes on after an image's rows, however many columns it has",
        "models/vision/images.py",
        "position += max(rows, columns)",
        "position += rows",
        (f"{VISION}::test_positions_equal_transformers_on_1000_random_interleavings",),
    ),
    Mutant(
        "patches of a square are in the order of the image",
        "models/vision/images.py",
        "squares.transpose(2, 3).reshape(2, -1)",
        "squares.reshape(2, -1)",
        (f"{PARITY}[1]", f"{PARITY}[3]", f"{PARITY}[4]"),
    ),
    Mutant(
        "a patch sees only the patches before it",
        "models/vision/tower.py",
        "AttentionSpec(spec.head_dim**-0.5, causal=False)",
        "AttentionSpec(spec.head_dim**-0.5, causal=True)",
        (f"{PARITY}[1]", f"{PARITY}[3]"),
    ),
    Mutant(
        "all images are one document",
        "models/vision/tower.py",
        "PackedAttention.from_lengths(counts, ",
        "PackedAttention.from_lengths((sum(counts),), ",
        (f"{VISION}::test_images_do_not_see_each_other",),
    ),
    Mutant(
        "an image's rows are added to the embedding of its placeholders",
        "models/qwen3_5.py",
        "hidden.index_copy(0, images.rows, merged)",
        "hidden.index_add(0, images.rows, merged)",
        (f"{PARITY}[1]", f"{PARITY}[3]"),
    ),
    Mutant(
        "a frozen tower is trained",
        "archon/engine/build.py",
        'self.config.vision == "frozen"',
        'self.config.vision == "thawed"',
        (f"{IMAGES}::test_a_tower_is_frozen_unless_it_is_to_be_trained",),
    ),
    Mutant(
        "a rank takes an image's first rows, whichever of its tokens it has",
        "parallel/context.py",
        "return places, found[places]",
        "return places, torch.arange(len(places))",
        (f"{FURTHER_MATRIX}[seeing-c2-float64-context_parallel=ulysses-vision=trained]",),
    ),
    Mutant(
        "each rank runs the tower for its own images alone",
        "archon/engine/train_step.py",
        "found = self.ranks.all_reduce_any([mb.has_images for mb in batches], self.device)",
        "found = [mb.has_images for mb in batches]",
        (f"{FURTHER_MATRIX}[seeing-d2-float64-vision=trained]",),
    ),
)
