"""Documents of a step: lengths and tokens."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from archon.schema.config import StrictModel
from archon.schema.errors import ConfigError
from archon.schema.numbers import read_integer

if TYPE_CHECKING:
    from archon.engine.batch import PackedBatch

SEED = 0
# Standard deviation of the logarithm of a lognormal length; the median is a quarter of the maximum.
SIGMA = 0.8
MAX_DOCUMENTS = 1_000_000


class Shape(StrictModel):
    """Lengths in tokens of the documents of one step, over all ranks."""

    name: str
    lengths: list[int] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_lengths(self) -> Shape:
        if min(self.lengths) < 2:
            raise ValueError(f"shape {self.name}: a document has {min(self.lengths)} tokens; expected at least 2")
        return self

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.lengths)


def even_shape(length: int, tokens: int) -> Shape:
    """Return `tokens` tokens in documents of `length`, or raise ConfigError if they do not divide evenly."""
    if length < 2 or tokens % length:
        raise ConfigError(
            f"--tokens {tokens} is not a multiple of --seq {length}; documents are not split across steps"
        )
    return Shape(name=f"{tokens // length}×{length}", lengths=[length] * (tokens // length))


def parse_shape(text: str, tokens: int) -> Shape:
    """Return the shape of a text such as `700,90,13`, `uniform:1024` or `lognormal:1024`.

    The latter two are random lengths up to 1024 from a fixed seed; they sum to `tokens`.

    Raises:
        ConfigError: the text has another form.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        lengths = [read_integer(part, "a document of --lengths") for part in text.split(",")]
        return Shape(name=f"{len(lengths)} ragged to {max(lengths)}, {sum(lengths)} in total", lengths=lengths)
    match = re.fullmatch(r"(uniform|lognormal):(\d+)", text)
    if match is None:
        raise ConfigError(
            f"--lengths is {text!r}; expected lengths such as 700,90,13, or uniform:1024, or lognormal:1024"
        )
    kind, longest = match[1], read_integer(match[2], "the longest document of --lengths")
    if not 2 <= longest <= tokens:
        raise ConfigError(f"--lengths {text!r}: the longest document must have 2 to {tokens} (--tokens) tokens")
    draw = random.Random(SEED)
    lengths, left = [], tokens
    while left >= 2 and len(lengths) < MAX_DOCUMENTS:
        drawn = draw.uniform(2, longest) if kind == "uniform" else draw.lognormvariate(0, SIGMA) * longest / 4
        length = min(max(round(drawn), 2), longest, left)
        lengths.append(length)
        left -= length
    return Shape(name=f"{kind}:{longest} {len(lengths)} documents", lengths=lengths)


def shard_documents(shape: Shape, vocab_size: int, rank: int, ranks: int) -> PackedBatch:
    """Return the documents of data-parallel rank `rank` of `ranks`: every `ranks`-th one in order of length.

    The random tokens of a document do not depend on the layout.

    Raises:
        ConfigError: there are fewer documents than ranks.
    """
    import torch

    from archon.engine.batch import pack

    if len(shape.lengths) < ranks:
        raise ConfigError(
            f"there are {len(shape.lengths)} documents for {ranks} data-parallel ranks; expected at least one each: "
            "raise --tokens"
        )
    order = sorted(range(len(shape.lengths)), key=lambda document: -shape.lengths[document])
    shard = order[rank::ranks]
    lengths = torch.tensor([shape.lengths[document] for document in shard])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    for row, document in enumerate(shard):
        source = torch.Generator().manual_seed(SEED + document)
        ids[row, : lengths[row]] = torch.randint(vocab_size, (int(lengths[row]),), generator=source)
    return pack({"input_ids": ids, "attention_mask": mask, "loss_mask": mask.long()})
