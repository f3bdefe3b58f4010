"""Latent attention against the equations of the paper, head by head and token by token, however the tokens attend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.decode.paged import DecodeRows, PagedAttention, PrefillChunk
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import PackedAttention, PrefixAttention
from archon.models.attention.prefix.plan import shared_prefixes
from archon.models.layers.latent_attention import LatentAttention, LatentLayer
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeConfig, RopeSpec, RotaryEmbedding, Rotation
from archon.models.lora.layers import LoRALayer, MultiLoRALayer
from archon.models.lora.mapping import LoRAMapping
from archon.models.lora.model import disable_lora
from archon.tools.check.oracle import relative_error
from tests.tolerances import REORDER_FP64

DIM, HEADS, RANK, ROTATED = 24, 3, 10, 4
NORM = NormSpec(1e-6)
YARN = RopeConfig(kind="yarn", factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0)
# Values narrower than keys, as wide, and wider; queries from a latent and directly; biases.
LAYERS = {
    "narrow": LatentLayer(HEADS, RANK, 8, 6, RopeSpec(ROTATED, 100.0, interleaved=True), NormSpec(1e-6), q_rank=7),
    "even": LatentLayer(HEADS, RANK, 4, 8, RopeSpec(ROTATED, 100.0), NormSpec(1e-6), bias=True),
    "wide": LatentLayer(HEADS, RANK, 4, 15, RopeSpec(ROTATED, 100.0, interleaved=True), NormSpec(1e-6), 7, bias=True),
    # Scores that YaRN scales, and queries that grow with their position, with and without a query latent.
    "scaled": LatentLayer(HEADS, RANK, 6, 8, RopeSpec(ROTATED, 100.0, YARN, query_beta=0.5, query_period=3), NORM, 7),
    "scaled_direct": LatentLayer(
        HEADS, RANK, 6, 8, RopeSpec(ROTATED, 100.0, YARN, query_beta=0.5, query_period=3), NORM
    ),
}
LENGTHS = (5, 1, 130, 7)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert relative_error(actual, expected) <= REORDER_FP64


def make_module(layer: LatentLayer) -> LatentAttention:
    torch.manual_seed(3)
    module = layer.build(0, DIM).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def rotation_of(layer: LatentLayer, positions: Tensor) -> Rotation:
    return RotaryEmbedding(layer.rope)(positions, torch.float64)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor, position: int, layer: LatentLayer) -> Tensor:
    """The pairs of x [R] rotated by the angles of a position, one pair at a time."""
    out, half = x.clone(), ROTATED // 2
    for i in range(half):
        angle = position * float(RotaryEmbedding(layer.rope)._inv_freq[i])
        a, b = (2 * i, 2 * i + 1) if layer.rope.interleaved else (i, i + half)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def factor_of(layer: LatentLayer, position: int) -> float:
    """The square of YaRN's factor, 0.1 mscale_all_dim log(factor) + 1, times the growth of queries at a position."""
    rope = layer.rope
    yarn = 0.1 * rope.scaling.mscale_all_dim * math.log(rope.scaling.factor) + 1 if rope.scaling.kind == "yarn" else 1.0
    grown = 1 + rope.query_beta * math.log(1 + position // rope.query_period) if rope.query_beta else 1.0
    return yarn * yarn * grown


def by_the_paper(module: LatentAttention, x: Tensor) -> Tensor:
    """Equations 9 to 19 of arXiv:2405.04434 for one document x [S, dim], without a cache and without batching."""
    s, n, v = module.layer_spec, module.layer_spec.key_features, module.layer_spec.value_features
    width = n + ROTATED
    queries = x if module.wq_a is None else rms(module.wq_a(x), module.q_a_norm.weight)
    queries = (module.wq or module.wq_b)(queries)
    compressed = module.wkv_a(x)
    latents = rms(compressed[:, :RANK], module.kv_a_norm.weight)
    expansion = module.wkv_b.weight
    outs = []
    for t in range(len(x)):
        heads = []
        for h in range(HEADS):
            q = queries[t, h * width : (h + 1) * width]
            rows = expansion[h * (n + v) : (h + 1) * (n + v)]
            scores = torch.stack(
                [
                    q[:n] @ (rows[:n] @ latents[j]) + turned(q[n:], t, s) @ turned(compressed[j, RANK:], j, s)
                    for j in range(t + 1)
                ]
            )
            weights = torch.softmax(scores * factor_of(s, t) / math.sqrt(width), dim=0)
            heads.append(sum(w * (rows[n:] @ latents[j]) for j, w in enumerate(weights)))
        outs.append(torch.cat(heads))
    return module.wo(torch.stack(outs))


def inputs(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positions_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def packed(lengths: tuple[int, ...]) -> PackedAttention:
    return PackedAttention.from_lengths(lengths, torch.device("cpu"), "sdpa")


@pytest.mark.parametrize("name", LAYERS)
def test_output_and_gradients_are_those_of_the_equations(name: str) -> None:
    module, lengths = make_module(LAYERS[name]), (6, 1, 9)
    x = inputs(sum(lengths)).requires_grad_()
    weight = inputs(sum(lengths), 1)
    rotation = rotation_of(LAYERS[name], positions_of(lengths))
    found = module(x, rotation, packed(lengths))
    wanted = torch.cat([by_the_paper(module, document) for document in x.split(lengths)])
    assert_same(found, wanted)
    leaves = [x, *module.parameters()]
    for gradient, expected in zip(
        torch.autograd.grad(found, leaves, weight), torch.autograd.grad(wanted, leaves, weight), strict=True
    ):
        assert expected.abs().max() > 0
        assert_same(gradient, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_shared_prefixes_change_nothing(name: str) -> None:
    module = make_module(LAYERS[name])
    lengths = (140, 140, 9, 11)  # two with a long common prefix, and two that make a tree
    tokens = torch.randint(50, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    tokens[140:270], tokens[289:297] = tokens[:130], tokens[280:288]
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None and shared.trees and shared.runs
    x, positions = inputs(50)[tokens], positions_of(lengths)
    whole = module(x, rotation_of(LAYERS[name], positions), packed(lengths))
    meta = PrefixAttention(shared, "sdpa")
    rows = x[shared.rows]
    meta.prepare(rows)
    out = module(rows, rotation_of(LAYERS[name], positions[shared.rows]), meta)
    assert_same(out[shared.gather_index], whole)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_decoding_from_latents_is_the_packed_forward(name: str, page_size: int) -> None:
    """Prompts in one and in several chunks, then a token each; two sequences share the pages of a prompt."""
    module, layer = make_module(LAYERS[name]), LAYERS[name]
    assert layer.cache == PagedRows(1, RANK + ROTATED, RANK, values_in_keys=True)
    counts = [-(-length // page_size) for length in LENGTHS]
    order = np.random.default_rng(1).permutation(2 * sum(counts))
    tables = [list(order[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
    cache = PagedCache([layer.cache], 2 * sum(counts), page_size, torch.float64, "cpu")
    cache.groups[0].keys.normal_()  # whatever is in unused places must not matter
    documents = [inputs(length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = module(torch.cat(documents), rotation_of(layer, positions_of(LENGTHS)), packed(LENGTHS)).split(LENGTHS)
    nothing = DecodeRows(np.zeros((0, 1), int), np.zeros(0, int))
    for first, share in ((0, 0.4), (0.4, 1.0)):
        chunks, rows, expected = [], [], []
        for document, table, out in zip(documents, tables, wanted, strict=True):
            last = len(document) - 1
            start, stop = int(first * last), int(share * last)
            if stop > start:
                chunks.append(PrefillChunk(start, stop - start, table, last))
                rows.append(document[start:stop])
                expected.append(out[start:stop])
        meta = PagedAttention(cache, nothing, chunks, "sdpa", padded_length=sum(map(len, rows)) + 3)
        x = torch.cat([*rows, inputs(3)])
        found = module(x, rotation_of(layer, meta.positions), meta)
        assert_same(found[:-3], torch.cat(expected))
    pages = np.zeros((len(tables), max(counts)), dtype=np.int64)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
    # The last sequence once more, as a duplicate whose keys are copied, and as a row that shares its pages.
    spare = [page for page in range(2 * sum(counts)) if page not in order[: sum(counts)]]
    copied = pages[-1:].copy()
    copied[0, counts[-1] - 1] = spare[0]
    pages, lengths = np.concatenate([pages, pages[-1:]]), np.array([*LENGTHS, LENGTHS[-1]])
    decode = DecodeRows(pages, lengths, copied, np.array([len(LENGTHS) - 1]))
    meta = PagedAttention(cache, decode)
    x = torch.stack([*(document[-1] for document in documents), documents[-1][-1]])
    found = module(x, rotation_of(layer, meta.positions), meta)
    expected = torch.stack([*(out[-1] for out in wanted), wanted[-1][-1]])
    assert_same(found, expected)
    offset = (LENGTHS[-1] - 1) % page_size
    own = pages[-1, counts[-1] - 1]
    keys = cache.groups[0].keys[0]
    assert_same(keys[spare[0], :, offset], keys[own, :, offset])


def test_expanded_keys_are_those_that_absorbed_queries_meet() -> None:
    layer = LAYERS["wide"]
    module = make_module(layer)
    keys = LatentKeys(torch.randn(9, 1, RANK + ROTATED, dtype=torch.float64), module.wkv_b, 4, 15)
    q = torch.randn(5, HEADS, 4 + ROTATED, dtype=torch.float64)
    k, v = keys.expand(keys.rows)
    assert k.shape == v.shape == (9, HEADS, 15)
    plain = torch.einsum("bhd,thd->bht", keys.pad(q), k)
    absorbed = torch.einsum("bhd,td->bht", keys.absorb(q), keys.rows[:, 0])
    assert_same(absorbed, plain)
    weights = torch.softmax(plain, dim=-1)
    sums = torch.einsum("bht,tc->bhc", weights, keys.rows[:, 0, :RANK])
    wanted = torch.einsum("bht,thd->bhd", weights, v)[..., :15]
    assert_same(keys.expand_values(sums), wanted)


@pytest.mark.parametrize("several", [False, True], ids=["one", "multi-LoRA"])
def test_absorbed_matrices_have_the_adapter_while_it_is_enabled(several: bool) -> None:
    """Decoding with matrices absorbed in queries and values adapts them as the expansion of a prompt does."""
    layer = LAYERS["wide"]
    module = make_module(layer)
    rows = torch.randn(9, 1, RANK + ROTATED, dtype=torch.float64)
    q, sums = torch.randn(5, HEADS, 4 + ROTATED, dtype=torch.float64), torch.randn(5, HEADS, RANK, dtype=torch.float64)
    queries = LoRAMapping.of(("x",), torch.zeros(5, dtype=torch.int64), torch.device("cpu")) if several else None
    keys = LatentKeys(rows, module.wkv_b, 4, 15)

    def absorbed() -> tuple[Tensor, Tensor]:
        return keys.absorb(q, queries), keys.expand_values(sums, queries)

    base = absorbed()
    adapter = LoRALayer(RANK, HEADS * 19, 2, 0.7).double()
    for part in adapter.parameters():
        torch.nn.init.normal_(part)
    module.wkv_b.lora = MultiLoRALayer({"x": adapter}) if several else adapter
    with disable_lora(module):
        for found, expected in zip(absorbed(), base, strict=True):
            assert torch.equal(found, expected)
    adapted = absorbed()
    with torch.no_grad():
        module.wkv_b.weight += 0.7 * adapter.b @ adapter.a
    module.wkv_b.lora = None
    for found, expected, without in zip(adapted, absorbed(), base, strict=True):
        assert_same(found, expected)
        assert relative_error(found, without) > 0.1


def test_the_scale_has_the_square_of_yarns_factor() -> None:
    """DeepSeek-V3: 192 features, a context extended 40 times, mscale_all_dim 1."""
    layer = LatentLayer(128, 512, 128, 128, RopeSpec(64, 10_000.0, YARN, 163840), NormSpec(1e-6), q_rank=1536)
    factor = 0.1 * math.log(40) + 1
    assert layer.scale == pytest.approx(factor * factor / math.sqrt(192))
    assert make_module(LAYERS["even"]).spec.scale == pytest.approx(1 / math.sqrt(8))
    # 512 + 64 numbers of a token in each layer; expanded keys and values would be 128 * 320.
    assert layer.cache.token_features == 576
    assert layer.attention_width == 128 * 160
