"""`activation_checkpoint: offload` keeps the inputs of blocks in host memory and changes no gradient."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.parallel.activation_offload import HostInput, InputOffload
from archon.parallel.compile import apply_compile
from archon.parallel.torch_private import replace_class
from archon.schema.config import EngineConfig
from archon.schema.errors import FamilyError
from tests.cuda_traced.models import family_config
from tests.engine.tiny import CONFIG, VOCAB, make_engine, sft_batch

EXPERTS = family_config("qwen3_moe", vocab_size=VOCAB, mlp_only_layers=[])
DELTA = family_config("qwen3_5_text", vocab_size=VOCAB)
COMPILED = {"compile": True}
BFLOAT16 = {"dtype": "bfloat16"}
LORA = {"lora": {"rank": 2}}


def run(folder: Path, mode: str, hf: dict[str, Any], **config: Any) -> tuple[float, dict[str, Tensor], int, int]:
    """Loss and gradients of a step, the block inputs in memory after a forward pass, and the number of blocks."""
    torch._dynamo.reset()
    fields: dict[str, Any] = {"path": str(folder), "device": "cpu", "init_from_scratch": True, "max_tokens_per_mb": 64}
    (folder / "config.json").write_text(json.dumps(hf))
    if "lora" in config:
        make_engine(folder).save(folder / "base")
        fields |= {"path": str(folder / "base"), "init_from_scratch": False}
    with mock.patch("archon.parallel.decoder.apply_compile", partial(apply_compile, backend="aot_eager")):
        engine = ArchonEngine(EngineConfig.parse(fields | {"activation_checkpoint": {"mode": mode}} | config))
        engine.initialize(None)
    inputs: list[StorageWeakRef] = []
    alive: list[int] = []
    blocks = list(engine.model.layers.values())

    def watched(block_class: Any) -> Any:
        """A subclass that remembers its inputs; a hook would be compiled."""

        def call(self: nn.Module, hidden: Tensor, *args: Any) -> Any:
            inputs.append(StorageWeakRef(hidden.untyped_storage()))
            return block_class.__call__(self, hidden, *args)

        return type(block_class.__name__, (block_class,), {"__call__": call})

    for block in blocks:
        replace_class(block, watched(type(block)))
    norm = engine.model.norm
    norm.register_forward_hook(lambda *_: alive.append(sum(not x.expired() for x in inputs[-len(blocks) :])))
    grads, metrics = engine.gradients(sft_batch(), CrossEntropyLoss(), loss_token_count, full=False)
    return metrics["loss"], grads, max(alive), len(blocks)


@pytest.mark.parametrize(
    ("hf", "config"),
    [
        (CONFIG, {}),
        (CONFIG, BFLOAT16),
        (CONFIG, LORA),
        (EXPERTS, {}),
        pytest.param(CONFIG, COMPILED, marks=pytest.mark.slow),
        pytest.param(EXPERTS, COMPILED | BFLOAT16, marks=pytest.mark.slow),
        pytest.param(DELTA, COMPILED, marks=pytest.mark.slow),
    ],
    ids=["dense", "bfloat16", "LoRA", "experts", "compiled", "compiled experts", "compiled delta nets"],
)
def test_gradients_are_those_of_full_and_no_input_stays_on_the_device(
    tmp_path: Path, hf: dict[str, Any], config: dict[str, Any]
) -> None:
    """Bitwise: a copy to host memory and back rounds nothing."""
    loss, grads, kept, blocks = run(tmp_path, "full", hf, **config)
    offloaded, same, on_device, _ = run(tmp_path, "offload", hf, **config)
    assert offloaded == loss and same.keys() == grads.keys()
    assert all(torch.equal(same[name], grads[name]) for name in grads)
    assert (kept, on_device) == (blocks, 0)


def test_an_input_is_copied_back_while_the_block_above_runs() -> None:
    x = torch.randn(5, 3)
    below = HostInput(x, None)
    above = HostInput(2 * x, below)
    assert torch.equal(above.take(), 2 * x) and above.fetched is None
    assert below.fetched is not None and torch.equal(below.take(), x)
    assert torch.equal(above.take(), 2 * x)  # a second backward pass
    del below
    assert above.below is not None and above.below() is None  # autograd alone keeps the inputs


def test_a_block_that_does_not_save_its_input_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.randn(5, 3)
    with pytest.raises(FamilyError, match=r"saved 1 tensors .* input is not one of them; .* set the mode to full"):
        InputOffload().run(lambda hidden: hidden + weight.exp(), True, x)
    assert torch.equal(InputOffload().run(lambda hidden: hidden + weight, True, x), x + 1)  # saves nothing
