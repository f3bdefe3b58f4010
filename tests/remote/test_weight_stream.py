"""Broadcasts of weights: every bit of every tensor, to every worker, and an end of every wait."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from archon.remote import weight_stream
from archon.remote.weight_stream import Bucket, Sender, WeightStreamError, pack, receive_tensors, unpack

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


def described(*entries: object, size: int = 16) -> Bucket:
    return Bucket(json.dumps(entries).encode(), torch.zeros(size, dtype=torch.uint8))


MALFORMED = {
    "no JSON": (Bucket(b"{", torch.zeros(0, dtype=torch.uint8)), "expected a JSON list of tensors"),
    "nesting": (Bucket(b"[" * 10**5, torch.zeros(0, dtype=torch.uint8)), "expected a JSON list of tensors"),
    "an object": (Bucket(b"{}", torch.zeros(0, dtype=torch.uint8)), "expected a JSON list of tensors"),
    "no shape": (described(["a", "float32"]), "expected [name, dtype, shape]"),
    "a name of a number": (described([1, "float32", [4]]), "expected [name, dtype, shape]"),
    "a function for a dtype": (described(["a", "load", [4]]), "expected [name, dtype, shape]"),
    "a negative size": (described(["a", "float32", [-4]]), "expected [name, dtype, shape]"),
    "a size of text": (described(["a", "float32", ["4"]]), "expected [name, dtype, shape]"),
    "many dimensions": (described(["a", "float32", [1] * 99]), "expected [name, dtype, shape]"),
    "more than its bytes": (described(["a", "float32", [5]]), "ends at byte 20 of a bucket of 16 bytes"),
    "huge": (described(["a", "float32", [2**39, 2**39]]), "of a bucket of 16 bytes"),
    "less than its bytes": (described(["a", "float32", [4]], size=64), "of 64 bytes is described as one of 16"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_bucket_is_refused(name: str) -> None:
    bucket, expected = MALFORMED[name]
    with pytest.raises(WeightStreamError, match=re.escape(expected)) as error:
        list(unpack(bucket))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


TWICE = described(["a", "float32", [4]], ["a", "float32", [4]], size=32)


@pytest.mark.parametrize("sent", [[10, 2**62], [2**40, 16], [10, -1], [-1, 16], TWICE], ids=lambda x: str(x)[:20])
def test_a_worker_leaves_a_malformed_stream_at_once(sent: Bucket | list[int]) -> None:
    """The first four announce sizes of which nothing comes."""
    sender, start = Sender("127.0.0.1", 1, "gloo", 20.0), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(lambda: list(receive_tensors(sender.address, sender.port, 1, 1, "gloo", 20.0, CPU)))
        assert sender.connect(worker.done)
        assert sender._group is not None
        if isinstance(sent, Bucket):
            with suppress(RuntimeError):  # the worker is gone before the end of the stream
                sender.send([sent])
        else:
            sender._group.broadcast(torch.tensor(sent))
        with pytest.raises(WeightStreamError, match=r"is announced; expected at most|is sent twice"):
            worker.result(15)
    sender.close()
    assert time.monotonic() - start < 10, "the sender does not wait for its time-out"


def test_weights_go_to_an_ipv6_address() -> None:
    sender = Sender("::1", 1, "gloo", 20.0)
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(lambda: list(receive_tensors(sender.address, sender.port, 1, 1, "gloo", 20.0, CPU)))
        assert sender.connect(worker.done)
        sender.send(pack([("a", torch.ones(3))], CPU))
        assert [name for name, _ in worker.result(20)] == ["a"]
    sender.close()
