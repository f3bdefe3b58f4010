"""The C functions of elementwise layers against the plain twins in float64, and how they are built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archon.models.cpu import fused, library, operations
from archon.parallel.torch_private import FakeTensorMode
from tests.tolerances import FORMULA_FP32

ROWS = 37


@pytest.fixture(autouse=True)
def _fresh_library() -> Iterator[None]:
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


def part_of_joint(heads: int, features: int) -> Tensor:
    """Return heads [T, H, d] as a joint product of several projections has them."""
    return torch.randn(ROWS, 24 + heads * features)[:, 8:-16].unflatten(-1, (heads, features))


def angles(pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(ROWS, 1, pairs)
    return angle.cos(), angle.sin()


def normed_and_rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return fused.plain_rotate(fused.plain_rms_norm(x, weight, 1e-2, 0.5), cos, sin, interleaved)


CASES: dict[str, Callable[[], tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[object, ...]]]] = {
    "a norm": lambda: (fused.rms_norm, fused.plain_rms_norm, (torch.randn(ROWS, 512), torch.randn(512), 1e-6)),
    "a norm of one vector": lambda: (fused.rms_norm, fused.plain_rms_norm, (torch.randn(20), torch.randn(20), 1e-6)),
    "a norm with an offset": lambda: (
        fused.rms_norm,
        fused.plain_rms_norm,
        (part_of_joint(3, 20), torch.randn(20), 1e-2, 1.0, True),
    ),
    "a norm of many rows": lambda: (
        fused.rms_norm,
        fused.plain_rms_norm,
        (torch.randn(4000, 64), torch.randn(64), 1e-6),
    ),
    "a rotation": lambda: (fused.rotate, fused.plain_rotate, (part_of_joint(8, 64), *angles(32))),
    "a rotation of pairs side by side": lambda: (
        fused.rotate,
        fused.plain_rotate,
        (part_of_joint(5, 14), *angles(7), True),
    ),
    "a rotation of some features": lambda: (fused.rotate, fused.plain_rotate, (part_of_joint(2, 20), *angles(3))),
    "a norm and a rotation": lambda: (
        lambda x, weight, *turn: fused.norm_and_rotate(x, (weight, 1e-2, 0.5, False), *turn),
        normed_and_rotated,
        (part_of_joint(3, 20), torch.randn(20), *angles(7), False),
    ),
    "a norm and a rotation of pairs side by side": lambda: (
        lambda x, weight, *turn: fused.norm_and_rotate(x, (weight, 1e-2, 0.5, False), *turn),
        normed_and_rotated,
        (part_of_joint(3, 20), torch.randn(20), *angles(10), True),
    ),
    "a gated activation": lambda: (
        fused.swiglu,
        fused.plain_swiglu,
        torch.randn(ROWS, 2816).mul_(20).split(1408, dim=-1),
    ),
    "a gated activation of experts": lambda: (
        fused.swiglu,
        fused.plain_swiglu,
        (torch.randn(3, ROWS, 30), torch.randn(3, ROWS, 30)),
    ),
}


class Ordinary(Tensor):
    """A subclass, whose memory may be elsewhere."""


def double(x: object) -> object:
    return x.double() if isinstance(x, Tensor) else x


def trained(args: tuple[object, ...]) -> tuple[object, ...]:
    """Arguments whose tensors have gradients, but for the angles of a rotation, which are the same for all layers."""
    return tuple(x.detach().requires_grad_() if isinstance(x, Tensor) and x.shape[-2:-1] != (1,) else x for x in args)


@pytest.mark.parametrize("summed", [False, True], ids=["a dense gradient", "the gradient of a sum"])
@pytest.mark.parametrize("name", CASES)
def test_their_gradients_equal_those_of_the_plain_twins(
    name: str, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    function, twin, args = CASES[name]()
    exact, own = trained(tuple(map(double, args))), trained(args)
    wanted = twin(*exact)
    weights = torch.ones_like(wanted) if summed else torch.randn_like(wanted)
    called = spied_functions(monkeypatch)
    got = function(*own)
    (got.sum() if summed else (got * weights.float()).sum()).backward()
    (wanted * weights).sum().backward()
    if not summed:  # whose gradient has no memory of its own, which a rotation leaves to PyTorch
        assert len(called) == (4 if "a norm and" in name else 2), "forward and backward"
    for ours, theirs in zip(own, exact, strict=True):
        if isinstance(ours, Tensor) and ours.requires_grad:
            assert ours.grad is not None and theirs.grad is not None
            scale = float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=2 * FORMULA_FP32 * scale)


def spied_functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that are called from now on."""
    called = list[str]()
    functions = library.kernels()
    assert functions is not None
    spied = {
        key: lambda *args, key=key, c_function=c_function: (called.append(key), c_function(*args))[1]
        for key, c_function in functions.items()
    }
    monkeypatch.setattr(operations, "kernel", spied.__getitem__)
    return called


@pytest.mark.parametrize("name", CASES)
def test_layers_equal_their_plain_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    function, twin, args = CASES[name]()
    expected = twin(*map(double, args))
    called = spied_functions(monkeypatch)
    with torch.inference_mode():
        got = function(*args)
    assert len(called) == 1
    assert got.is_contiguous()
    # The largest rotated or normed features are about 5, gated ones about 1,000.
    torch.testing.assert_close(
        got.double(), expected, rtol=FORMULA_FP32, atol=FORMULA_FP32 * float(expected.abs().max())
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("features", "columns"), [(1, 1), (20, 31), (64, 32), (512, 96), (513, 33), (1408, 70), (2048, 65)]
)
def test_products_with_packed_weights(features: int, columns: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(columns, features), torch.randn(columns) if with_bias else None
    packed = operations.pack_weight(weight, bias)
    assert packed is not None
    wide = None if bias is None else bias.double()
    threads = torch.get_num_threads()
    for rows in (0, 1, 2, 5, 6, 7, 13, 14, 15, 29, 48, 49, 112, 113, 240):
        x = torch.randn(rows, features + 3)[:, 2:-1]
        expected = torch.nn.functional.linear(x.double(), weight.double(), wide)
        got = packed(x)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6 * features**0.5 * 4)
        try:
            torch.set_num_threads(3)
            assert torch.equal(packed(x.contiguous()), got), "another layout and other threads"
        finally:
            torch.set_num_threads(threads)
        if rows > 2:
            assert torch.equal(packed(x[1:3]), got[1:3]), "other rows"


def test_a_product_reads_rows_of_any_layout() -> None:
    packed = operations.pack_weight(torch.randn(40, 24), None)
    assert packed is not None
    x = torch.randn(24, 6).t()
    torch.testing.assert_close(packed(x), packed(x.contiguous()), rtol=0, atol=0)
    assert packed(torch.randn(2, 3, 24)).shape == (2, 3, 40)


def test_a_row_is_the_same_among_others_and_with_any_number_of_threads() -> None:
    x, weight = torch.randn(2048, 64), torch.randn(64)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        together = fused.rms_norm(x, weight, 1e-6)
        assert torch.equal(fused.rms_norm(x[5:6], weight, 1e-6), together[5:6])
        try:
            torch.set_num_threads(3)
            assert torch.equal(fused.rms_norm(x, weight, 1e-6), together)
        finally:
            torch.set_num_threads(threads)


def test_numbers_that_are_not_finite_stay_so() -> None:
    with torch.inference_mode():
        gate = torch.tensor([[-torch.inf, torch.inf, torch.nan, -200.0, 200.0]])
        got = fused.swiglu(gate, torch.ones_like(gate))[0]
        assert got.isnan().tolist() == [True, False, True, False, False]  # silu(-inf) is -inf times 0
        assert got[1:].tolist()[0] == torch.inf
        assert abs(float(got[3])) < 1e-30
        assert float(got[4]) == 200
        broken = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
        assert fused.rms_norm(broken, torch.ones(2), 1e-6).isnan().any(-1).tolist() == [True, False]


def test_where_they_apply() -> None:
    x = torch.randn(4, 8)
    assert operations.can_use(x, torch.nn.Parameter(x))
    assert not operations.can_use(x, x.double())
    assert not operations.can_use(x.to("meta"))
    assert not operations.can_use(x, x.to("meta"))
    assert not operations.can_use(x.as_subclass(Ordinary))
    assert not operations.can_use(x.t())
    assert not operations.can_use(x.view(1, 1, 4, 8))
    assert not operations.can_use(x[0, 0]) and not operations.can_use(x[:, :0])
    assert not operations.can_use(torch._neg_view(x))
    weight = torch.ones(8)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(AssertionError, match="tensors without memory"):
        fused.rms_norm(x, weight, 1e-6)
    traced = torch.jit.trace(lambda x: fused.rms_norm(x, torch.ones(8), 1e-6), x, check_trace=False)
    torch.testing.assert_close(traced(2 * x), fused.rms_norm(2 * x, torch.ones(8), 1e-6))
    assert not torch.compile(operations.can_use, backend="eager", fullgraph=True)(x)
    # The operations without a compiler give the same layouts and dtypes.
    assert fused.rms_norm(x.t().unsqueeze(0).unsqueeze(0), torch.ones(4), 1e-6).shape == (1, 1, 8, 4)


def test_rows_are_stored_at_their_places() -> None:
    memory, x = torch.zeros(50, 8), torch.randn(5, 12, 8)[:, 2:5]
    places = torch.randperm(50)[:15]
    expected = memory.index_copy(0, places, x.reshape(15, 8))
    operations.store_rows(memory, places, x)
    assert torch.equal(memory, expected)
    for wrong in (-1, 50):
        places[7] = wrong
        with pytest.raises(IndexError, match="exceed the memory's 50"):
            operations.store_rows(memory, places, 2 * x)
        assert torch.equal(memory, expected), "nothing is stored"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "an 'unfinished name"])
def test_without_a_compiler_the_operations_of_pytorch_compute(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    with torch.inference_mode():
        compiled = fused.rms_norm(x, weight, 1e-6)
        library.kernels.cache_clear()
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with caplog.at_level(logging.INFO):
            plain = fused.rms_norm(x, weight, 1e-6)
    assert library.kernels() is None
    assert "without their compiled kernels" in caplog.text
    torch.testing.assert_close(plain, compiled, rtol=FORMULA_FP32, atol=FORMULA_FP32)


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "env cc")
    assert library.kernels() is not None


def test_they_are_built_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.kernels() is not None
    (built,) = (tmp_path / "archon" / "kernels").iterdir()
    first = built.stat()
    library.kernels.cache_clear()
    assert library.kernels() is not None
    assert [path.name for path in built.parent.iterdir()] == [built.name]
    assert (built.stat().st_mtime_ns, built.stat().st_ino) == (first.st_mtime_ns, first.st_ino)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1000, -1])
def test_a_damaged_library_is_built_anew(kept: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = library._library()
    whole = built.read_bytes()
    built.write_bytes(whole[:kept])
    assert library.kernels() is not None
    assert len(built.read_bytes()) == len(whole)
