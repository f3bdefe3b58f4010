"""Log-probabilities, entropies and weighted cross-entropy without storing the logits [N, V].

Tiles of logits (some rows and columns) are computed, used while they are in the cache, and recomputed for the gradient
(the idea of Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009, with ordinary matmuls). With l the logits over
the temperature τ, p = softmax(l), H the entropy, y the label:

    log p_y = l_y - lse(l)                  d log p_y / dl_j = [j = y] - p_j
    H = lse(l) - sum_j p_j l_j              d H / dl_j       = -p_j (log p_j + H)

If ranks shard the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3), each rank computes its columns and
communicates only numbers per row: with lse_r, H_r over rank r's columns and w_r = exp(lse_r - lse),

    lse = log sum_r exp(lse_r)              H = lse - sum_r w_r (lse_r - H_r)

A soft cap c (Gemma 2, arXiv:2408.00118, section 2) replaces the products x by c tanh(x / c) before τ divides them; the
gradients above are multiplied by its derivative, 1 - tanh^2(x / c).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.layers.matmul import accumulate_matmul
from archon.parallel.comm import Group, all_reduce

# Tile on a CPU: 8 MB in float32, which stays in the last-level cache. It was the fastest of 256 to 2,048 rows and
# 512 to 32,768 columns.
CPU_ROWS, CPU_COLUMNS = 1024, 2048
# Bytes of full rows of logits on a GPU, and for the weighted loss on any device.
ROWS_BYTES = 256 << 20


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def tile_shape(rows: int, vocab: int, device: torch.device, full_rows: bool) -> tuple[int, int]:
    """Return rows and columns of a tile: cache-sized on a CPU, full rows on a GPU, where launches would dominate."""
    by_budget = max(128, min(CPU_ROWS * 4, ROWS_BYTES // (4 * vocab)))
    if device.type == "cpu":
        return min(rows, CPU_ROWS, by_budget if full_rows else CPU_ROWS), min(vocab, CPU_COLUMNS)
    return min(rows, by_budget), vocab


class _LogitOptions(NamedTuple):
    """1 / τ, a number or [N, 1], the soft cap, and the ranks that shard the vocabulary."""

    inv_temperature: Tensor | float
    soft_cap: float | None
    group: Group | None


class _Projection:
    """Tiles of the scaled logits of hidden [N, D] and weight [V, D].

    Matmuls run in the dtype of `hidden`; softmax and sums in `wide`, at least float32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, options: _LogitOptions, *, full_rows: bool = False) -> None:
        self.hidden, self.weight = hidden, weight
        self.inv_temperature, self.soft_cap, _ = options
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        vocab = weight.shape[0]
        self.rows, self.columns = tile_shape(hidden.shape[0], vocab, hidden.device, full_rows)
        self.row_spans, self.column_spans = _spans(hidden.shape[0], max(self.rows, 1)), _spans(vocab, self.columns)
        # Every tile reuses these buffers, even if a product must be copied into them: page faults of new memory would
        # take longer than the arithmetic.
        self.buffer = hidden.new_empty(self.rows * (vocab if full_rows else self.columns), dtype=self.wide)
        self.scratch = hidden.new_empty(self.rows * self.columns, dtype=self.wide)

    def scale(self, r0: int, r1: int) -> Tensor | float:
        """Return 1 / τ of these rows, a number or [r, 1]."""
        return self.inv_temperature[r0:r1] if isinstance(self.inv_temperature, Tensor) else self.inv_temperature

    def logits(self, r0: int, r1: int, c0: int, c1: int, *, offset: int = 0) -> Tensor:
        """Return one tile [r, c] in `wide`, a view of the shared buffer at `offset`."""
        tile = self.buffer[offset : offset + (r1 - r0) * (c1 - c0)].view(r1 - r0, c1 - c0)
        accumulate_matmul(tile, self.hidden[r0:r1], self.weight[c0:c1].t(), first=True)
        scale = self.scale(r0, r1)
        if self.soft_cap is not None:
            return tile.div_(self.soft_cap).tanh_().mul_(self.soft_cap * scale)
        return tile if isinstance(scale, float) and scale == 1.0 else tile.mul_(scale)

    def slope(self, tile: Tensor, r0: int, r1: int) -> Tensor:
        """Return the derivative of the soft cap at a tile of logits, as a new tensor."""
        assert self.soft_cap is not None
        return (tile / (self.soft_cap * self.scale(r0, r1))).square_().neg_().add_(1)

    def scratch_like(self, tile: Tensor) -> Tensor:
        return self.scratch[: tile.numel()].view(tile.shape)


class _Gradients:
    """Gradients of hidden and weight, accumulated over tiles.

    Rows are scaled on the smaller operand of each matmul.
    """

    def __init__(self, projection: _Projection, needs_hidden: bool, needs_weight: bool) -> None:
        hidden, weight, wide = projection.hidden, projection.weight, projection.wide
        self.projection = projection
        self.hidden = hidden.new_empty(hidden.shape, dtype=wide) if needs_hidden else None
        self.weight = weight.new_empty(weight.shape, dtype=wide) if needs_weight else None
        if self.weight is not None and not hidden.shape[0]:
            self.weight.zero_()

    def add(self, core: Tensor, factor: Tensor, scaled_hidden: Tensor, r0: int, r1: int, c0: int, c1: int) -> None:
        """Add the contribution of one tile with gradient factor [r, 1] * core [r, c].

        scaled_hidden [r, D] is factor * hidden.
        """
        narrow = core.to(self.projection.hidden.dtype)
        if self.hidden is not None:
            out = self.hidden[r0:r1]
            accumulate_matmul(out, narrow, self.projection.weight[c0:c1], first=c0 == 0)
            if c1 == self.projection.weight.shape[0]:
                out.mul_(factor)
        if self.weight is not None:
            accumulate_matmul(self.weight[c0:c1], narrow.t(), scaled_hidden, first=r0 == 0)

    def results(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden and weight in their dtypes."""
        pairs = (self.hidden, self.projection.hidden), (self.weight, self.projection.weight)
        return tuple(None if gradient is None else gradient.to(x.dtype) for gradient, x in pairs)


class _RowSums:
    """Running maximum, sum of exponentials and (for the entropy) weighted sum over the tiles of some rows."""

    def __init__(self, rows: int, like: Tensor, with_entropy: bool) -> None:
        self.maximum = like.new_full((rows, 1), -torch.inf)
        self.total = like.new_zeros((rows, 1))
        self.weighted = like.new_zeros((rows, 1)) if with_entropy else None

    def add(self, tile: Tensor, scratch: Tensor) -> Tensor:
        """Add a tile of logits, overwrite it by exp(tile - maximum), and return the new maximum."""
        maximum = torch.maximum(self.maximum, tile.amax(1, keepdim=True))
        drop = self.maximum - maximum
        decay = drop.exp()
        tile.sub_(maximum)
        if self.weighted is not None:
            # For the first tile the drop is -inf and the sums are 0.
            self.weighted.add_(self.total * drop.clamp(min=torch.finfo(drop.dtype).min)).mul_(decay)
            exponentials = torch.exp(tile, out=scratch)
            self.weighted.add_(tile.mul_(exponentials).sum(1, keepdim=True))
            self.total.mul_(decay).add_(exponentials.sum(1, keepdim=True))
        else:
            self.total.mul_(decay).add_(tile.exp_().sum(1, keepdim=True))
        self.maximum = maximum
        return maximum

    def lse(self) -> Tensor:
        return self.total.log() + self.maximum

    def entropy(self) -> Tensor:
        assert self.weighted is not None
        return self.total.log() - self.weighted / self.total


def _reduce_over_ranks(
    lse: Tensor, label_logits: Tensor, entropy: Tensor | None, group: Group | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combine lse, label logits and entropies [r, 1] of each rank's columns over the full vocabulary."""
    if group is None:
        return lse, label_logits, entropy
    top = all_reduce(lse, group, "max")
    total, label_logits = all_reduce(torch.stack(((lse - top).exp(), label_logits)), group)
    full = total.log() + top
    if entropy is not None:
        entropy = full - all_reduce((lse - full).exp() * (lse - entropy), group)
    return full, label_logits, entropy


class _TileLabels:
    """Labels [r] of a tile's rows, some outside its columns; indexed without host synchronization."""

    def __init__(self, labels: Tensor, c0: int, c1: int) -> None:
        self.inside = (labels >= c0) & (labels < c1)
        self.entries = torch.arange(labels.shape[0], device=labels.device), (labels - c0).clamp(0, c1 - c0 - 1)

    def take(self, tile: Tensor) -> Tensor:
        """Return the tile's entries at the labels [r, 1], 0 for labels outside its columns."""
        return torch.where(self.inside, tile[self.entries], 0.0).unsqueeze(1)

    def subtract(self, tile: Tensor, fraction: Tensor | float = 1.0) -> None:
        """Subtract `fraction`, a number or [r, 1], from the tile's entries at the labels."""
        fraction = fraction.squeeze(1) if isinstance(fraction, Tensor) else fraction
        tile[self.entries] -= self.inside.to(tile.dtype) * fraction


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: _LogitOptions, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        projection = _Projection(hidden, weight, options)
        # A rank that does not hold a label's column adds 0 to its logit.
        lse, label_logits = (hidden.new_zeros((hidden.shape[0], 1), dtype=projection.wide) for _ in range(2))
        entropy = torch.empty_like(lse) if with_entropy else None
        for r0, r1 in projection.row_spans:
            sums = _RowSums(r1 - r0, lse, with_entropy)
            for c0, c1 in projection.column_spans:
                tile = projection.logits(r0, r1, c0, c1)
                label_logits[r0:r1] += _TileLabels(labels[r0:r1], c0, c1).take(tile)
                sums.add(tile, projection.scratch_like(tile))
            lse[r0:r1] = sums.lse()
            if entropy is not None:
                entropy[r0:r1] = sums.entropy()
        lse, label_logits, entropy = _reduce_over_ranks(lse, label_logits, entropy, options.group)
        ctx.options = options
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        # An unused entropy keeps gradient None, so the cheaper backward of logprobs alone runs.
        ctx.set_materialize_grads(False)
        return (label_logits - lse).squeeze(1), None if entropy is None else entropy.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(lse).squeeze(1)
        projection = _Projection(hidden, weight, ctx.options)
        gradients = _Gradients(projection, *ctx.needs_input_grad[:2])
        logprob_grad = logprob_grad.unsqueeze(1)
        for r0, r1 in projection.row_spans:
            # The gradient is factor * core: core = p - [j = y] alone, or g p + g_H p (log p + H) - g [j = y].
            label_grad: Tensor | float = 1.0
            factor = -logprob_grad[r0:r1] * projection.scale(r0, r1)
            if entropy_grad is not None:
                slope, label_grad = entropy_grad[r0:r1].unsqueeze(1), logprob_grad[r0:r1]
                constant = torch.addcmul(label_grad, slope, entropy[r0:r1])
                factor = torch.full_like(factor, -1.0) * projection.scale(r0, r1)
            scaled_hidden = (hidden[r0:r1] * factor).to(hidden.dtype)
            for c0, c1 in projection.column_spans:
                tile = projection.logits(r0, r1, c0, c1)
                cap_slope = None if projection.soft_cap is None else projection.slope(tile, r0, r1)
                tile.sub_(lse[r0:r1])
                if entropy_grad is None:
                    tile.exp_()
                else:
                    p = torch.exp(tile, out=projection.scratch_like(tile))
                    torch.addcmul(constant, tile, slope, out=tile).mul_(p)
                _TileLabels(labels[r0:r1], c0, c1).subtract(tile, label_grad)
                tile = tile if cap_slope is None else tile.mul_(cap_slope)
                gradients.add(tile, factor, scaled_hidden, r0, r1, c0, c1)
        return *gradients.results(), None, None, None


class _WeightedLoss(torch.autograd.Function):
    """Loss with its gradient computed in the forward: three matmuls instead of four.

    This needs weights that are known before the forward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, options: _LogitOptions
    ) -> tuple[Tensor, Tensor]:
        projection, (_, soft_cap, group) = _Projection(hidden, weight, options, full_rows=True), options
        gradients = _Gradients(projection, *ctx.needs_input_grad[:2])
        logprobs = hidden.new_empty((hidden.shape[0], 1), dtype=projection.wide)
        for r0, r1 in projection.row_spans:
            sums, tiles = _RowSums(r1 - r0, logprobs, False), []
            label_logits = torch.zeros_like(logprobs[r0:r1])
            for c0, c1 in projection.column_spans:
                tile = projection.logits(r0, r1, c0, c1, offset=(r1 - r0) * c0)
                tile_labels = _TileLabels(labels[r0:r1], c0, c1)
                label_logits += tile_labels.take(tile)
                scratch = projection.scratch_like(tile)
                # A soft cap's derivative needs the logits again, so exponentiate a copy.
                maximum = sums.add(tile if soft_cap is None else scratch.copy_(tile), scratch)
                tiles.append((tile, maximum, tile_labels))
            lse, label_logits, _ = _reduce_over_ranks(sums.lse(), label_logits, None, group)
            logprobs[r0:r1] = label_logits - lse
            factor = weights[r0:r1].unsqueeze(1) * projection.scale(r0, r1)
            scaled_hidden = (hidden[r0:r1] * factor).to(hidden.dtype)
            for (c0, c1), (tile, maximum, tile_labels) in zip(projection.column_spans, tiles, strict=True):
                if soft_cap is None:
                    tile_labels.subtract(tile.mul_((maximum - lse).exp_()))
                else:
                    cap_slope = projection.slope(tile, r0, r1)
                    tile_labels.subtract(tile.sub_(lse).exp_())
                    tile.mul_(cap_slope)
                gradients.add(tile, factor, scaled_hidden, r0, r1, c0, c1)
        ctx.gradients = gradients.results()
        logprobs = logprobs.squeeze(1)
        ctx.mark_non_differentiable(logprobs)
        return -(logprobs * weights).sum(), logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward of the weighted loss was called twice; it keeps its gradients for one call: run forward again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(loss_grad) for g in gradients), None, None, None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    with_entropy: bool = True,
    soft_cap: float | None = None,
    group: Group | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(label) [N] and the entropy [N] in nats (or None), differentiable in hidden and weight.

    Args:
        hidden: [N, D] floating point, of the weight's dtype.
        weight: [V, D].
        labels: int64 [N], each in 0 .. V - 1.
        temperature: divides the logits; a positive number, or a tensor [N].
        with_entropy: compute the entropy.
        soft_cap: bounds the logits before the temperature divides them; None for no bound.
        group: ranks with equal shards of the vocabulary's rows, in order; `weight` is this rank's shard. All ranks pass
            the same rows and labels and get the same scores; the gradient of hidden must be summed over them.
    """
    options = _LogitOptions(_inverse(temperature, hidden), soft_cap, group)
    return _TokenScores.apply(hidden, weight, _local_labels(labels, weight, group), options, with_entropy)


def weighted_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    soft_cap: float | None = None,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of -weights * log p(label), differentiable, and constant logprobs [N].

    The sum is differentiable in hidden and weight; the logprobs are not differentiable. Weights [N] are constants; the
    other arguments are as in `token_scores`.
    """
    weights = weights.detach().to(torch.promote_types(hidden.dtype, torch.float32))
    if not torch.is_grad_enabled():
        logprobs, _ = token_scores(
            hidden, weight, labels, temperature, with_entropy=False, soft_cap=soft_cap, group=group
        )
        return -(logprobs * weights).sum(), logprobs
    options = _LogitOptions(_inverse(temperature, hidden), soft_cap, group)
    return _WeightedLoss.apply(hidden, weight, _local_labels(labels, weight, group), weights, options)


def apply_soft_cap(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Return soft_cap * tanh(logits / soft_cap), or the unchanged logits without a soft cap."""
    return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap


def _local_labels(labels: Tensor, weight: Tensor, group: Group | None) -> Tensor:
    """Return labels relative to this rank's first row; labels of other ranks are outside 0 .. V - 1."""
    return labels if group is None else labels - group.rank * weight.shape[0]


def _inverse(temperature: Tensor | float, hidden: Tensor) -> Tensor | float:
    if not isinstance(temperature, Tensor):
        return 1.0 / float(temperature)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return temperature.detach().to(hidden.device, wide).reciprocal().unsqueeze(1)
