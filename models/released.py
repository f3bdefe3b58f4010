"""Which released model is which family: hub ids and the `model_type` of their configs."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from archon.models.spec import UNSUPPORTED, is_supported_model


class ReleasedModel(NamedTuple):
    """A model by its id on the Hugging Face Hub, and the `model_type` in its config.json."""

    name: str
    model_type: str

    @property
    def status(self) -> str:
        """`supported`, or why archon does not support it."""
        if is_supported_model(self.model_type):
            return "supported"
        reason, nearest = UNSUPPORTED.get(self.model_type, ("", ""))
        return f"not supported: {reason}; the nearest supported family is {nearest}" if reason else "not supported"


@cache
def released_models() -> tuple[ReleasedModel, ...]:
    """Return the known released models, sorted by name."""
    text = files("archon.models").joinpath("released.tsv").read_text(encoding="utf-8")
    return tuple(ReleasedModel(*line.split("\t")) for line in text.splitlines()[1:])


def find_models(text: str) -> list[ReleasedModel]:
    """Return the released models with `text` in their name or model type; without any, ignore punctuation."""
    for normalize in (str.lower, _letters):
        found = [model for model in released_models() if any(normalize(text) in normalize(part) for part in model)]
        if found:
            return found
    return []


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
