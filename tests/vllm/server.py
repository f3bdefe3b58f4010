"""Starts real vLLM from its own environment, made by `.ci/setup_vllm`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks import vllm_side

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 600
EXTENSION = "archon.serve.vllm_extension.Extension"
ENVIRONMENT = vllm_side.ENVIRONMENT | {
    # Its engine waits for its worker by spinning for a second: then two threads of products wait for each other.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Next to other work."""


def _end_with_parent() -> None:
    """Ask Linux to interrupt this process when the tests are killed, so that no server outlives them."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGINT)


class VLLMServer:
    """`vllm serve` on a free port of loopback, with every route that archon uses."""

    def __init__(self, model: Path, log: Path, *options: str, extension: str = EXTENSION) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        command = [
            *(str(vllm_side.environment() / "bin" / "vllm"), "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *("--max-model-len", "512", "--max-num-seqs", "32", "--enforce-eager", "--enable-scale-out"),
            *("--worker-extension-cls", extension),
            *("--weight-transfer-config", json.dumps({"backend": "archon"}), *options),
        ]
        needed = ENVIRONMENT | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "PYTHONPATH": str(ROOT),
        }
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | needed,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait(self) -> VLLMServer:
        """Return once the server answers; raises with the end of its log where it never does."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # also workers that outlived it
        except ProcessLookupError:
            pass
        self.process.wait(30)
