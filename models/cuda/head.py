"""Softmax sums and gradients of a tile of logits, in one Triton kernel: one program for each row.

The first phase reads a row and keeps a running maximum and sum (online softmax, Milakov and Gimelshein 2018,
arXiv:1805.02867). The second phase reads it again and writes the gradient over the logits.
`archon.models.layers.token_scores` has the formulas. Logits and gradients are bfloat16 or float32; the arithmetic
between them is float32.

Arguments of all three operators, for R rows and V columns:
    logits: [R, V], dense rows: the matmul's result, without soft cap and temperature.
    labels: int64 [R]; a label outside 0 .. V - 1 belongs to another rank's columns.
    scale: 1 / temperature of all rows; `scales`, float32 [R] or None, replaces it row by row.
    soft_cap: bounds the logits before the scale multiplies them; None for no bound.
    lse, label_logits, entropy, logprob_grad, entropy_grad: float32 [R] or [R, 1], dense.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program holds at a time, with one warp for 512 of them.
BLOCK = 8192


@triton.jit
def _capped(x, scale, soft_cap):
    """Return the logits: x under its soft cap, times the scale."""
    x = x.to(tl.float32)
    if soft_cap is not None:
        decay = tl.exp(-2.0 * tl.abs(x / soft_cap))
        tanh = (1.0 - decay) / (1.0 + decay)
        x = soft_cap * tl.where(x < 0, -tanh, tanh)
    return x * scale


@triton.jit
def _slope(x, scale, soft_cap):
    """Return the derivative of `_capped` in x."""
    if soft_cap is not None:
        decay = tl.exp(-2.0 * tl.abs(x.to(tl.float32) / soft_cap))
        scale = scale * 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return scale


@triton.jit
def _head_row(
    logits,
    labels,
    scales,
    lse,
    label_logits,
    entropy,
    logprob_grad,
    entropy_grad,
    scale,
    soft_cap,
    stride,
    VOCAB: tl.constexpr,
    SUMS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    label = tl.load(labels + row)
    if scales is not None:
        scale = tl.load(scales + row)
    columns = tl.arange(0, BLOCK)

    # 1. Sums: log of the sum of exponentials, the label's logit, the entropy
    if SUMS:
        inside = (label >= 0) & (label < VOCAB)
        label_logit = _capped(tl.load(logits + label, mask=inside, other=0.0), scale, soft_cap)
        # The maximum starts finite: differences to it are no NaN, even if the first block is all -inf.
        maximum, total, weighted = -3.4e38, 0.0, 0.0
        for start in range(0, VOCAB, BLOCK):
            valid = start + columns < VOCAB
            x = _capped(tl.load(logits + start + columns, mask=valid, other=0.0), scale, soft_cap)
            x = tl.where(valid, x, -float("inf"))
            top = tl.maximum(maximum, tl.max(x, 0))
            exponentials, decay = tl.exp(x - top), tl.exp(maximum - top)
            if entropy is not None:
                # Terms of probability 0 are 0, whatever their logit.
                weighted += tl.where(total > 0, total * (maximum - top), 0.0)
                terms = tl.where(exponentials > 0, exponentials * (x - top), 0.0)
                weighted = weighted * decay + tl.sum(terms, 0)
            total = total * decay + tl.sum(exponentials, 0)
            maximum = top
        row_lse = maximum + tl.log(total)
        tl.store(lse + row, row_lse)
        tl.store(label_logits + row, label_logit)
        if entropy is not None:
            tl.store(entropy + row, tl.log(total) - weighted / total)
        # Without a barrier, a warp could overwrite the label's logit before another one reads it.
        tl.debug_barrier()
    else:
        row_lse = tl.load(lse + row)

    # 2. Gradient, over the logits
    if GRADIENT:
        label_grad = tl.load(logprob_grad + row)
        if entropy_grad is not None:
            row_entropy, row_entropy_grad = tl.load(entropy + row), tl.load(entropy_grad + row)
        for start in range(0, VOCAB, BLOCK):
            column = start + columns
            valid = column < VOCAB
            x = tl.load(logits + column, mask=valid, other=0.0)
            log_p = _capped(x, scale, soft_cap) - row_lse
            p = tl.exp(log_p)
            grad = p * label_grad
            if entropy_grad is not None:
                grad += tl.where(p > 0, p * row_entropy_grad * (log_p + row_entropy), 0.0)
            grad = (tl.where(column == label, label_grad, 0.0) - grad) * _slope(x, scale, soft_cap)
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=valid)


def _launch(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    scales: Tensor | None,
    soft_cap: float | None,
    lse: Tensor,
    label_logits: Tensor | None = None,
    entropy: Tensor | None = None,
    logprob_grad: Tensor | None = None,
    entropy_grad: Tensor | None = None,
) -> None:
    """Run the kernel: the sums if there are `label_logits` to write, the gradient if there is a `logprob_grad`."""
    (rows, vocab), stride = logits.shape, logits.stride()
    vectors = labels, scales, lse, label_logits, entropy, logprob_grad, entropy_grad
    assert stride[1] == 1 and all(x is None or (x.is_contiguous() and x.numel() == rows) for x in vectors)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _head_row[(rows,)](
        logits,
        labels,
        scales,
        lse,
        label_logits,
        entropy,
        logprob_grad,
        entropy_grad,
        scale,
        soft_cap,
        stride[0],
        VOCAB=vocab,
        SUMS=label_logits is not None,
        GRADIENT=logprob_grad is not None,
        BLOCK=block,
        num_warps=max(block // 512, 4),
    )


@torch.library.custom_op("archon::head_sums", mutates_args=("lse", "label_logits", "entropy"))
def head_sums(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    scales: Tensor | None,
    soft_cap: float | None,
    lse: Tensor,
    label_logits: Tensor,
    entropy: Tensor | None,
) -> None:
    """Write the lse and, if there is one, the entropy of these columns, and the label's logit, 0 outside of them."""
    _launch(logits, labels, scale, scales, soft_cap, lse, label_logits, entropy)


@torch.library.custom_op("archon::head_gradient", mutates_args=("logits",))
def head_gradient(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    scales: Tensor | None,
    soft_cap: float | None,
    lse: Tensor,
    entropy: Tensor | None,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
) -> None:
    """Overwrite the logits by their gradient, from the gradients of logprobs and entropies and the row sums."""
    _launch(logits, labels, scale, scales, soft_cap, lse, None, entropy, logprob_grad, entropy_grad)


@torch.library.custom_op("archon::head_loss", mutates_args=("logits", "lse", "label_logits"))
def head_loss(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    scales: Tensor | None,
    soft_cap: float | None,
    lse: Tensor,
    label_logits: Tensor,
    logprob_grad: Tensor,
) -> None:
    """Write the sums and then the gradient of logprobs over the logits, in one launch; for logits with all columns."""
    _launch(logits, labels, scale, scales, soft_cap, lse, label_logits, None, logprob_grad)


@head_sums.register_fake
@head_gradient.register_fake
@head_loss.register_fake
def _writes_in_place(*_: object) -> None:
    """Return nothing: all results are written into arguments."""
