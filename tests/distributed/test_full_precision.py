"""Decays of delta nets and magnitudes of DoRA compute in float32 on two ranks, whatever their layers compute in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.layers.delta_net import LogDecay
from archon.models.lora.dora import Magnitude
from archon.parallel.comm import local
from archon.parallel.gather import full_tensors
from archon.tools.check.layouts import rank_rows
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case, engine_config
from tests.distributed.matrix import data_of

pytestmark = pytest.mark.xdist_group("ranks")


DORA = {"rank": 2, "dora": True}


def wide_weights_of_a_step(folder: str, layout: str, model: str) -> list[str]:
    """Train one step in bfloat16 and return what was wrong with the decays or magnitudes that the forward saw."""
    case = Case(layout, model, "bfloat16")
    options = {"lora": DORA} if model == "dense" else {}
    engine = ArchonEngine(engine_config(case, f"{folder}/checkpoint", layout, **options))
    engine.initialize()
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if name.endswith(("A_log", "dt_bias", "magnitude.weight")):
                parameter.add_(1 / 3)  # no number of bfloat16
    masters = {name: whole.clone() for name, whole in full_tensors(engine.model.named_parameters())}
    wrong, seen = list[str](), set[str]()

    def look(name: str, module: LogDecay | Magnitude) -> None:
        for own, _ in module.named_parameters():
            used, master = local(getattr(module, own)), masters[f"{name}.{own}"]
            heads = master
            if used.shape != master.shape:
                heads = master.chunk(engine.ranks.tp.size)[engine.ranks.tp.rank]
            seen.add(f"{name}.{own}")
            if used.dtype != torch.float32 or not torch.equal(used, heads):
                wrong.append(f"{name}.{own} is {used.dtype} in the forward, {used} for {heads}")

    for name, module in engine.model.named_modules():
        if isinstance(module, LogDecay | Magnitude):
            # After FSDP has gathered the parameters, and before it frees them.
            module.register_forward_pre_hook(lambda module, _, name=name: look(name, module))
    rows = rank_rows(data_of(0), engine.ranks.dp.rank, engine.ranks.dp.size)
    engine.train_batch(rows, CrossEntropyLoss(), loss_token_count)
    if missing := engine.model.full_precision_names() - seen:
        wrong.append(f"{sorted(missing)} were not used")
    others = {p.dtype for p in engine.model.parameters() if p.requires_grad}
    return wrong if others == {torch.float32} else [*wrong, f"masters are {others}"]


def rounded_weights(folder: str) -> list[str]:
    """Return the decays that a pipeline with adapters on a base in bfloat16 passes on in less than float32."""
    engine = ArchonEngine(
        engine_config(Case("p2", "delta", "bfloat16"), f"{folder}/checkpoint", "p2", lora={"rank": 2})
    )
    engine.initialize()
    whole = dict(engine.weights())
    return [name for name in engine.adapter.full_precision_names if whole[name].dtype != torch.float32]


@pytest.mark.slow
def test_a_pipelines_weights_keep_decays_in_float32(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    assert ranks(2).run(rounded_weights, str(reference(Case("d1", "delta")))) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["delta", "dense"])
@pytest.mark.parametrize("layout", ["d2", "t2", "c2"])
def test_decays_and_magnitudes_stay_float32_under_mixed_precision(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path], layout: str, model: str
) -> None:
    folder = str(reference(Case("d1", model)))
    assert ranks(2).run(wide_weights_of_a_step, folder, layout, model) == [[], []]
