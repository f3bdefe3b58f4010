"""Mistakes with the pictures of prompts: generation and requests."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GENERATED = "tests/generation/test_images.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "what is decoded after a picture stands at its number among the tokens",
        "models/attention/decode/paged.py",
        "positions[: self.n_decode] += self.decode.offsets",
        "positions[: self.n_decode] += 0",
        (f"{GENERATED}::test_sampled_logprobs_are_those_of_a_packed_forward[qwen3_5]",),
    ),
    Mutant(
        "prompts of equal tokens share their pages whatever their pictures are",
        "archon/generation/sequence.py",
        "self.prompt_key = (self.lora, (*self.prompt, *self.images.key))",
        "self.prompt_key = (self.lora, (*self.prompt, 0))",
        (f"{GENERATED}::test_prompts_of_equal_tokens_and_other_pictures_share_nothing[qwen3_5]",),
    ),
    Mutant(
        "a prompt of the same tokens as the last one has its pictures",
        "archon/generation/images.py",
        "len(images) == len(self.images) and all(map(is_, images, self.images))",
        "len(images) == len(self.images)",
        (f"{GENERATED}::test_prompts_of_equal_tokens_and_other_pictures_share_nothing",),
    ),
    Mutant(
        "after an update pictures are those of the tower before it",
        "archon/generation/generator.py",
        "self.image_cache.clear()",
        "pass",
        (f"{GENERATED}::test_an_update_of_the_weights_is_seen_by_the_tower_and_by_answers_that_go_on[qwen3_5]",),
    ),
    Mutant(
        "a request names a file of the server as its picture",
        "archon/serve/images.py",
        'if source[:5].lower() != "data:":',
        'if "://" in source:',
        ("tests/serve/test_images.py::test_what_cannot_be_seen_is_refused_in_one_line[qwen3_5]",),
    ),
    Mutant(
        "questions of all kinds are asked about drawn pictures, whatever kinds are wanted",
        "archon/data/shapes.py",
        'kinds = [*KINDS] if subset is None else subset.split("+")',
        "kinds = [*KINDS]",
        ("tests/data/test_shapes.py::test_a_subset_has_questions_of_its_kinds_alone[count-asked0]",),
    ),
    Mutant(
        "a tokenizer is trained on what stands for a picture in a text",
        "rl/bootstrap.py",
        'texts = [text.replace(IMAGE, "") for row in rows',
        "texts = [text for row in rows",
        ("tests/rl/test_bootstrap.py::test_bpe_is_trained_on_the_questions_of_a_dataset_with_pictures",),
    ),
)
