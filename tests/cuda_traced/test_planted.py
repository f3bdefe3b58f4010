"""Mistakes that only a GPU would show, planted in the code that runs there: each ends its trace."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archon.engine.loss import CrossEntropyLoss
from archon.engine.train_step import MicroBatchRunner
from archon.generation.decode_step import DecodeStep
from archon.models.attention.packed.varlen import _Varlen
from archon.models.base import TransformerBlock
from archon.models.layers import delta_rule, moe
from archon.models.layers.logit_tiles import KernelTiles
from archon.models.layers.moe import MoE, Router
from tests.cuda_traced.launches import compiled_rows
from tests.cuda_traced.models import family_config
from tests.cuda_traced.stand_ins import triton_without_launches
from tests.cuda_traced.test_engine import MODELS, check_step, made
from tests.cuda_traced.test_families import trace_forwards
from tests.cuda_traced.test_generation import generate
from tests.cuda_traced.test_launches import check_rows
from tests.cuda_traced.trace import HostWaitError, MixedDevicesError
from tests.engine.tiny import sft_batch

pytestmark = pytest.mark.cuda_traced


def forward(family: str) -> Callable[[Path], object]:
    return lambda folder: trace_forwards(family_config(family), "varlen")


def forward_with_fla(folder: Path) -> None:
    with triton_without_launches():
        trace_forwards(family_config("qwen3_5_text"), "varlen", delta_rule="fla")


def answers(folder: Path) -> None:
    generate(family_config("qwen3"))


def step(folder: Path) -> None:
    with made(folder, MODELS["dense"]) as (engine, trace):
        check_step(engine, trace, sft_batch(), CrossEntropyLoss())


def compiled_block(folder: Path) -> None:
    check_rows(compiled_rows())


@dataclass
class Planted:
    """An edit of a function's source, what runs it, and the error that ends its trace."""

    owner: Any
    function: str
    snippet: str
    replacement: str
    run: Callable[[Path], object]
    error: type[Exception]
    says: str

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function = inspect.unwrap(getattr(self.owner, self.function))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.snippet) == 1, f"the snippet is {source.count(self.snippet)} times in {self.function}"
        made: dict[str, Any] = {}
        edited = "from __future__ import annotations\n" + source.replace(self.snippet, self.replacement)
        exec(compile(edited, "planted", "exec"), function.__globals__, made)
        monkeypatch.setattr(self.owner, self.function, made[self.function])


ROWS_OF_EXPERTS = "rows = gather_rows(x"
RETURNS = "options: Any) -> Any:"
PLANTED = {
    "boundaries of documents are on the CPU": Planted(
        _Varlen,
        "_run",
        "= self.queries, self.keys",
        "= self.queries, (torch.arange(len(self.keys[0])).int(), self.keys[1])",
        forward("qwen3"),
        MixedDevicesError,
        "torch_attn._varlen_attn.default in archon.models.attention.packed.varlen",
    ),
    "queries have another dtype than keys": Planted(
        _Varlen,
        "_run",
        RETURNS,
        f"{RETURNS}\n    q = q.float()",
        forward("qwen3"),
        AssertionError,
        "FlashAttention in torch.float32",
    ),
    "offsets of experts are on the CPU": Planted(
        moe,
        "grouped_linear",
        "group_ends(counts) if ends is None else ends",
        "torch.arange(len(counts)).int()",
        forward("qwen3_moe"),
        MixedDevicesError,
        "aten._grouped_mm.default in archon.models.layers.matmul.grouped_linear",
    ),
    "the host asks how many rows an expert has": Planted(
        MoE,
        "_apply_experts",
        ROWS_OF_EXPERTS,
        f"counts.max().item()\n        {ROWS_OF_EXPERTS}",
        forward("qwen3_moe"),
        HostWaitError,
        "aten._local_scalar_dense",
    ),
    "the host finds the rows of an expert": Planted(
        MoE,
        "_apply_experts",
        ROWS_OF_EXPERTS,
        f"(groups == 0).nonzero()\n        {ROWS_OF_EXPERTS}",
        forward("qwen3_moe"),
        HostWaitError,
        "aten.nonzero",
    ),
    "each layer copies a constant to the device": Planted(
        Router,
        "_weigh_by_kernel",
        "tokens.detach().squeeze(0)",
        "p.new_tensor(float(p.shape[0]))",
        forward("qwen3_moe"),
        HostWaitError,
        "aten._to_copy.default from memory of the host",
    ),
    "a kernel of fla has to ask for the boundaries": Planted(
        delta_rule,
        "_fla_delta_rule",
        "cu_seqlens_cpu=documents.cu_seqlens_cpu,",
        "",
        forward_with_fla,
        HostWaitError,
        "aten.repeat_interleave",
    ),
    "labels of the head's kernel are on the CPU": Planted(
        KernelTiles,
        "__init__",
        "labels.contiguous()",
        "torch.zeros(len(labels), dtype=torch.int64)",
        forward("qwen3"),
        MixedDevicesError,
        "archon.head_sums.default in archon.models.layers.logit_tiles",
    ),
    "pages of sequences are on the CPU": Planted(
        DecodeStep,
        "__init__",
        "torch.zeros(n_rows, width, dtype=torch.int64, device=self.device)",
        "torch.zeros(n_rows, width, dtype=torch.int64)",
        answers,
        MixedDevicesError,
        "aten.copy_.default in archon.generation.decode_step.DecodeStep._send",
    ),
    "a step reads its loss before its metrics": Planted(
        MicroBatchRunner,
        "read",
        "return sums.read(",
        "sums.loss.item()\n    return sums.read(",
        step,
        HostWaitError,
        "aten._local_scalar_dense",
    ),
    "a compiled block launches one more kernel": Planted(
        TransformerBlock,
        "_add",
        "x + out if",
        "x + out.cumsum(0) if",
        compiled_block,
        AssertionError,
        "'what': 'compiled block of Qwen3-0.6B: forward'",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_ends_its_trace(
    monkeypatch: pytest.MonkeyPatch, traced: Callable[..., None], tmp_path: Path, mistake: str
) -> None:
    traced("", "", f"planted: {mistake}")
    planted = PLANTED[mistake]
    planted.plant(monkeypatch)
    with pytest.raises(planted.error, match=planted.says.replace(".", r"\.")):
        planted.run(tmp_path)
