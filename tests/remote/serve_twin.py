"""A twin of vLLM as a process of its own, for benchmarks: `python -m tests.remote.serve_twin CHECKPOINT SLOTS LENGTH`.

It prints its URL and serves until its standard input ends, as it does when the process that started it is gone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.remote.twin import VLLMTwin


def main() -> None:
    torch.set_num_threads(1)
    server = VLLMTwin(
        Path(sys.argv[1]), max_slots=int(sys.argv[2]), max_model_len=int(sys.argv[3]), keeps_requests=False
    )
    print(server.url, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
