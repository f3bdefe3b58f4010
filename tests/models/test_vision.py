"""Models with a tower: logits, every gradient and the positions of images equal transformers'; packed as single."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

from archon.checkpoint.hf_io import load_model, save_model
from archon.models import get_model_spec
from archon.models.attention.meta import PackedAttention
from archon.models.base import ModelInputs
from archon.models.vision.encoder import VisionEncoder, VisionSpec
from archon.models.vision.images import Grid, PackedImages, multimodal_positions
from archon.models.vision.language_model import VisionLanguageModel, VisionLanguageModelArgs
from archon.schema.errors import BatchError, ConfigError
from archon.tools.check.oracle import randomize_vectors, relative_error
from tests.tolerances import PARITY_FP32, REORDER_FP64

IMAGE, VOCAB = 60, 61
TYPES = ("qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 24))]

of_each_family = pytest.mark.parametrize("model_type", TYPES)


def random_fields(seed: int, model_type: str) -> dict[str, Any]:
    """Fields of a composite `config.json`; each layer's kind, each size and the merge of patches differ."""
    rng = random.Random(seed)
    width = rng.choice([24, 32])
    kv_heads = rng.choice([1, 2])
    head_dim = rng.choice([16, 24, 40])
    pairs = int(head_dim * (0.5 if model_type == "qwen3_5" else 1)) // 2
    row, column = (rng.randint(0, pairs // 3 + 1) for _ in range(2))
    vision_heads = rng.choice([1, 2, 3])
    text = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": kv_heads * rng.choice([1, 2]),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 28,
        "vocab_size": VOCAB,
        "rms_norm_eps": 0.1,
        "initializer_range": 0.08,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice([100.0, 1e4]),
            "mrope_section": [max(0, pairs - row - column), row, column],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": rng.choice([1, 2]),
        "hidden_size": vision_heads * rng.choice([8, 12]),
        "num_heads": vision_heads,
        "intermediate_size": rng.choice([20, 36]),
        "hidden_act": rng.choice(["gelu_pytorch_tanh", "gelu", "silu"]),
        "in_channels": rng.choice([1, 3]),
        "patch_size": rng.choice([2, 3]),
        "temporal_patch_size": rng.choice([1, 2]),
        "spatial_merge_size": rng.choice([1, 2, 3]),
        "out_hidden_size": width,
        "num_position_embeddings": rng.choice([4, 9, 25]),
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "axial", "rope_theta": rng.choice([100.0, 1e4])},
    }
    if model_type == "qwen2_5_vl":
        # Heads of width / heads features, consecutive sections, and windows of 1 to 3 decoder rows in some blocks.
        own = random.Random(f"windows {seed}")
        heads = own.choice([2, 4])
        text |= {"hidden_size": 32, "num_attention_heads": heads, "num_key_value_heads": own.choice([1, 2])}
        del text["head_dim"]
        pairs = 32 // heads // 2
        row, column = own.randint(0, pairs // 3), own.randint(0, pairs // 3)
        del text["rope_parameters"]["mrope_interleaved"]
        text["rope_parameters"]["mrope_section"] = [pairs - row - column, row, column]
        depth = own.choice([1, 2, 3])
        vision |= {"depth": depth, "fullatt_block_indexes": own.sample(range(depth), own.randint(0, depth))}
        vision |= {"hidden_size": 8 * vision_heads, "out_hidden_size": 32}
        row_pixels = vision["patch_size"] * vision["spatial_merge_size"]
        vision["window_size"] = own.choice([1, 2, 3]) * row_pixels + own.choice([0, row_pixels - 1])
        del vision["num_position_embeddings"]
    elif model_type == "qwen3_5":
        text["layer_types"] = rng.choice([["full_attention"] * 2, ["linear_attention", "full_attention"]])
        text |= {f"linear_num_{kind}_heads": count for kind, count in (("value", 4), ("key", 2))}
        text |= {f"linear_{kind}_head_dim": 8 for kind in ("value", "key")}
        text["rope_parameters"]["partial_rotary_factor"] = 0.5
    else:
        text |= {"num_hidden_layers": rng.choice([2, 3]), "attention_bias": rng.random() < 0.5}
        own = random.Random(f"deepstack {seed}")
        depth, count = own.choice([1, 2, 3, 4]), own.choice([0, 1, 1, 2, 2, 2, 2])
        vision |= {"depth": depth, "deepstack_visual_indexes": sorted(own.sample(range(depth), min(depth, count)))}
    if model_type == "qwen3_vl_moe":
        text |= {"num_experts": 6, "num_experts_per_tok": rng.choice([2, 3]), "moe_intermediate_size": 20}
        text["mlp_only_layers"] = rng.choice([[], [], [1]])
    return {
        "model_type": model_type,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def their_config(fields: dict[str, Any]) -> Any:
    """transformers' config object of a `config.json`."""
    return CONFIG_MAPPING[fields["model_type"]](
        **{name: value for name, value in fields.items() if name != "model_type"}
    )


def adapter_of(config: Any) -> Any:
    return get_model_spec(config.model_type).state_dict_adapter_class(config)


def build(fields: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, VisionLanguageModel]:
    """transformers' model with every weight drawn at random, and archon's with the same weights."""
    torch.manual_seed(seed)
    config = their_config(fields)
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    options = {"experts_implementation": "eager"} if hasattr(config.text_config, "num_experts") else {}  # has float64
    theirs = model_class._from_config(config, attn_implementation="eager", **options).to(dtype)
    randomize_vectors(theirs)
    adapter = adapter_of(config)
    ours = adapter.model_class(adapter.args).to(dtype)
    weights = {name: weight.detach() for name, weight in theirs.named_parameters()}
    missing, unexpected = ours.load_state_dict(adapter.from_hf(weights), strict=False)
    assert not unexpected and {*missing} <= {"output.weight"}
    ours.tie_weights()
    return theirs, ours


@dataclass
class Document:
    """Tokens [T] with the placeholders of images, the images' sizes in patches, and their pixels [P, F]."""

    tokens: Tensor
    grids: list[Grid]
    patches: Tensor


def random_document(rng: random.Random, args: VisionLanguageModelArgs, images: int, dtype: torch.dtype) -> Document:
    """Text and images in any order; as in a chat, tokens that mark its beginning and end are around each image."""
    merge, tokens, grids = args.vision.merge_size, [rng.randrange(IMAGE) for _ in range(rng.randint(1, 4))], []
    for _ in range(images):
        grid = (merge * rng.randint(1, 4), merge * rng.randint(1, 5))
        grids.append(grid)
        tokens += [1] + [IMAGE] * (grid[0] * grid[1] // merge**2) + [2]
        tokens += [rng.randrange(IMAGE) for _ in range(rng.choice([0, 0, 3]))]
    features = torch.Size(args.vision.patch_shape).numel()
    count = sum(height * width for height, width in grids)
    return Document(torch.tensor(tokens), grids, torch.randn(count, features, dtype=dtype))


def their_logits(theirs: Any, document: Document) -> Tensor:
    """transformers' logits [T, V] of one document."""
    tokens, images = document.tokens.unsqueeze(0), {}
    if document.grids:
        images = {
            "pixel_values": document.patches,
            "image_grid_thw": torch.tensor([[1, *grid] for grid in document.grids]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    return theirs(input_ids=tokens, use_cache=False, **images).logits[0]


def our_logits(ours: VisionLanguageModel, documents: list[Document]) -> Tensor:
    """archon's logits [T, V] of packed documents."""
    args = ours.args
    assert isinstance(args, VisionLanguageModelArgs)
    where = args.image_token_id, args.vision.merge_size
    lengths = torch.tensor([len(document.tokens) for document in documents])
    tokens = torch.cat([document.tokens for document in documents])
    positions = torch.cat(
        [multimodal_positions(document.tokens, document.grids, *where)[0] for document in documents], dim=1
    )
    grids = [grid for document in documents for grid in document.grids]
    images = PackedImages.of(tokens, torch.cat([document.patches for document in documents]), grids, *where)
    bounds = torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32)
    logits = ours(tokens, positions, bounds, int(lengths.max()), images=images if grids else None)
    assert isinstance(logits, Tensor)
    return logits


def random_documents(seed: int, args: VisionLanguageModelArgs, dtype: torch.dtype = torch.float32) -> list[Document]:
    """A document without images, one with one, and one with adjacent images, in any order; or an image in each."""
    rng = random.Random(seed)
    counts = [1, 1, 1] if seed % 4 == 3 else rng.sample([0, 1, 2], 3)
    return [random_document(rng, args, images, dtype) for images in counts]


@of_each_family
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_every_gradient_equal_transformers_one_document_at_a_time(seed: int, model_type: str) -> None:
    theirs, ours = build(random_fields(seed, model_type), seed)
    documents = random_documents(seed, ours.args)
    logits, expected = our_logits(ours, documents), torch.cat([their_logits(theirs, each) for each in documents])
    weight = torch.randn_like(expected)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    differences = {"logits": relative_error(logits, expected)}
    wanted = adapter_of(theirs.config).from_hf({n: p.grad for n, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and wanted[name].abs().max() > 0, name
        differences[name] = relative_error(parameter.grad, wanted[name])
    assert {name: found for name, found in differences.items() if not found <= PARITY_FP32} == {}


@of_each_family
def test_a_batch_without_any_image_equals_transformers_and_leaves_the_tower_alone(model_type: str) -> None:
    theirs, ours = build(random_fields(6, model_type), 6)
    documents = [random_document(random.Random(seed), ours.args, 0, torch.float32) for seed in range(3)]
    logits, expected = our_logits(ours, documents), torch.cat([their_logits(theirs, each) for each in documents])
    weight = torch.randn_like(expected)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    assert relative_error(logits, expected) <= PARITY_FP32
    grads = {name: p.grad for name, p in theirs.named_parameters() if "visual" not in name}
    adapter = adapter_of(theirs.config).for_keys(grads)
    for hf_name, grad in grads.items():
        for target in adapter.hf_to_native(hf_name):
            if not target.must_equal and target.placement is None:
                assert relative_error(ours.get_parameter(target.name).grad, grad) <= PARITY_FP32, hf_name
    assert all(parameter.grad is None for parameter in ours.visual.parameters())


@of_each_family
@pytest.mark.parametrize("seed", range(4))
def test_packed_documents_equal_single_ones(seed: int, model_type: str) -> None:
    _, ours = build(random_fields(seed, model_type), seed, torch.float64)
    documents = random_documents(seed, ours.args, torch.float64)
    single = torch.cat([our_logits(ours, [document]) for document in documents])
    assert relative_error(our_logits(ours, documents), single) <= REORDER_FP64


@of_each_family
def test_images_do_not_see_each_other(model_type: str) -> None:
    _, ours = build(random_fields(0, model_type), 0)
    document = random_document(random.Random(0), ours.args, 2, torch.float32)
    first = document.grids[0][0] * document.grids[0][1]
    before = ours.visual(document.patches, tuple(document.grids))
    document.patches[:first] += 1.0
    after = ours.visual(document.patches, tuple(document.grids))
    own = first // ours.visual.spec.merge_size**2
    assert torch.equal(before[own:], after[own:]) and not torch.equal(before[:own], after[:own])


@of_each_family
def test_a_batch_of_one_row_is_a_pack(model_type: str) -> None:
    _, ours = build(random_fields(1, model_type), 1)
    document = random_document(random.Random(1), ours.args, 1, torch.float32)
    where = IMAGE, ours.visual.spec.merge_size
    positions, _ = multimodal_positions(document.tokens, document.grids, *where)
    images = PackedImages.of(document.tokens, document.patches, document.grids, *where)
    length = len(document.tokens)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    logits = ours(document.tokens[None], positions[None], bounds, length, images=images)
    assert torch.equal(logits[0], our_logits(ours, [document]))


@of_each_family
def test_text_alone_has_the_same_logits_with_positions_of_one_coordinate(model_type: str) -> None:
    _, ours = build(random_fields(2, model_type), 2)
    document = random_document(random.Random(2), ours.args, 0, torch.float32)
    length = len(document.tokens)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    assert torch.equal(ours(document.tokens, torch.arange(length), bounds, length), our_logits(ours, [document]))


@of_each_family
def test_positions_equal_transformers_on_1000_random_interleavings(model_type: str) -> None:
    rng = random.Random(0)
    models: dict[int, Any] = {}
    with torch.device("meta"):
        for merge in (1, 2, 3):
            fields = random_fields(0, model_type) | {"vision_config": {"spatial_merge_size": merge}}
            config = their_config(fields)
            models[merge] = MODEL_MAPPING[type(config)](config)
    for _ in range(1000):
        merge = rng.choice([1, 2, 3])
        tokens: list[int] = [rng.randrange(IMAGE) for _ in range(rng.choice([0, 1, 7]))]
        grids = [(merge * rng.randint(1, 9), merge * rng.randint(1, 9)) for _ in range(rng.randint(0, 5))]
        for height, width in grids:
            tokens += [IMAGE] * (height * width // merge**2) + [1] * rng.randint(1, 5)
        if grids and rng.random() < 0.3:  # the document ends with an image
            tokens = tokens[: len(tokens) - tokens[::-1].index(IMAGE)]
        tokens = tokens or [1]
        ids = torch.tensor([tokens])
        images = torch.tensor([[1, *grid] for grid in grids]) if grids else None
        expected, deltas = models[merge].get_rope_index(ids, (ids == IMAGE).int(), images)
        positions, following = multimodal_positions(ids[0], grids, IMAGE, merge)
        assert torch.equal(positions, expected[:, 0])
        # Decoding goes on at the number of tokens plus transformers' delta.
        assert following == len(tokens) + deltas.item() == positions.max() + 1


@of_each_family
@pytest.mark.parametrize("seed", [3, 8])
def test_greedy_tokens_after_images_equal_transformers(seed: int, model_type: str) -> None:
    """transformers decodes from its cache; here each token is appended, at the position after the largest."""
    theirs, ours = build(random_fields(seed, model_type), seed)
    document = random_document(random.Random(seed), ours.args, 2, torch.float32)
    where, prompt = (IMAGE, ours.visual.spec.merge_size), len(document.tokens)
    images = PackedImages.of(document.tokens, document.patches, document.grids, *where)
    positions, following = multimodal_positions(document.tokens, document.grids, *where)
    tokens = document.tokens
    with torch.no_grad():
        for step in range(6):
            bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
            logits = ours(tokens, positions, bounds, len(tokens), images=images)
            logits[-1, IMAGE] = -torch.inf
            tokens = torch.cat((tokens, logits[-1:].argmax(-1)))
            positions = torch.cat((positions, torch.full((3, 1), following + step)), dim=1)
        expected = theirs.generate(
            input_ids=document.tokens[None],
            attention_mask=torch.ones(1, prompt, dtype=torch.int64),
            pixel_values=document.patches,
            image_grid_thw=torch.tensor([[1, *grid] for grid in document.grids]),
            mm_token_type_ids=(document.tokens[None] == IMAGE).int(),
            max_new_tokens=6,
            do_sample=False,
            suppress_tokens=[IMAGE],
        )
    assert tokens.tolist() == expected[0].tolist()


def test_adjacent_placeholders_are_divided_by_the_sizes_of_the_images() -> None:
    """transformers takes a run of placeholders for one image."""
    positions, following = multimodal_positions(torch.tensor([5, IMAGE, IMAGE, IMAGE, 5]), [(1, 2), (1, 1)], IMAGE, 1)
    assert positions.tolist() == [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]] and following == 5


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([IMAGE, 1], [], "1 placeholder tokens .60. for 0 images with 0 merged patches"),
        ([IMAGE, 1], [(2, 4)], "1 placeholder tokens .60. for 1 images with 2 merged patches"),
        ([IMAGE, 1, IMAGE], [(2, 4)], "the 2 placeholders of an image of 2 x 4 patches are not adjacent"),
        ([IMAGE, IMAGE], [(2, 3)], "an image has 2 x 3 patches; expected multiples of the merge size 2"),
        ([1], [(0, 2)], "an image has 0 x 2 patches; expected multiples of the merge size 2"),
    ],
)
def test_placeholders_that_fit_no_image_are_refused(tokens: list[int], grids: list[Grid], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        multimodal_positions(torch.tensor(tokens), grids, IMAGE, 2)


def test_pixels_that_fit_no_image_are_refused() -> None:
    with pytest.raises(BatchError, match="the images have 8 patches, but pixels are there for 7"):
        PackedImages.of(torch.tensor([IMAGE] * 2), torch.zeros(7, 12), [(2, 4)], IMAGE, 2)


@of_each_family
def test_a_composite_checkpoint_is_read_whole_and_exported_bitwise(model_type: str) -> None:
    theirs, _ = build(random_fields(3, model_type), 3)
    adapter = adapter_of(theirs.config)
    weights = {name: weight.detach() for name, weight in theirs.named_parameters()}
    adapter = adapter.for_keys(weights)
    back = adapter.to_hf(adapter.from_hf(weights))
    assert back.keys() == weights.keys() == adapter.hf_shapes().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
    assert adapter.is_passthrough("mtp.layers.0.norm.weight") and not adapter.is_passthrough(
        "model.visual.merger.norm.bias"
    )


def test_experts_are_exported_as_released_and_read_in_both_orientations(tmp_path: Path) -> None:
    """transformers 5 writes [E, out, in], and reads [E, in, out] too, which older versions and servers expect."""
    theirs, _ = build(random_fields(2, "qwen3_vl_moe"), 2)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", like=tmp_path / "theirs")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert sum(".experts." in name for name in after) >= 2
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name].mT if ".experts." in name else before[name]), name
    again = dict(load_model(tmp_path / "ours").named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in model.named_parameters())
    read = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager", experts_implementation="eager")
    assert all(torch.equal(x, y) for x, y in zip(read.parameters(), theirs.parameters(), strict=True))


QWEN2_5_VL_3B: dict[str, Any] = {  # published with the decoder's fields at the top level
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


@pytest.mark.parametrize("text_only", [False, True])
def test_a_flat_published_config_is_read_as_transformers_reads_it(text_only: bool) -> None:
    args_class = get_model_spec("qwen2_5_vl", text_only=text_only).model_args_class
    nested = their_config(copy.deepcopy(QWEN2_5_VL_3B)).to_dict()
    assert nested["text_config"]["hidden_size"] == 2048
    args = args_class.from_hf_config(QWEN2_5_VL_3B)
    assert args == args_class.from_hf_config(nested) and args.tie_word_embeddings
    inner = {
        **nested,
        "tie_word_embeddings": False,
        "text_config": nested["text_config"] | {"tie_word_embeddings": True},
    }
    assert args_class.from_hf_config(inner).tie_word_embeddings
    with pytest.raises(ConfigError, match="'hidden_sizes' is 1; archon does not know this field; did you mean"):
        args_class.from_hf_config(QWEN2_5_VL_3B | {"hidden_sizes": 1})


def test_the_published_config_of_qwen2_5_vl_gives_the_parameter_count() -> None:
    adapter = get_model_spec("qwen2_5_vl").state_dict_adapter_class(QWEN2_5_VL_3B)
    assert sum(torch.Size(shape).numel() for shape in adapter.native_shapes.values()) == 3_754_622_976


def test_windows_of_an_image_do_not_see_each_other_without_a_block_of_full_attention() -> None:
    spec = VisionSpec(
        depth=2, dim=16, hidden_dim=12, n_heads=2, channels=1, patch_size=2, temporal_patch_size=1, out_dim=8
    )
    spec = replace(spec, n_positions=0, rms_norm=True, gated=True, patch_bias=False, window=2)
    torch.manual_seed(0)
    encoder = VisionEncoder(spec, "auto")
    for name, fill in encoder.initializers("visual"):
        fill(encoder.get_parameter(name.removeprefix("visual.")).detach())
    patches, grids = torch.randn(60, 4), ((6, 10),)
    before = encoder(patches, grids)
    patches[4 * 6 : 4 * 7] += 1.0  # the decoder row of row 1 and column 1
    changed = (encoder(patches, grids) != before).any(-1).view(3, 5)
    assert changed.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_the_published_config_gives_the_parameter_count() -> None:
    """Qwen3-VL-30B-A3B, whose decoder is as large as Qwen3-30B-A3B."""
    text = {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5_000_000,
        "vocab_size": 151936,
    }
    vision = {"deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 2048, "model_type": "qwen3_vl_moe"}
    config = {"model_type": "qwen3_vl_moe", "image_token_id": 151655, "text_config": text, "vision_config": vision}
    shapes = adapter_of(CONFIG_MAPPING["qwen3_vl_moe"](**config)).native_shapes
    decoder = sum(torch.Size(shape).numel() for name, shape in shapes.items() if not name.startswith("visual."))
    assert decoder == 30_532_122_624


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_intermediate_size": 12}, "moe_intermediate_size is 12 with hidden_size 24; expected expert matrices"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' is False; archon supports only True"),
        ({"shared_expert_intermediate_size": 8}, "'shared_expert_intermediate_size' is 8; archon does not know"),
    ],
)
def test_experts_that_are_not_computed_are_refused(change: dict[str, Any], message: str) -> None:
    fields = random_fields(0, "qwen3_vl_moe")
    fields["text_config"] |= {"hidden_size": 24} | change
    fields["vision_config"] |= {"out_hidden_size": 24}
    with pytest.raises(ConfigError, match=message):
        get_model_spec("qwen3_vl_moe").model_args_class.from_hf_config(fields)


@of_each_family
def test_fresh_weights_are_those_of_transformers_kind(model_type: str) -> None:
    fields = random_fields(5, model_type)
    fields["vision_config"] |= {"hidden_size": 96, "num_heads": 2, "initializer_range": 0.5}
    adapter = adapter_of(their_config(fields))
    ours = adapter.model_class(adapter.args)
    ours.init_weights()
    assert {name for name, _ in ours.initializers()} >= dict(ours.named_parameters()).keys()
    tower = dict(ours.visual.named_parameters())
    for name, weight in tower.items():
        if weight.dim() > 1:
            assert 0.4 < weight.std() < 0.6, name
        else:
            assert weight.eq(1.0 if name.endswith("norm.weight") else 0.0).all(), name


NOT_COMPUTED: list[tuple[str, dict[str, Any], str]] = [
    ("vision_config", {"window_size": 8}, "'vision_config.window_size' is 8; archon does not know"),
    ("vision_config", {"num_position_embeddings": 8}, "num_position_embeddings is 8; expected a square"),
    ("vision_config", {"num_heads": 5}, "expected heads of a multiple of 4 features"),
    ("vision_config", {"out_hidden_size": 5}, "out_hidden_size of the vision encoder is 5; expected .* hidden_size 32"),
    ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "expected 'axial'"),
    ("vision_config", {"depth": "two"}, "'depth' is 'two'; expected type int"),
    ("rope_parameters", {"mrope_interleaved": False}, "'mrope_interleaved' is False; archon supports only true"),
    ("rope_parameters", {"mrope_section": [1, 2]}, "'mrope_section' is .* expected three numbers"),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "depends on the document length"),
]
OF_FAMILIES = {
    "qwen3_5": [
        ("vision_config", {"deepstack_visual_indexes": [1]}, "vision_config.deepstack_visual_indexes.* supports only"),
    ],
    "qwen3_vl": [
        ("vision_config", {"deepstack_visual_indexes": indexes}, message)
        for indexes, message in (
            ([4], r"deepstack_visual_indexes is \[4\]; expected increasing indices below the encoder.s depth 4"),
            ([2, 1], r"is \[2, 1\]; expected increasing indices"),
            ([1, 1], r"is \[1, 1\]; expected increasing indices"),
            ([-1], r"is \[-1\]; expected a list of nonnegative integers"),
            ("all", "is 'all'; expected type list"),
            ([0, 1, 2, 3], r"is \[0, 1, 2, 3\], one entry per decoder layer from the first; expected at most 2"),
        )
    ],
}
OF_FAMILIES["qwen3_vl_moe"] = OF_FAMILIES["qwen3_vl"]
OF_WINDOWS = [
    ("vision_config", {"window_size": 1}, "'vision_config.window_size' is 1; expected at least [0-9]+ pixels"),
    (
        "vision_config",
        {"fullatt_block_indexes": [4]},
        r"fullatt_block_indexes is \[4\]; expected blocks below .* depth 4",
    ),
    ("vision_config", {"fullatt_block_indexes": "all"}, "is 'all'; expected type list"),
    ("vision_config", {"in_chans": 4}, "'vision_config.in_chans' is 4; archon supports only 3"),
    ("vision_config", {"num_position_embeddings": 9}, "'vision_config.num_position_embeddings' is 9; archon does not"),
    ("rope_parameters", {"mrope_interleaved": True}, "'mrope_interleaved' is True; archon supports only false"),
    (
        "rope_parameters",
        {"mrope_section": [1, 1, 1]},
        r"mrope_section is \[1, 1, 1\], consecutive counts of frequencies",
    ),
    *(
        case
        for case in NOT_COMPUTED
        if not {"window_size", "num_position_embeddings", "mrope_interleaved"} & {*case[1]}
    ),
]


@pytest.mark.parametrize(
    ("model_type", "where", "change", "message"),
    [(model_type, *case) for model_type, own in OF_FAMILIES.items() for case in (*NOT_COMPUTED, *own)]
    + [("qwen2_5_vl", *case) for case in OF_WINDOWS],
)
def test_what_is_not_computed_is_refused(model_type: str, where: str, change: dict[str, Any], message: str) -> None:
    config = their_config(random_fields(7, model_type)).to_dict()
    config["text_config"] |= {"hidden_size": 32, "num_hidden_layers": 2}
    config["vision_config"] |= {"out_hidden_size": 32, "depth": 4}
    config["vision_config"] |= {"deepstack_visual_indexes": []} if model_type != "qwen2_5_vl" else {}
    (config if where == "vision_config" else config["text_config"])[where].update(change)
    with pytest.raises(ConfigError, match=message):
        get_model_spec(model_type).model_args_class.from_hf_config(config)


@of_each_family
def test_images_for_a_model_of_text_are_refused(model_type: str) -> None:
    text = get_model_spec(model_type, text_only=True)
    ours = text.model_class(text.model_args_class.from_hf_config(their_config(random_fields(0, model_type))))
    images = PackedImages(torch.zeros(1, 12), ((1, 1),), torch.zeros(1, dtype=torch.int64))
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(BatchError, match="TextModel accepts no images"):
        ours(torch.tensor([1, 2]), torch.arange(2), bounds, 2, images=images)
    with pytest.raises(ValueError, match=r"positions have shape \(3, 2\), but this model's have one coordinate"):
        ours.hidden_states(
            ModelInputs(torch.tensor([1, 2]), torch.zeros(3, 2, dtype=torch.int64), PackedAttention(bounds, 2))
        )


@of_each_family
def test_a_towers_operations_are_those_that_pytorch_counts(model_type: str) -> None:
    _, ours = build(random_fields(4, model_type), 4)
    spec, grid = ours.visual.spec, (4 * ours.visual.spec.merge_size, 2 * ours.visual.spec.merge_size)
    patches = grid[0] * grid[1]
    x = torch.randn(patches, torch.Size(spec.patch_shape).numel())
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        ours.visual(x, (grid,))
    window = (spec.window * spec.merge_size) ** 2 or patches
    keys = sum(patches if block in spec.full_attention else min(window, patches) for block in range(spec.depth))
    attention = 4 * keys * spec.dim * patches  # which PyTorch does not count on a CPU
    assert counted.get_total_flops() + attention == spec.forward_flops(patches) == ours.args.image_flops(patches)
