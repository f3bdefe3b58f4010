"""Contracts of isolation hold for a family of each kind, and a leak of each kind is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archon.models.attention.decode.paged_cache import StateCache
from archon.models.attention.meta import PackedAttention, PrefixAttention
from archon.tools.check.isolation import check_forks, check_isolation, check_shared_prefixes
from archon.tools.check.oracle import SLOW_DECAYS, ContractError
from archon.tools.check.random_configs import draw_fields
from archon.tools.check.round_trip import fresh_model

DELTA_NETS = ["qwen3_5_text", "qwen3_5_moe", "qwen3_next"]
OTHERS = ["mistral", "qwen3", "mixtral"]


@pytest.mark.parametrize("family", [*DELTA_NETS, *OTHERS])
def test_documents_and_forks_do_not_see_each_other(family: str) -> None:
    assert check_isolation(1, family) == 4
    assert check_forks(1, family) == 4
    assert check_shared_prefixes(1, family)


def test_the_checked_models_decay_slowly() -> None:
    model = fresh_model({"model_type": "qwen3_5_text"} | draw_fields(0, "qwen3_5_text"))
    rates = [p.exp() for name, p in model.named_parameters() if name.endswith("A_log")]
    assert rates and all(SLOW_DECAYS[0] <= rate.min() and rate.max() <= SLOW_DECAYS[1] for rate in rates)


def test_a_state_that_runs_on_into_the_next_document_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_document(self: PackedAttention, layer: int, rows: Any, weights: Any, scan: Any) -> Tensor:
        tokens = len(rows[0])
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        return scan(rows, weights, PackedAttention(bounds, tokens).documents, None)[0]

    monkeypatch.setattr(PackedAttention, "run_recurrence", one_document)
    with pytest.raises(ContractError, match=r"document 2 changes by .* when document 1 does"):
        check_isolation(0, "qwen3_5_text")


def test_a_delta_net_that_runs_on_after_a_branch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one document, all that are computed: what a mixer would do that does not know of shared beginnings."""

    def one_document(self: PrefixAttention, layer: int, rows: Any, weights: Any, scan: Any) -> Tensor:
        tokens = len(rows[0])
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        return scan(rows, weights, PackedAttention(bounds, tokens).documents, None)[0]

    monkeypatch.setattr(PrefixAttention, "run_recurrence", one_document)
    with pytest.raises(ContractError, match="changes the logits"):
        check_shared_prefixes(0, "qwen3_5_text")


def test_a_fork_without_the_state_after_its_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateCache, "copy", lambda self, copies: None)
    with pytest.raises(ContractError, match="of an answer"):
        check_forks(0, "qwen3_5_text")
