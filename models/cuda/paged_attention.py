"""Cache writes of one token per sequence, and its attention to cached pages (FlashDecoding, Dao et al. 2023).

A program attends to one part (split) of the tokens of one sequence, for the query heads of one key head. If there are
several splits, a second kernel merges their results by their log-sum-exps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from archon.models.attention.decode.paged_cache import PagedTensors
from archon.models.attention.spec import AttentionSpec

# Each multiprocessor gets about two programs; more splits only add work to the merge.
_PROGRAMS_PER_PROCESSOR = 2
_MAX_SPLITS = 64
# Maximum size of a block of keys; shared memory holds two or three of them, and the queries.
_BLOCK_BYTES = 1 << 15


@triton.jit
def _attend_split(
    Q,
    K,
    V,
    Pages,
    Lengths,
    Sinks,
    Out,
    Lse,
    scale,
    soft_cap,
    window,
    n_splits,
    page_stride,
    k_page_stride,
    k_head_stride,
    k_token_stride,
    v_page_stride,
    v_head_stride,
    v_token_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    TILES: tl.constexpr,  # programs for the query heads of one key head, of ROWS each
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    MAIN: tl.constexpr,  # the first features of a key, a power of two
    TAIL: tl.constexpr,  # the remaining features, padded to a power of two; 0 for none
    PADDED_VALUES: tl.constexpr,
    VALUES_ARE_MAIN: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1) // TILES, tl.program_id(2)
    # 1. The visible tokens of this split, in whole blocks.
    length = tl.load(Lengths + row).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    split_tokens = tl.cdiv(tl.cdiv(length - first, BLOCK), n_splits) * BLOCK
    start = first + split * split_tokens
    stop = tl.minimum(start + split_tokens, length)

    # 2. The queries; rows beyond the group are padding.
    place = (tl.program_id(1) % TILES) * ROWS + tl.arange(0, ROWS)
    is_head, head = place < GROUP, kv_head * GROUP + place
    main, offsets = tl.arange(0, MAIN), tl.arange(0, BLOCK)
    features = tl.arange(0, PADDED_VALUES)
    query = Q + (row * HEADS + head) * KEYS
    q = tl.load(query[:, None] + main[None, :], mask=is_head[:, None] & (main < KEYS)[None, :], other=0.0)
    if TAIL:
        tail = MAIN + tl.arange(0, TAIL)
        q_tail = tl.load(query[:, None] + tail[None, :], mask=is_head[:, None] & (tail < KEYS)[None, :], other=0.0)

    # 3. Running softmax. A sink is a score without a value, and the first split's first one.
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(Sinks + head, mask=is_head, other=0.0).to(tl.float32)
        maximum = tl.where(split == 0, sink, maximum)
        total = tl.where(split == 0, 1.0, total)
    out = tl.zeros((ROWS, PADDED_VALUES), tl.float32)
    for block in range(start, stop, BLOCK):
        token = block + offsets
        visible = token < stop
        page = tl.load(Pages + row * page_stride + token // PAGE, mask=visible, other=0).to(tl.int64)
        key = K + page * k_page_stride + kv_head * k_head_stride + (token % PAGE) * k_token_stride
        k = tl.load(key[None, :] + main[:, None], mask=visible[None, :] & (main < KEYS)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        if TAIL:
            k_tail = tl.load(key[None, :] + tail[:, None], mask=visible[None, :] & (tail < KEYS)[:, None], other=0.0)
            scores += tl.dot(q_tail, k_tail, input_precision="ieee")
        scores *= scale
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (1 + e^(2x))
            scores = soft_cap * (1 - 2 / (1 + tl.exp(2 * scores / soft_cap)))
        scores = tl.where(visible[None, :], scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        weights, kept = tl.exp(scores - highest[:, None]), tl.exp(maximum - highest)
        if VALUES_ARE_MAIN:
            v = tl.trans(k)
        else:
            value = V + page * v_page_stride + kv_head * v_head_stride + (token % PAGE) * v_token_stride
            is_value = visible[:, None] & (features < VALUES)[None, :]
            v = tl.load(value[:, None] + features[None, :], mask=is_value, other=0.0)
        out = out * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        maximum = highest

    # 4. The mean of the values; a split without tokens has weight 0 in the merge.
    divisor = tl.where(total > 0, total, 1.0)
    out = out / divisor[:, None]
    result = (row * HEADS + head) * n_splits + split
    is_result = is_head[:, None] & (features < VALUES)[None, :]
    tl.store(Out + (result * VALUES)[:, None] + features[None, :], out.to(Out.dtype.element_ty), mask=is_result)
    if HAS_SPLITS:
        tl.store(Lse + result, tl.where(total > 0, maximum + tl.log(divisor), float("-inf")), mask=is_head)


@triton.jit
def _merge_splits(Partial, Lse, Out, n_splits, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, PADDED_VALUES)
    maximum = tl.load(Lse + head * n_splits)  # the first split always has tokens
    total = 0.0
    out = tl.zeros((PADDED_VALUES,), tl.float32)
    for split in range(n_splits):
        lse = tl.load(Lse + head * n_splits + split)
        place = (head * n_splits + split) * VALUES + features
        partial = tl.load(Partial + place, mask=features < VALUES, other=0.0)
        highest = tl.maximum(maximum, lse)
        kept, weight = tl.exp(maximum - highest), tl.exp(lse - highest)
        total, out, maximum = total * kept + weight, out * kept + partial * weight, highest
    tl.store(Out + head * VALUES + features, (out / total).to(Out.dtype.element_ty), mask=features < VALUES)


@triton.jit
def _store_token(
    K,
    V,
    Keys,
    Values,
    Pages,
    Lengths,
    page_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    keys_page_stride,
    keys_head_stride,
    keys_token_stride,
    values_page_stride,
    values_head_stride,
    values_token_stride,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,  # 0 for values in the keys
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    last = tl.load(Lengths + row) - 1
    page = tl.load(Pages + row * page_stride + last // PAGE)
    key = tl.load(K + row * k_row_stride + head * k_head_stride + feature, mask=feature < KEYS)
    place = Keys + page * keys_page_stride + head * keys_head_stride + (last % PAGE) * keys_token_stride
    tl.store(place + feature, key, mask=feature < KEYS)
    if VALUES:
        value = tl.load(V + row * v_row_stride + head * v_head_stride + feature, mask=feature < VALUES)
        place = Values + page * values_page_stride + head * values_head_stride + (last % PAGE) * values_token_stride
        tl.store(place + feature, value, mask=feature < VALUES)


def store_tokens(paged: PagedTensors, pages: Tensor, lengths: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Write the key and value of each sequence's last token to its page in one layer.

    Args:
        paged: pages of the layer.
        pages: int64 [B, width], the pages of each sequence, in order.
        lengths: int64 [B], tokens of each sequence.
        k: keys [B, heads, key_features], dense in the last dimension.
        v: values [B, heads, value_features]; None if they are in the keys.
    """
    _store_tokens(paged.keys, None if v is None else paged.values, pages, lengths, k, v)


@torch.library.custom_op("archon::store_tokens", mutates_args=("keys", "values"))
def _store_tokens(
    keys: Tensor, values: Tensor | None, pages: Tensor, lengths: Tensor, k: Tensor, v: Tensor | None
) -> None:
    stored, new = keys if values is None else values, k if v is None else v
    value_features = 0 if v is None else v.shape[-1]
    _store_token[k.shape[:2]](
        k,
        new,
        keys,
        stored,
        pages,
        lengths,
        pages.stride(0),
        *k.stride()[:2],
        *new.stride()[:2],
        *keys.stride()[:3],
        *stored.stride()[:3],
        KEYS=k.shape[-1],
        VALUES=value_features,
        PADDED=triton.next_power_of_2(max(k.shape[-1], value_features)),
        PAGE=keys.shape[2],
        num_warps=1,
    )


@_store_tokens.register_fake
def _(*args: Any) -> None:
    return None


def paged_attention(
    q: Tensor, paged: PagedTensors, pages: Tensor, lengths: Tensor, spec: AttentionSpec, n_splits: int = 0
) -> Tensor:
    """Return attention [B, H, V] of one query [B, H, K] per sequence to its pages in one layer.

    Products of keys and values are summed in float32.

    Args:
        q: queries in bfloat16, float16 or float32.
        paged: pages of the layer, in the dtype of q.
        pages: int64 [B, width], the pages of each sequence, in order.
        lengths: int64 [B], tokens of each sequence, at least 1.
        spec: the layer's attention options.
        n_splits: parts of each sequence's tokens; 0 chooses them by the number of programs.
    """
    return _paged_attention(
        q.contiguous(),
        paged.keys,
        paged.values,
        pages,
        lengths,
        spec.sinks,
        spec.scale,
        spec.window or 0,
        spec.soft_cap or 0.0,
        paged.rows.values_in_keys,
        n_splits,
    )


@torch.library.custom_op("archon::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    soft_cap: float,
    values_in_keys: bool,
    n_splits: int,
) -> Tensor:
    n_rows, n_heads, n_features = q.shape
    kv_heads, page_size, value_features = keys.shape[1], keys.shape[2], values.shape[3]
    group = n_heads // kv_heads
    # 1. Tiles: `tl.dot` takes at least 16 rows, and powers of two; wide keys leave room for fewer tokens.
    main = max(16, 1 << (n_features.bit_length() - 1))
    tail = max(16, triton.next_power_of_2(n_features - main)) if n_features > main else 0
    padded_values = max(16, triton.next_power_of_2(value_features))
    key_bytes = max(main, padded_values) * q.dtype.itemsize
    is_wide = key_bytes >= 1024
    rows = min(max(16, triton.next_power_of_2(group)), 16 if q.dtype == torch.float32 else 32 if is_wide else 64)
    tiles, block = triton.cdiv(group, rows), min(max(16, _BLOCK_BYTES // key_bytes), 64)
    # 2. Splits: enough programs for the device, none without a block.
    if not n_splits:
        n_splits = min(_free_programs(q.device, n_rows * kv_heads * tiles), _MAX_SPLITS)
        n_splits = min(n_splits, triton.cdiv(pages.shape[1] * page_size, block))
    out = q.new_empty(n_rows, n_heads, value_features)
    partial = lse = out
    if n_splits > 1:
        partial = q.new_empty(n_rows, n_heads, n_splits, value_features, dtype=torch.float32)
        lse = q.new_empty(n_rows, n_heads, n_splits, dtype=torch.float32)
    _attend_split[n_rows, kv_heads * tiles, n_splits](
        q,
        keys,
        values,
        pages,
        lengths,
        q if sinks is None else sinks,
        partial,
        lse,
        scale,
        soft_cap,
        window,
        n_splits,
        pages.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        HEADS=n_heads,
        GROUP=group,
        TILES=tiles,
        ROWS=rows,
        KEYS=n_features,
        VALUES=value_features,
        MAIN=main,
        TAIL=tail,
        PADDED_VALUES=padded_values,
        VALUES_ARE_MAIN=values_in_keys and value_features == main == padded_values,
        PAGE=page_size,
        BLOCK=block,
        HAS_SINKS=sinks is not None,
        HAS_CAP=soft_cap > 0,
        HAS_WINDOW=window > 0,
        HAS_SPLITS=n_splits > 1,
        num_warps=8 if rows * padded_values >= 8192 else 4,
        num_stages=2 if is_wide else 3,
    )
    if n_splits > 1:
        _merge_splits[n_rows * n_heads,](partial, lse, out, n_splits, value_features, padded_values)
    return out


def _free_programs(device: torch.device, programs: int) -> int:
    """Return how many times `programs` fit on the device, rounded up; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs)


@_paged_attention.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *args: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], values.shape[3])
