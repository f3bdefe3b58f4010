"""Logits in tiles: softmax sums of each row, and gradients of hidden states and weight, on a CPU and on a GPU.

`archon.models.layers.token_scores` has the formulas. Two classes compute the same three results: the scores of all
rows, the gradients of these scores, and a weighted loss with its gradients.

- `TorchTiles`: some rows and columns, small enough for a CPU's cache, and a dozen PyTorch operators for each. It also
  serves other dtypes on a GPU, by full rows.
- `KernelTiles`: thousands of full rows on a GPU, where reading and writing logits would cost as much as the matmuls.
  One Triton kernel reads a tile and overwrites it by its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from archon.models.layers.matmul import accumulate_matmul
from archon.parallel.comm import Group, all_reduce

# Tile on a CPU: 8 MB in float32, which stays in the last-level cache. It was the fastest of 256 to 2,048 rows and
# 512 to 32,768 columns.
CPU_ROWS, CPU_COLUMNS = 1024, 2048
# Bytes of full rows of logits in `TorchTiles`: on a GPU, and for the weighted loss on any device.
ROWS_BYTES = 256 << 20
# Rows of a tile for the kernel: 4,096 took 8 % less time than 2,048 on an H100 (vocabulary 151,936).
KERNEL_ROWS = 2048, 4096
KERNEL_DTYPES = torch.bfloat16, torch.float32


def _spans(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def tile_shape(rows: int, vocab: int, device: torch.device, full_rows: bool) -> tuple[int, int]:
    """Return rows and columns of a tile: cache-sized on a CPU, full rows on a GPU, where launches would dominate."""
    by_budget = max(128, min(CPU_ROWS * 4, ROWS_BYTES // (4 * vocab)))
    if device.type == "cpu":
        return min(rows, CPU_ROWS, by_budget if full_rows else CPU_ROWS), min(vocab, CPU_COLUMNS)
    return min(rows, by_budget), vocab


def kernel_rows(vocab: int, itemsize: int, memory: int) -> int:
    """Return the rows of a tile on a GPU with this memory, from the size of the vocabulary and of a logit.

    The tile takes 1/32 of the memory, within 2,048 to 4,096 rows. It depends on the total memory, not on the free
    memory, so that a repeated run sums gradients in the same order.
    """
    lowest, highest = KERNEL_ROWS
    fitting = memory // 32 // (vocab * itemsize)
    return min(max(fitting // 128 * 128, lowest), highest)


class LogitOptions(NamedTuple):
    """1 / τ, a number or [N, 1], the soft cap, and the ranks that shard the vocabulary."""

    inv_temperature: Tensor | float
    soft_cap: float | None
    group: Group | None


class RowScores(NamedTuple):
    """Log of the sum of exponentials, logit of the label and, if requested, entropy: [N, 1], over the vocabulary."""

    lse: Tensor
    label_logits: Tensor
    entropy: Tensor | None


Gradients = tuple[Tensor | None, ...]
"""Gradients of the four `HeadOperands`; None if they are not needed."""
Needs = tuple[bool, ...]
"""Which gradients are needed."""


class HeadOperands(NamedTuple):
    """Operands of the logits hidden @ weight^T + low @ up^T; the second term is the head's LoRA.

    Attributes:
        hidden: [N, D].
        weight: [V, D].
        low: [N, r], scale * hidden @ a^T of the LoRA; None without a LoRA.
        up: [V, r], the LoRA's b; None without a LoRA.
    """

    hidden: Tensor
    weight: Tensor
    low: Tensor | None = None
    up: Tensor | None = None

    def in_dtypes(self, gradients: Gradients) -> Gradients:
        """Return gradients in the dtypes of the operands."""
        pairs = zip(gradients, self, strict=True)
        return tuple(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)


def _reduce_over_ranks(scores: RowScores, group: Group | None) -> RowScores:
    """Combine the scores of each rank's columns into scores over the full vocabulary."""
    if group is None:
        return scores
    lse, label_logits, entropy = scores
    top = all_reduce(lse, group, "max")
    total, label_logits = all_reduce(torch.stack(((lse - top).exp(), label_logits)), group)
    full = total.log() + top
    if entropy is not None:
        entropy = full - all_reduce((lse - full).exp() * (lse - entropy), group)
    return RowScores(full, label_logits, entropy)


class _Projection:
    """Tiles of the scaled logits of the operands.

    Matmuls run in the dtype of `hidden`; softmax and sums in `wide`, at least float32.
    """

    def __init__(self, operands: HeadOperands, options: LogitOptions, *, full_rows: bool = False) -> None:
        self.hidden, self.weight, self.low, self.up = self.operands = operands
        hidden, weight = self.hidden, self.weight
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
        if self.low is not None and self.up is not None:
            accumulate_matmul(tile, self.low[r0:r1], self.up[c0:c1].t())
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
    """Gradients of the operands, accumulated over tiles.

    Rows are scaled on the smaller operand of each matmul.
    """

    def __init__(self, projection: _Projection, needs: Needs) -> None:
        hidden, weight, low, up = operands = projection.operands
        self.projection, wide = projection, projection.wide
        self.sums: Gradients = tuple(
            x.new_empty(x.shape, dtype=wide) if x is not None and needed else None
            for x, needed in zip(operands, needs, strict=True)
        )
        # (input, matrix, gradient of the input, gradient of the matrix) of each product in the logits.
        self.products = [(hidden, weight, self.sums[0], self.sums[1])]
        if low is not None and up is not None:
            self.products.append((low, up, self.sums[2], self.sums[3]))
        if not hidden.shape[0]:
            for _, _, _, grad in self.products:
                if grad is not None:
                    grad.zero_()

    def scaled(self, factor: Tensor, r0: int, r1: int) -> list[Tensor]:
        """Return factor [r, 1] times the rows of each product's input."""
        return [(x[r0:r1] * factor).to(x.dtype) for x, *_ in self.products]

    def add(self, core: Tensor, factor: Tensor, scaled: list[Tensor], r0: int, r1: int, c0: int, c1: int) -> None:
        """Add the contribution of one tile with gradient factor [r, 1] * core [r, c]; see `scaled`."""
        narrow = core.to(self.projection.hidden.dtype)
        for (_, matrix, input_grad, matrix_grad), rows in zip(self.products, scaled, strict=True):
            if input_grad is not None:
                out = input_grad[r0:r1]
                accumulate_matmul(out, narrow, matrix[c0:c1], first=c0 == 0)
                if c1 == matrix.shape[0]:
                    out.mul_(factor)
            if matrix_grad is not None:
                accumulate_matmul(matrix_grad[c0:c1], narrow.t(), rows, first=r0 == 0)


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


class TorchTiles:
    """Tiles of some rows and columns of the logits, by PyTorch operators. The gradients have at least float32."""

    def __init__(self, operands: HeadOperands, labels: Tensor, options: LogitOptions) -> None:
        self.operands, self.hidden, self.labels, self.options = operands, operands.hidden, labels, options

    def scores(self, with_entropy: bool) -> RowScores:
        """Return the scores of all rows."""
        projection = _Projection(self.operands, self.options)
        # A rank that does not hold a label's column adds 0 to its logit.
        rows = self.hidden.shape[0]
        lse, label_logits = (self.hidden.new_zeros((rows, 1), dtype=projection.wide) for _ in range(2))
        entropy = torch.empty_like(lse) if with_entropy else None
        for r0, r1 in projection.row_spans:
            sums = _RowSums(r1 - r0, lse, with_entropy)
            for c0, c1 in projection.column_spans:
                tile = projection.logits(r0, r1, c0, c1)
                label_logits[r0:r1] += _TileLabels(self.labels[r0:r1], c0, c1).take(tile)
                sums.add(tile, projection.scratch_like(tile))
            lse[r0:r1] = sums.lse()
            if entropy is not None:
                entropy[r0:r1] = sums.entropy()
        return _reduce_over_ranks(RowScores(lse, label_logits, entropy), self.options.group)

    def gradients(
        self,
        needs: Needs,
        lse: Tensor,
        entropy: Tensor | None,
        logprob_grad: Tensor,
        entropy_grad: Tensor | None,
    ) -> Gradients:
        """Return the gradients of the operands for gradients of logprobs and entropies [N, 1]."""
        projection = _Projection(self.operands, self.options)
        gradients = _Gradients(projection, needs)
        for r0, r1 in projection.row_spans:
            # The gradient is factor * core: core = p - [j = y] alone, or g p + g_H p (log p + H) - g [j = y].
            label_grad: Tensor | float = 1.0
            factor = -logprob_grad[r0:r1] * projection.scale(r0, r1)
            if entropy_grad is not None:
                assert entropy is not None
                slope, label_grad = entropy_grad[r0:r1], logprob_grad[r0:r1]
                constant = torch.addcmul(label_grad, slope, entropy[r0:r1])
                factor = torch.full_like(factor, -1.0) * projection.scale(r0, r1)
            scaled = gradients.scaled(factor, r0, r1)
            for c0, c1 in projection.column_spans:
                tile = projection.logits(r0, r1, c0, c1)
                cap_slope = None if projection.soft_cap is None else projection.slope(tile, r0, r1)
                tile.sub_(lse[r0:r1])
                if entropy_grad is None:
                    tile.exp_()
                else:
                    p = torch.exp(tile, out=projection.scratch_like(tile))
                    torch.addcmul(constant, tile, slope, out=tile).mul_(p)
                _TileLabels(self.labels[r0:r1], c0, c1).subtract(tile, label_grad)
                tile = tile if cap_slope is None else tile.mul_(cap_slope)
                gradients.add(tile, factor, scaled, r0, r1, c0, c1)
        return gradients.sums

    def loss(self, needs: Needs, weights: Tensor) -> tuple[Tensor, Gradients]:
        """Return logprobs [N, 1], and the gradients of the sum of -weights * logprobs, for weights [N, 1]."""
        projection = _Projection(self.operands, self.options, full_rows=True)
        gradients = _Gradients(projection, needs)
        logprobs = self.hidden.new_empty((self.hidden.shape[0], 1), dtype=projection.wide)
        for r0, r1 in projection.row_spans:
            sums, tiles = _RowSums(r1 - r0, logprobs, False), []
            label_logits = torch.zeros_like(logprobs[r0:r1])
            for c0, c1 in projection.column_spans:
                tile = projection.logits(r0, r1, c0, c1, offset=(r1 - r0) * c0)
                tile_labels = _TileLabels(self.labels[r0:r1], c0, c1)
                label_logits += tile_labels.take(tile)
                scratch = projection.scratch_like(tile)
                # A soft cap's derivative needs the logits again, so exponentiate a copy.
                maximum = sums.add(tile if projection.soft_cap is None else scratch.copy_(tile), scratch)
                tiles.append((tile, maximum, tile_labels))
            lse, label_logits, _ = _reduce_over_ranks(RowScores(sums.lse(), label_logits, None), self.options.group)
            logprobs[r0:r1] = label_logits - lse
            factor = weights[r0:r1] * projection.scale(r0, r1)
            scaled = gradients.scaled(factor, r0, r1)
            for (c0, c1), (tile, maximum, tile_labels) in zip(projection.column_spans, tiles, strict=True):
                if projection.soft_cap is None:
                    tile_labels.subtract(tile.mul_((maximum - lse).exp_()))
                else:
                    cap_slope = projection.slope(tile, r0, r1)
                    tile_labels.subtract(tile.sub_(lse).exp_())
                    tile.mul_(cap_slope)
                gradients.add(tile, factor, scaled, r0, r1, c0, c1)
        return logprobs, gradients.sums


class KernelTiles:
    """Tiles of full rows of the logits, on a GPU: matmuls and one kernel for each.

    Logits and their gradients have the dtype of `hidden`. The gradient of hidden has it too, because one matmul sums
    over all columns. The gradient of the weight is summed over the tiles in float32.
    """

    def __init__(self, operands: HeadOperands, labels: Tensor, options: LogitOptions) -> None:
        from archon.models.cuda import head

        self.kernels = head
        self.hidden, self.weight, self.low, self.up = self.operands = operands
        self.labels = labels.contiguous()
        hidden, weight = self.hidden, self.weight
        self.inv_temperature, self.soft_cap, self.group = options
        rows, vocab = hidden.shape[0], weight.shape[0]
        step = kernel_rows(vocab, hidden.element_size(), _device_memory(hidden.device))
        self.tiles = [slice(*span) for span in _spans(rows, step)]
        self.buffer = hidden.new_empty(min(rows, step), vocab)

    def _logits(self, tile: slice) -> tuple[Tensor, Tensor, float, Tensor | None, float | None]:
        """Return the first arguments of a kernel: matmul results [r, V] and labels [r] of a tile, and the options."""
        logits = torch.mm(self.hidden[tile], self.weight.t(), out=self.buffer[: tile.stop - tile.start])
        if self.low is not None and self.up is not None:
            logits.addmm_(self.low[tile], self.up.t())
        if isinstance(self.inv_temperature, Tensor):
            return logits, self.labels[tile], 1.0, self.inv_temperature[tile], self.soft_cap
        return logits, self.labels[tile], self.inv_temperature, None, self.soft_cap

    def _new_scores(self, with_entropy: bool) -> RowScores:
        lse, label_logits, entropy = self.hidden.new_empty((3, self.hidden.shape[0], 1), dtype=torch.float32)
        return RowScores(lse, label_logits, entropy if with_entropy else None)

    def _new_gradients(self, needs: Needs) -> Gradients:
        sums: list[Tensor | None] = [None] * len(self.operands)
        for index, (operand, needed) in enumerate(zip(self.operands, needs, strict=True)):
            is_matrix = index % 2 == 1
            if operand is not None and needed:
                sums[index] = torch.empty_like(operand, dtype=torch.float32 if is_matrix else operand.dtype)
                if is_matrix and not self.tiles:
                    sums[index].zero_()  # type: ignore[union-attr]
        return tuple(sums)

    def _accumulate(self, sums: Gradients, grad: Tensor, tile: slice) -> None:
        """Add the contribution of a tile from the gradient of its matmul results, grad [r, V]."""
        for index in (0, 2):
            rows, matrix = self.operands[index], self.operands[index + 1]
            input_grad, matrix_grad = sums[index], sums[index + 1]
            if rows is None or matrix is None:
                continue
            if input_grad is not None:
                torch.mm(grad, matrix, out=input_grad[tile])
            if matrix_grad is not None:
                accumulate_matmul(matrix_grad, grad.t(), rows[tile], first=tile.start == 0)

    def scores(self, with_entropy: bool) -> RowScores:
        """Return the scores of all rows."""
        scores = self._new_scores(with_entropy)
        for tile in self.tiles:
            self.kernels.head_sums(*self._logits(tile), *(_rows(x, tile) for x in scores))
        return _reduce_over_ranks(scores, self.group)

    def gradients(
        self,
        needs: Needs,
        lse: Tensor,
        entropy: Tensor | None,
        logprob_grad: Tensor,
        entropy_grad: Tensor | None,
    ) -> Gradients:
        """Return the gradients of the operands for gradients of logprobs and entropies [N, 1]."""
        logprob_grad = logprob_grad.contiguous()
        entropy_grad = None if entropy_grad is None else entropy_grad.contiguous()
        sums = self._new_gradients(needs)
        for tile in self.tiles:
            logits, *options = self._logits(tile)
            vectors = lse, entropy, logprob_grad, entropy_grad
            self.kernels.head_gradient(logits, *options, *(_rows(x, tile) for x in vectors))
            self._accumulate(sums, logits, tile)
        return sums

    def loss(self, needs: Needs, weights: Tensor) -> tuple[Tensor, Gradients]:
        """Return logprobs [N, 1], and the gradients of the sum of -weights * logprobs, for weights [N, 1]."""
        logprob_grad = -weights
        (lse, label_logits, _), sums = self._new_scores(False), self._new_gradients(needs)
        for tile in self.tiles:
            logits, *options = self._logits(tile)
            if self.group is None:
                self.kernels.head_loss(logits, *options, lse[tile], label_logits[tile], logprob_grad[tile])
            else:
                self.kernels.head_sums(logits, *options, lse[tile], label_logits[tile], None)
                scores = RowScores(lse[tile], label_logits[tile], None)
                lse[tile], label_logits[tile], _ = _reduce_over_ranks(scores, self.group)
                self.kernels.head_gradient(logits, *options, lse[tile], None, logprob_grad[tile], None)
            self._accumulate(sums, logits, tile)
        return label_logits - lse, sums


def _rows(x: Tensor | None, tile: slice) -> Tensor | None:
    return None if x is None else x[tile]


def _device_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def logit_tiles(operands: HeadOperands, labels: Tensor, options: LogitOptions) -> TorchTiles | KernelTiles:
    """Return the tiles of the logits for the device and dtype of the operands.

    Labels are int64 [N] and relative to the first row of `weight`; labels outside 0 .. V - 1 belong to other ranks.
    """
    hidden = operands.hidden
    has_kernels = hidden.is_cuda and hidden.dtype in KERNEL_DTYPES
    return (KernelTiles if has_kernels else TorchTiles)(operands, labels, options)
