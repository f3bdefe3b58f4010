"""The catalog of what is used of torch and its like: complete, current, and true of the installed packages."""

from __future__ import annotations

import ast
import json
from collections import defaultdict

import pytest

from tests.dependency_catalog import CATALOG, LIBRARIES, Reader, Use, compare, read_product, render

SOURCE = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
import json

@torch.no_grad()
def scale(x: Tensor, by: torch.device, module: nn.Module, *rest, **options):
    json.dumps(x)
    module.own(1)
    y = F.linear(x, by, bias=None).relu(3)
    x.view(-1, 2)
    x.grad.zero_()
    return torch.empty(*rest, dtype=torch.float32, **options)

def hidden(torch):
    return torch.nothing(1)

def local():
    from safetensors.torch import load as read
    F = read(b"")
    return F.nothing(2), lambda dcp: dcp.nothing(), dcp.save({}, checkpoint_id="a")

class Model(nn.Module):
    def forward(self, x: Tensor | None) -> "Tensor":
        return x.other()
"""


def test_imports_attributes_calls_and_scopes_are_read() -> None:
    found: dict[str, Use] = defaultdict(Use)
    Reader("a.module", found).visit(ast.parse(SOURCE))

    calls = {symbol: sorted(use.calls) for symbol, use in found.items() if use.calls}
    assert calls == {
        "torch.no_grad": [""],
        "torch.nn.functional.linear": ["_, _, bias=_"],
        "torch.Tensor.view": ["self, _, _"],
        "torch.empty": ["*_, dtype=_, **_"],
        "safetensors.torch.load": ["_"],
        "torch.distributed.checkpoint.save": ["_, checkpoint_id=_"],
    }
    assert found.keys() - calls.keys() == {
        "torch.nn.functional",
        "torch.Tensor",
        "torch.nn",
        "torch.nn.Module",
        "torch.distributed.checkpoint",
        "torch.device",
        "torch.float32",
    }
    assert all(use.modules == {"a.module"} for use in found.values())


def test_the_catalog_is_current() -> None:
    assert CATALOG.read_text(encoding="utf-8") == render(read_product()), (
        "the product uses other symbols than the catalog says: run `python -m tests.dependency_catalog`"
    )


def test_every_symbol_of_the_installed_packages_exists_and_takes_these_arguments() -> None:
    problems, facts = compare(json.loads(CATALOG.read_text(encoding="utf-8")))
    assert problems == []
    assert {"torch", "transformers", "safetensors", "megatron-core"} <= facts["versions"].keys()
    assert facts["symbols"] > 250
    assert facts["existence_only"] < facts["symbols"] / 20  # nearly every call is compared with a signature


@pytest.mark.parametrize(
    ("symbol", "call", "what"),
    [
        ("torch.nn.functional.linear", "_, _, biased=_", "no longer takes (_, _, biased=_)"),
        ("torch.empty", "_, kind=_", "no longer takes (_, kind=_)"),
        ("torch.Tensor.index_select", "self, _", "no longer takes (self, _)"),
        ("torch.nn.Linear", "_", "no longer takes (_)"),
        ("torch.Size", "_, _", "no longer takes (_, _)"),
        ("torch.distributed.checkpoint.save", "_, folder=_", "no longer takes (_, folder=_)"),
        ("torch.nn.functional.linearly", "_", "is gone"),
        ("torch.Tensor.viewed", "self", "is gone"),
        ("torch.distributed.nowhere", None, "is gone"),
        ("transformers.AutoNothing", None, "is gone"),
        ("transformers.AutoConfig.from_pretrained", "", "no longer takes ()"),
    ],
)
def test_what_is_gone_or_called_differently_is_told(symbol: str, call: str | None, what: str) -> None:
    use = {"modules": ["a.module"], "calls": [] if call is None else [call]}
    problems, _ = compare({symbol: use})
    assert [(problem.symbol, problem.what[: len(what)], problem.modules) for problem in problems] == [
        (symbol, what, ["a.module"])
    ]


@pytest.mark.parametrize(
    ("symbol", "call"),
    [
        ("torch.empty", "_, _, dtype=_, device=_"),
        ("torch.empty", "*_, **_"),
        ("torch.Tensor.view", "self, *_"),
        ("torch.Tensor.to_local", "self"),
        ("torch.Tensor.sum", "self, _, keepdim=_"),
        ("torch.Generator", "_"),
        ("transformers.AutoTokenizer.from_pretrained", "_, trust_remote_code=_"),
    ],
)
def test_what_is_taken_is_not_told(symbol: str, call: str) -> None:
    assert compare({symbol: {"modules": [], "calls": [call]}})[0] == []


def test_a_package_that_is_not_installed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "nowhere", "a-package-that-nobody-has")
    catalog = {name: {"modules": [], "calls": []} for name in ("nowhere.nothing", "torch.Tensor")}
    problems, facts = compare(catalog)
    assert (problems, facts["symbols"], facts["not_installed"]) == ([], 1, 1)
