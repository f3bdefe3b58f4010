"""Mistakes in how images are computed, placed among the tokens and shared by ranks."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX
from tests.mutants.mutant import Mutant

VISION = "tests/models/test_vision.py"
_PARITY = f"{VISION}::test_logits_and_every_gradient_equal_transformers_one_document_at_a_time"


def parity(*seeds: int, family: str = "qwen3_5") -> tuple[str, ...]:
    """The tests of these seeds."""
    return tuple(f"{_PARITY}[{seed}-{family}]" for seed in seeds)


IMAGES = "tests/engine/test_images.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rows and columns of images turn each other's frequencies",
        "models/layers/rope.py",
        "axes[frequency] = axis",
        "axes[frequency] = 3 - axis",
        parity(1, 3),
    ),
    Mutant(
        "text goes on after an image's rows, however many columns it has",
        "models/vision/images.py",
        "position += max(rows, columns)",
        "position += rows",
        (f"{VISION}::test_positions_equal_transformers_on_1000_random_interleavings[qwen3_5]",),
    ),
    Mutant(
        "patches of a square are in the order of the image",
        "models/vision/images.py",
        "squares.transpose(2, 3).reshape(2, -1)",
        "squares.reshape(2, -1)",
        parity(1, 3, 4),
    ),
    Mutant(
        "a patch sees only the patches before it",
        "models/vision/encoder.py",
        "AttentionSpec(spec.head_dim**-0.5, causal=False)",
        "AttentionSpec(spec.head_dim**-0.5, causal=True)",
        parity(1, 3),
    ),
    Mutant(
        "all images are one document",
        "models/vision/encoder.py",
        "PackedAttention.from_lengths(counts, ",
        "PackedAttention.from_lengths((sum(counts),), ",
        (f"{VISION}::test_images_do_not_see_each_other[qwen3_5]",),
    ),
    Mutant(
        "an image's rows are added to the embedding of its placeholders",
        "models/vision/images.py",
        "hidden.index_copy(0, self.tokens, self.features[:, 0]",
        "hidden.index_add(0, self.tokens, self.features[:, 0]",
        parity(1, 3),
    ),
    Mutant(
        "a frozen tower is trained",
        "archon/engine/build.py",
        'self.config.vision == "frozen"',
        'self.config.vision == "thawed"',
        (f"{IMAGES}::test_a_tower_is_frozen_unless_it_is_to_be_trained[qwen3_5]",),
    ),
    Mutant(
        "a rank takes an image's first rows, whichever of its tokens it has",
        "parallel/context.py",
        "return places, local_number[places]",
        "return places, torch.arange(len(places))",
        (f"{FURTHER_MATRIX}[seeing-c2-float64-context_parallel=ulysses-vision=trained]",),
    ),
    Mutant(
        "each rank runs the tower for its own images alone",
        "archon/engine/plan.py",
        "return self.ranks.all_reduce_any(has_images, self.device)",
        "return has_images",
        (f"{FURTHER_MATRIX}[seeing-d2-float64-vision=trained]",),
    ),
    Mutant(
        "each of the first layers is given what the next one is to be given",
        "models/vision/images.py",
        "self.features[:, layer + 1]",
        "self.features[:, -1 - layer]",
        parity(2, 3, family="qwen3_vl"),
    ),
    Mutant(
        "the angles of patches are not sorted by window",
        "models/vision/encoder.py",
        "x, coordinates = self._sort(x, order), self._sort(coordinates.t(), order).t()",
        "x = self._sort(x, order)",
        parity(0, 1, 2, family="qwen2_5_vl"),
    ),
    Mutant(
        "the rows of an image stay sorted by window",
        "models/vision/encoder.py",
        "merged.index_select(0, order.argsort())",
        "merged",
        parity(0, 1, 2, family="qwen2_5_vl"),
    ),
    Mutant(
        "no block attends to a whole image",
        "models/vision/encoder.py",
        "in_image if layer in self.spec.full_attention else in_window",
        "in_window",
        parity(0, 1, 2, family="qwen2_5_vl"),
    ),
    Mutant(
        "a window has as many decoder rows as patches fit in it",
        "models/vision/windowed.py",
        'values["merge_size"] * values["patch_size"]',
        'values["patch_size"]',
        parity(0, 1, 2, family="qwen2_5_vl"),
    ),
    Mutant(
        "consecutive sections of positions are interleaved",
        "models/vision/language_model.py",
        "consecutive_sections=not self.mrope_interleaved",
        "consecutive_sections=False",
        parity(0, 1, 2, family="qwen2_5_vl"),
    ),
    Mutant(
        "the gate and the up projection of stacked experts change places",
        "models/qwen3_vl_moe.py",
        'Fused((f"{_EXPERTS}w1", f"{_EXPERTS}w3")',
        'Fused((f"{_EXPERTS}w3", f"{_EXPERTS}w1")',
        parity(2, 3, family="qwen3_vl_moe"),
    ),
    Mutant(
        "layers that are given features may be on any stage of a pipeline",
        "models/vision/language_model.py",
        "deepstack_layers=len(self.vision.deepstack)",
        "deepstack_layers=0",
        ("tests/parallel/test_resolve.py::test_layers_that_a_tower_gives_features_are_on_the_first_stage",),
    ),
    Mutant(
        "a file that is cut short ends the request with an error of Pillow's",
        "archon/data/images.py",
        "decoded = _on_white(image) if frames == 1 else None\n    except Exception as error:",
        "decoded = _on_white(image) if frames == 1 else None\n    except OSError as error:",
        (
            "tests/data/test_images.py::test_files_that_are_cut_or_have_wrong_bytes_are_read_or_refused_in_one_line[animation]",
        ),
    ),
)
