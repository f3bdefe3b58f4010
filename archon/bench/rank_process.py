"""One rank of one point: `python -m archon.bench.rank_process REQUEST.json`, started by `archon.bench.sweep`.

It writes its result, or its error, to the request's folder. A rank that exceeds the time limit writes its stack there
and exits, even if it hangs in a kernel or a collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

from archon.bench.bench_record import Losses, Measurement
from archon.bench.config import Point
from archon.bench.origin import NumericCheck
from archon.schema.config import EngineConfig, StrictModel

STACKS, ERROR, RESULT = "rank{}.stack", "rank{}.error.json", "result.json"


class PointRequest(StrictModel):
    """The input of a point's ranks."""

    engine: EngineConfig
    point: Point
    steps: int
    warmup: int
    peak_tflops: float | None
    reference: tuple[str, Losses] | None
    time_limit_s: float


class PointResult(StrictModel):
    """The output of a point's ranks."""

    measurement: Measurement
    checks: list[NumericCheck]


def main(request: Path) -> None:
    rank, folder = os.environ.get("RANK", "0"), request.parent
    order = PointRequest.model_validate_json(request.read_text())
    stacks = (folder / STACKS.format(rank)).open("w")
    faulthandler.dump_traceback_later(order.time_limit_s, exit=True, file=stacks)
    try:
        import torch.distributed as dist

        from archon.bench.measure import measure

        measurement, checks = measure(
            order.engine, order.point, order.steps, order.warmup, order.peak_tflops, order.reference
        )
        if rank == "0":
            (folder / RESULT).write_text(PointResult(measurement=measurement, checks=checks).model_dump_json())
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        # The sweep continues after any error, with a row that has its message.
        kinds = [kind.__name__ for kind in type(error).__mro__]
        content = {"kinds": kinds, "message": str(error), "time": time.time()}
        (folder / ERROR.format(rank)).write_text(json.dumps(content))
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # immediately, since the other ranks may be waiting in a collective and cannot take part in an exit
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
