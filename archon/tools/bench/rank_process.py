"""One rank of one point: `python -m archon.tools.bench.rank_process REQUEST.json`.

`archon.tools.bench.sweep` starts it. It writes its result or its error to the request's folder. After the time limit, a
rank writes its stack there and exits, even if it hangs in a kernel or a collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

from archon.schema.children import end_with_parent
from archon.tools.bench.bench_record import PointRequest

STACKS, ERROR, RESULT = "rank{}.stack", "rank{}.error.json", "result.json"


def main(path: Path) -> None:
    """Measure the point of the request in `path`."""
    end_with_parent()
    rank, folder = os.environ.get("RANK", "0"), path.parent
    request = PointRequest.model_validate_json(path.read_text())
    stacks = (folder / STACKS.format(rank)).open("w")
    faulthandler.dump_traceback_later(request.config.time_limit_s, exit=True, file=stacks)
    try:
        import torch.distributed as dist

        from archon.tools.bench.measure import measure

        result = measure(request)
        if rank == "0":
            (folder / RESULT).write_text(result.model_dump_json())
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 -- the sweep continues with a row that has the message
        kinds = [kind.__name__ for kind in type(error).__mro__]
        content = {"kinds": kinds, "message": str(error), "time": time.time()}
        (folder / ERROR.format(rank)).write_text(json.dumps(content))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: other ranks may wait in a collective, so a regular exit would hang
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
