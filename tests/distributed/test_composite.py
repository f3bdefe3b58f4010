"""Ranks that train the text decoder of a composite checkpoint export its encoders as they were, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from archon.checkpoint.hf_io import load_spec
from archon.models import get_model_spec
from archon.tools.check.layouts import SIZES
from archon.tools.check.oracle import hf_model, random_config
from archon.tools.check.rank_pool import Pool
from tests.distributed import checkpoints

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("layout", ["d2", "t2", "p2"])
def test_encoders_are_exported_bitwise_after_training(
    layout: str, tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name in get_model_spec("gemma3").model_args_class.hf_fields}
    hf_model(random_config(0, "gemma3", **sizes | {"tie_word_embeddings": False})).save_pretrained(source)
    ranks(2).run(checkpoints.train_and_export, str(source), layout, str(out))
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    computed = load_spec(source, text_only=True).adapter.hf_shapes().keys()
    assert before.keys() == after.keys() and len(before.keys() - computed) > 10
    assert {key for key, x in before.items() if torch.equal(after[key], x)} == before.keys() - computed
