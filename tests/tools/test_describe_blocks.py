"""`archon inspect --blocks`: pseudo-code that names every parameter of each kind of block once."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from archon.models import BaseModelArgs, get_model_spec
from archon.models.base import TransformerBlock
from archon.models.spec import FAMILIES
from archon.models.vision.encoder import VisionSpec
from archon.tools.check.random_configs import draw_fields
from archon.tools.describe_blocks import _ranges, describe_blocks

NAMED = re.compile(r"([A-Za-z_][\w.]*): (?:(\d+) -> (\d+)|\[([\d, ]+)\])( \+ bias)?(?=,|$)")


def args_of(family: str, seed: int = 1, **changes: Any) -> BaseModelArgs:
    """Random arguments of a family; of a vision-language one those of its text decoder."""
    config = {**draw_fields(seed, family), "model_type": family} | changes
    return get_model_spec(family, text_only=True).model_args_class.from_hf_config(config)


def sections(args: BaseModelArgs) -> tuple[str, list[tuple[str, list[str]]], str]:
    """The lines before the blocks, heading and lines of each kind of block, and the lines after them."""
    first, *blocks, last = "\n".join(describe_blocks(args)).split("\n\n")
    return first, [(block.split("\n")[0], block.split("\n")[1:]) for block in blocks], last


def named_tensors(lines: list[str]) -> Counter[tuple[str, tuple[int, ...]]]:
    """Module or parameter names with the shapes in the text; biases have one dimension."""
    named: Counter[tuple[str, tuple[int, ...]]] = Counter()
    prefix = ""
    for line in lines:
        if match := re.fullmatch(r"  (\w+):", line):
            prefix = f"{match[1]}."
        prefix = prefix if line.startswith("    ") or match else ""
        for name, n_in, n_out, shape, bias in NAMED.findall(line.partition("#")[2]):
            size = (int(n_out), int(n_in)) if n_out else tuple(map(int, shape.split(", ")))
            named[f"{prefix}{name}", size] += 1
            if bias:
                named[f"{prefix}{name}.bias", size[:1]] += 1
    return named


def tensors_of(args: BaseModelArgs, layer: int) -> Counter[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        block = TransformerBlock(layer, args.layer_specs[layer], args.dim)
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return Counter((name.removesuffix(".weight"), tuple(tensor.shape)) for name, tensor in tensors)


def layers_of(heading: str) -> list[int]:
    """The layers of a heading without an ellipsis."""
    runs = re.match(r"layers? ([\d, -]+):", heading)
    assert runs is not None, heading
    bounds = [[*map(int, run.split("-"))] for run in runs[1].split(", ")]
    return [layer for run in bounds for layer in range(run[0], run[-1] + 1)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_parameter_of_a_block_is_named_once_with_its_shape(family: str, seed: int) -> None:
    args = args_of(family, seed)
    _, blocks, _ = sections(args)
    described = [layers_of(heading) for heading, _ in blocks]
    assert sorted(layer for layers in described for layer in layers) == [*range(args.n_layers)]
    for layers, (_, lines) in zip(described, blocks, strict=True):
        assert len({args.layer_specs[layer] for layer in layers}) == 1
        assert named_tensors(lines) == tensors_of(args, layers[0])
        assert not any(line.strip().startswith("...") for line in lines), lines


def test_headings_state_the_window_and_the_kind_of_network() -> None:
    args = args_of("gpt_oss", num_hidden_layers=4, layer_types=None, sliding_window=5)
    headings = [heading for heading, _ in sections(args)[1]]
    assert [heading.split(";")[0] for heading in headings] == [
        "layers 0, 2: sliding-window (5) attention",
        "layers 1, 3: full attention",
    ]
    headings = [heading for heading, _ in sections(args_of("deepseek_v3", num_hidden_layers=3))[1]]
    assert "dense feed-forward" in headings[0] and re.search(r"mixture of experts \(\d+ of \d+\)", headings[1])
    headings = [heading for heading, _ in sections(args_of("qwen3_next"))[1]]
    assert "gated delta net" in headings[0] and "full attention" in headings[1]


def test_layers_without_positions_have_no_rope() -> None:
    args = args_of("smollm3", num_hidden_layers=2, no_rope_layers=[1, 0], layer_types=None, use_sliding_window=False)
    (_, rotated), (heading, plain) = sections(args)[1]
    assert "without positions" in heading
    assert any("q = rope(" in line for line in rotated) and not any("rope" in line for line in plain)


def test_multipliers_tying_and_soft_caps_are_in_the_text() -> None:
    changes = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    first, ((_, lines), *_), last = sections(args_of("granite", **changes, tie_word_embeddings=True))
    assert "tok_embeddings(tokens) * 12 " in first
    assert sum("x = x + 0.22 * h" in line for line in lines) == 2
    assert "x = x / 8 " in last and "output.weight is tok_embeddings.weight" in last
    _, _, last = sections(args_of("gemma3_text", final_logit_softcapping=30.0, tie_word_embeddings=False))
    assert "30 * tanh(logits / 30)" in last and re.search(r"output: \d+ -> \d+", last)


def test_a_critic_has_a_value_head() -> None:
    config = {**draw_fields(1, "qwen3"), "model_type": "qwen3"}
    args = get_model_spec("qwen3").model_args_class.from_hf_config(config, is_critic=True)
    assert f"score: {args.dim} -> 1" in describe_blocks(args)[-1]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([3], "layer 3"),
        ([0, 1, 2], "layers 0-2"),
        ([0, 1, 3, 4], "layers 0-1, 3-4"),
        ([1, 3, 5, 7], "layers 1, 3, ..., 7"),
    ],
)
def test_layers_are_written_as_ranges(layers: list[int], text: str) -> None:
    assert _ranges(layers) == text


def test_a_vision_encoder_is_one_line() -> None:
    args = get_model_spec("qwen3_vl").model_args_class(
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=8,
        vocab_size=9,
        mrope_section=(2, 1, 1),
        vision=VisionSpec(depth=3, dim=8, n_heads=2, out_dim=16, deepstack=(1,)),
    )
    first, blocks, _ = sections(args)
    assert "vision_encoder(images)" in first and "3 blocks of 8, 2 heads" in first
    assert "encoder blocks [1] added after layer 0" in first
    assert any("M-RoPE sections [2, 1, 1]" in line for line in blocks[0][1])
