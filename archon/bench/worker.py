"""One rank of one point: `python -m archon.bench.worker REQUEST.json`, started by `archon.bench.sweep`.

What it finds, or why it failed, is left in the request's folder. A rank that takes too long writes its stack there and
ends, also where it hangs in a kernel or a collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

from archon.bench.config import Point
from archon.bench.origin import Check
from archon.bench.record import Losses, Measurement
from archon.schema.config import EngineConfig, StrictModel

STACKS, ERROR, RESULT = "rank{}.stack", "rank{}.error.json", "result.json"


class Request(StrictModel):
    """What the ranks of a point are told."""

    engine: EngineConfig
    point: Point
    steps: int
    warmup: int
    peak_tflops: float | None
    reference: tuple[str, Losses] | None
    time_limit_s: float


class Result(StrictModel):
    """What they answer."""

    measurement: Measurement
    checks: list[Check]


def main(request: Path) -> None:
    rank, folder = os.environ.get("RANK", "0"), request.parent
    order = Request.model_validate_json(request.read_text())
    stacks = (folder / STACKS.format(rank)).open("w")
    faulthandler.dump_traceback_later(order.time_limit_s, exit=True, file=stacks)
    try:
        import torch.distributed as dist

        from archon.bench.measure import measure

        measurement, checks = measure(
            order.engine, order.point, order.steps, order.warmup, order.peak_tflops, order.reference
        )
        if rank == "0":
            (folder / RESULT).write_text(Result(measurement=measurement, checks=checks).model_dump_json())
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        # Whatever it is, the sweep goes on with a row that says so.
        kinds = [kind.__name__ for kind in type(error).__mro__]
        told = {"kinds": kinds, "message": str(error), "time": time.time()}
        (folder / ERROR.format(rank)).write_text(json.dumps(told))
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, and without a word to the other ranks, who may be waiting in a collective
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
