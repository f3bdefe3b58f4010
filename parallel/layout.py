"""Layout strings: `d4p2t2c1e1`, `r2` for replicas, `(attn:d1p4t2c2|ffn:d1p4t1e4)` for a separate expert layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice, product

from archon.parallel.dims import ArchonParallelDims
from archon.schema.errors import LayoutError

_LETTERS = {"d": "dp_shard", "r": "dp_replicate", "p": "pp", "t": "tp", "c": "cp", "e": "ep"}
MAX_DIGITS = 9  # of a degree
_SHAPE = (
    "expected letters d (data), r (replicas), p (pipeline), t (tensor), c (context), e (experts), "
    "each with a degree: d4p2t2"
)
_HYBRID = re.compile(r"\(\s*attn:([^|()]*)\|\s*ffn:([^|()]*)\)")


@dataclass(frozen=True)
class ParallelLayout:
    """The degrees of a layout string. `etp` is 1 unless the hybrid form gives experts a tensor degree."""

    dp_shard: int = 1
    dp_replicate: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard * self.pp * self.tp * self.cp

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which train different documents."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        """Return the canonical string, which parses back to this layout."""
        if self.etp > 1:
            data = self.dp_shard * self.cp // self.ep
            replicas = f"r{self.dp_replicate}" if self.dp_replicate > 1 else ""
            attention = f"attn:d{self.dp_shard}{replicas}p{self.pp}t{self.tp}c{self.cp}"
            return f"({attention}|ffn:d{data}{replicas}p{self.pp}t{self.etp}e{self.ep})"
        degrees = {letter: getattr(self, name) for letter, name in _LETTERS.items()}
        return "".join(f"{letter}{n}" for letter, n in degrees.items() if n > 1) or "d1"

    def dims(self, device_type: str = "cpu") -> ArchonParallelDims:
        """Return the checked dimensions. Raises LayoutError with the broken rule and the nearest legal layouts."""
        try:
            return ArchonParallelDims(**asdict(self), world_size=self.world_size, device_type=device_type)
        except LayoutError as error:
            raise LayoutError(f"layout {self}: {error}; {_suggest(self, self.world_size)}") from None


@dataclass(frozen=True)
class ModelSizes:
    """Model sizes that a layout divides.

    Attributes:
        heads, kv_heads: attention heads and key heads.
        hidden: the widths of dense networks and shared experts.
        extra_heads: (heads, key heads) of mixers with other counts.
        needs_ulysses: reason why context parallelism cannot gather keys in every layer; None if it can.
        deepstack_layers: number of first layers that add vision-encoder features (DeepStack); a pipeline keeps them on
            the stage of the vision encoder.
    """

    heads: int
    kv_heads: int
    vocab: int
    layers: int
    hidden: tuple[int, ...] = ()
    experts: int = 0
    expert_hidden: int = 0
    extra_heads: tuple[tuple[int, int], ...] = ()
    needs_ulysses: str | None = None
    deepstack_layers: int = 0

    @property
    def mixer_heads(self) -> tuple[tuple[int, int], ...]:
        """The distinct (heads, key heads) of the layers."""
        return ((self.heads, self.kv_heads), *self.extra_heads)


def parse_layout(text: str, world_size: int | None = None) -> ParallelLayout:
    """Read a layout string and check its rules; a dimension left out is 1, an `archon:` prefix is accepted.

    `d` is the degree of sharded data parallelism, `r` the number of replicas. In the hybrid form both halves must span
    the same ranks and have the same `p`; the `t` of `ffn` is the tensor degree of each expert (1 or the `t` of `attn`).
    With `world_size` the layout must use exactly that many processes. Raises `LayoutError` with the nearest legal
    layouts.
    """
    body = text.strip().removeprefix("archon:").replace(" ", "")
    hybrid = _HYBRID.fullmatch(body)
    layout = _hybrid(text, hybrid[1], hybrid[2]) if hybrid else ParallelLayout(**_degrees(text, body, "drptce"))
    layout.dims()
    if world_size is not None and layout.world_size != world_size:
        raise LayoutError(
            f"layout {text!r} needs {layout.world_size} processes, but {world_size} are running; "
            f"{_suggest(layout, world_size)}"
        )
    return layout


def nearest_layouts(
    target: ParallelLayout,
    world_size: int,
    count: int = 3,
    fits: Callable[[ParallelLayout], bool] = lambda layout: True,
) -> list[ParallelLayout]:
    """Return the legal layouts of `world_size` ranks that `fits` accepts, closest to `target` first.

    The distance is Σ |log2(degree ratio)| over the dimensions.
    """
    names = ("dp_shard", "dp_replicate", "pp", "tp", "cp")
    small = [n for n in range(1, math.isqrt(world_size) + 1) if world_size % n == 0]
    divisors = sorted({*small, *(world_size // n for n in small)})

    def distance(layout: ParallelLayout) -> tuple[float, str]:
        pairs = [(getattr(layout, name), getattr(target, name)) for name in (*names, "ep", "etp")]
        return sum(abs(math.log2(a / b)) for a, b in pairs), str(layout)

    legal: list[ParallelLayout] = []
    for pp, tp, cp, replicas in product(divisors, repeat=4):
        shards = world_size // (pp * tp * cp * replicas)
        if shards * pp * tp * cp * replicas != world_size:
            continue
        for etp in {1, tp} if target.etp > 1 else {1}:
            lender = shards * cp * (tp if etp == 1 else 1)
            nearest = sorted(divisors, key=lambda n: (abs(math.log2(n / target.ep)), n))
            layouts = (ParallelLayout(shards, replicas, pp, tp, cp, ep, etp) for ep in nearest if lender % ep == 0)
            legal += islice(filter(fits, layouts), 1)
    return sorted(legal, key=distance)[:count]


def _degrees(text: str, body: str, letters: str) -> dict[str, int]:
    """Parse `d4p2` to {"dp_shard": 4, "pp": 2}."""
    parts = re.findall(r"([a-z])(\d+)", body)
    if not body or "".join(letter + degree for letter, degree in parts) != body:
        raise LayoutError(f"layout {text!r} is not a layout string; {_SHAPE}")
    degrees: dict[str, int] = {}
    for letter, degree in parts:
        if letter not in letters:
            raise LayoutError(f"layout {text!r}: {letter!r} is not one of {', '.join(letters)} here; {_SHAPE}")
        if _LETTERS[letter] in degrees:
            raise LayoutError(f"layout {text!r} gives {letter!r} twice")
        if len(degree) > MAX_DIGITS:
            raise LayoutError(f"layout {text[:40]!r}: a degree has {len(degree)} digits, expected at most {MAX_DIGITS}")
        if int(degree) < 1:
            raise LayoutError(f"layout {text!r}: {letter}{degree} is below 1; leave the letter out or give 1")
        degrees[_LETTERS[letter]] = int(degree)
    return degrees


def _hybrid(text: str, attention: str, experts: str) -> ParallelLayout:
    attn = ParallelLayout(**_degrees(text, attention, "drptc"))
    ffn = ParallelLayout(**_degrees(text, experts, "drpte"))
    if ffn.pp != attn.pp:
        raise LayoutError(f"layout {text!r}: attn has p{attn.pp} and ffn has p{ffn.pp}; both halves share one pipeline")
    if ffn.dp_replicate != attn.dp_replicate:
        raise LayoutError(
            f"layout {text!r}: attn has r{attn.dp_replicate} and ffn has r{ffn.dp_replicate}; both share replicas"
        )
    ranks = ffn.world_size * ffn.ep
    if ranks != attn.world_size:
        raise LayoutError(
            f"layout {text!r}: attn spans d × p × t × c = {attn.world_size} ranks and ffn d × p × t × e = {ranks}; "
            "both halves must span the same ranks"
        )
    return ParallelLayout(attn.dp_shard, attn.dp_replicate, attn.pp, attn.tp, attn.cp, ffn.ep, ffn.tp)


def _suggest(target: ParallelLayout, world_size: int) -> str:
    return "nearest legal layouts: " + ", ".join(map(str, nearest_layouts(target, world_size)))
