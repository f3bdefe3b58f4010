"""Generation from prompts with pictures: transformers' greedy answers and scores, whatever is scheduled how."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models.vision.images import ProcessedImage
from archon.models.vision.language_model import VisionLanguageModel
from archon.schema.errors import RolloutError
from tests.models.test_vision import (
    IMAGE,
    Document,
    build,
    of_each_family,
    our_logits,
    random_document,
    random_fields,
    their_logits,
)
from tests.tolerances import PARITY_FP32

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
NEW_TOKENS = 6


def asked(document: Document, greedy: bool = True, tokens: int = NEW_TOKENS, **options: Any) -> ModelRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, greedy=greedy, **options)
    return ModelRequest(document.tokens.tolist(), gconfig, image_data=images(document))


def images(document: Document) -> list[ProcessedImage]:
    """The document's pictures."""
    patches = document.patches.split([height * width for height, width in document.grids])
    return [ProcessedImage(part, (1, *grid)) for part, grid in zip(patches, document.grids, strict=True)]


def documents_of(ours: VisionLanguageModel, seed: int) -> list[Document]:
    rng = random.Random(seed)
    return [random_document(rng, ours.args, images, torch.float32) for images in (0, 1, 3, 2)]  # type: ignore[arg-type]


@torch.inference_mode()
def their_answer(theirs: Any, document: Document) -> list[int]:
    """transformers' greedy answer, each token by a forward of all before it; ends where it is a placeholder."""
    tokens: list[int] = []
    for _ in range(NEW_TOKENS):
        text = torch.cat([document.tokens, torch.tensor(tokens, dtype=torch.int64)])
        logits = their_logits(theirs, Document(text, document.grids, document.patches))
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] == IMAGE:
            break
    return tokens


@of_each_family
@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_answers_and_scores_are_those_of_transformers_whatever_is_computed_together(
    seed: int, model_type: str
) -> None:
    theirs, ours = build(random_fields(seed, model_type), seed)
    documents = documents_of(ours, seed)
    wanted = [their_answer(theirs, document) for document in documents]
    # Prompts whole and in chunks that end within pictures; slots for all, and for fewer than there are answers.
    for options in ({"page_size": 4}, {"page_size": 2, "prefill_tokens": 5, "max_slots": 2}):
        engine = InProcessEngine.from_model(ours, max_seq_len=200, n_pages=200, **options)
        answers = engine.generate([asked(document) for document in documents for _ in range(2)])
        assert [answer.output_tokens for answer in answers[::2]] == wanted
        assert [answer.output_tokens for answer in answers[1::2]] == wanted
        assert engine._generator.image_cache.computed == 6  # once for the answers of a prompt
    for document in documents[1:]:
        scores = engine.prompt_logprobs(document.tokens.tolist(), images=images(document))
        logits = their_logits(theirs, document)[:-1].log_softmax(-1)
        expected = logits.gather(1, document.tokens[1:, None])[:, 0]
        assert (torch.tensor(scores) - expected).abs().max() <= PARITY_FP32 * expected.abs().max()


@of_each_family
def test_prompts_of_equal_tokens_and_other_pictures_share_nothing(model_type: str) -> None:
    _, ours = build(random_fields(1, model_type), 1)
    document = documents_of(ours, 1)[1]
    other = Document(document.tokens, document.grids, torch.randn_like(document.patches) * 3)
    engine = InProcessEngine.from_model(ours, max_seq_len=200, n_pages=200, page_size=4)
    together = engine.generate([asked(each, greedy=False, seed=7) for each in (document, other, document)])
    assert engine.stats.shared_prompts == 1
    alone = [engine.generate([asked(each, greedy=False, seed=7)])[0] for each in (document, other)]
    assert [each.output_logprobs for each in together[:2]] == [pytest.approx(each.output_logprobs) for each in alone]
    assert together[0].output_logprobs != together[1].output_logprobs


@of_each_family
def test_sampled_logprobs_are_those_of_a_packed_forward(model_type: str) -> None:
    _, ours = build(random_fields(2, model_type), 2)
    documents = documents_of(ours, 2)
    engine = InProcessEngine.from_model(ours, max_seq_len=200, n_pages=200, page_size=4, prefill_tokens=7)
    answers = engine.generate([asked(document, greedy=False, seed=3, tokens=12) for document in documents])
    for document, answer in zip(documents, answers, strict=True):
        output = answer.output_tokens[:-1] if answer.stop_reason == "abort" else answer.output_tokens
        text = torch.cat([document.tokens, torch.tensor(output)])
        with torch.no_grad():
            logits = our_logits(ours, [Document(text, document.grids, document.patches)]).log_softmax(-1)
        first = len(document.tokens)
        expected = logits[first - 1 : -1].gather(1, text[first:, None])[:, 0]
        assert answer.output_logprobs[: len(output)] == pytest.approx(expected.tolist(), abs=1e-5)


@of_each_family
def test_an_update_of_the_weights_is_seen_by_the_tower_and_by_answers_that_go_on(model_type: str) -> None:
    _, ours = build(random_fields(3, model_type), 3)
    document = documents_of(ours, 3)[2]
    engine = InProcessEngine.from_model(ours, weights="snapshot", max_seq_len=200, n_pages=200, page_size=4)
    generator, done = engine._generator, []
    sequence = generator.submit(asked(document), done.append)
    generator.step()
    first = list(sequence.output)
    with torch.no_grad():
        for parameter in ours.visual.parameters():
            parameter.mul_(-1.5)
    engine.update_weights(ours)
    while not done:
        generator.step()
    assert generator.image_cache.computed == 6
    text = torch.cat([document.tokens, torch.tensor(first)])
    following = engine.generate([asked(Document(text, document.grids, document.patches), tokens=NEW_TOKENS - 1)])[0]
    assert sequence.output == first + following.output_tokens
    assert not generator.image_cache._shared  # nothing is kept for requests that are over


@of_each_family
def test_what_is_wrong_with_the_pictures_of_a_request_is_said_in_one_line(model_type: str) -> None:
    _, ours = build(random_fields(4, model_type), 4)
    document = documents_of(ours, 4)[1]
    engine = InProcessEngine.from_model(ours, max_seq_len=200, n_pages=200)
    ids, (image,) = document.tokens.tolist(), images(document)
    for tokens, given, problem in (
        (ids, [], "placeholder tokens"),
        (ids, [image, image], "placeholder tokens"),
        ([1, 2], [image], "placeholder tokens"),
        (ids, ["data:image/png;base64,"], "image_data has a str"),
        (
            ids,
            [ProcessedImage(torch.zeros(image.pixel_values.shape[0], 5), image.grid)],
            "patches of an image have 5 values",
        ),
    ):
        with pytest.raises(RolloutError, match=problem) as raised:
            engine.generate([ModelRequest(tokens, image_data=given)])
        assert "\n" not in str(raised.value)
