"""Broadcasts of weights: every bit of every tensor, to every worker, and an end of every wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from archon.remote import weight_stream
from archon.remote.weight_stream import Sender, pack, receive_tensors, unpack

CPU = torch.device("cpu")


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of several dtypes and odd sizes, one larger than a bucket."""
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 256)
    shapes = {"odd": (3, 5), "scalar": (), "large": (7, 41), "empty": (0, 4), "last": (1,)}
    made = {f"{name}.{dtype}": torch.randn(shape).to(dtype) for dtype in DTYPES for name, shape in shapes.items()}
    made["transposed"] = torch.randn(6, 3).T
    return made


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)


def test_buckets_hold_every_bit_in_order_and_share_nothing(tensors: dict[str, Tensor]) -> None:
    buckets = list(pack(tensors.items(), CPU))
    assert len(buckets) > 8
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.view(-1).zero_() if tensor.is_contiguous() else None
    found = [pair for bucket in buckets for pair in unpack(bucket)]
    assert [name for name, _ in found] == list(wanted)
    for name, tensor in found:
        assert tensor.dtype == wanted[name].dtype and tensor.shape == wanted[name].shape
        assert tensor.float().equal(wanted[name].float()), name


def test_every_worker_gets_all_of_a_stream(tensors: dict[str, Tensor]) -> None:
    sender = Sender("127.0.0.1", 2, "gloo", 30.0)

    def receive(rank: int) -> dict[str, Tensor]:
        return dict(receive_tensors(sender.address, sender.port, rank, 2, "gloo", 30.0, CPU))

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(receive, rank) for rank in (1, 2)]
        assert sender.connect(lambda: any(worker.done() for worker in workers))
        sender.send(pack(tensors.items(), CPU))
        for worker in workers:
            got = worker.result(30)
            assert all(got[name].float().equal(tensor.float()) for name, tensor in tensors.items())
    sender.close()


def test_waits_end_where_the_other_side_is_gone(tensors: dict[str, Tensor]) -> None:
    absent = Sender("127.0.0.1", 1, "gloo", 0.2)
    assert not absent.connect(lambda: True), "the server refused the update"
    with pytest.raises(TimeoutError, match="1 workers did not join within"):
        absent.connect(lambda: False)
    sender = Sender("127.0.0.1", 1, "gloo", 30.0)

    def broken() -> Iterator[weight_stream.Bucket]:
        yield next(pack(tensors.items(), CPU))
        raise ValueError("the trainer failed")

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(lambda: list(receive_tensors(sender.address, sender.port, 1, 1, "gloo", 30.0, CPU)))
        assert sender.connect(worker.done)
        with pytest.raises(ValueError, match="the trainer failed"):
            sender.send(broken())
        sender.close()
        with pytest.raises(RuntimeError):
            worker.result(30)
