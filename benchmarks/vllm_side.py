"""vLLM as a side of a benchmark, on a CPU or a GPU: a separate environment and the offline `LLM`.

That environment imports this module too, so it may use only packages that vLLM installs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

RELEASE = "0.32.0"
INSTALLATION = ".ci/setup_vllm"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For vLLM on a machine without a GPU or a network."""

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Options of the offline `LLM` on a CPU.

By default vLLM starts an engine process that spins on one core while the worker computes: on two cores that leaves one
thread, and half the speed.
"""


def environment() -> Path:
    """Return the folder of vLLM's environment: `ARCHON_VLLM`, or where `.ci/setup_vllm` makes it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ARCHON_VLLM") or cache / "archon" / f"vllm-{RELEASE}")


def is_installed() -> bool:
    """Return whether `.ci/setup_vllm` has made the environment."""
    return (environment() / ".archon-setup").exists()


def python() -> Path | None:
    """Return the Python of vLLM's environment; None where `.ci/setup_vllm` has not made it."""
    return environment() / "bin" / "python" if is_installed() else None


def greedy_answers(
    path: str, prompts: Sequence[list[int]], lengths: Sequence[int], slots: int, dtype: str
) -> Callable[[], list[list[int]]]:
    """Load a checkpoint in `dtype` and return a function that answers prompts greedily with these lengths.

    Raises:
        ModuleNotFoundError: vLLM is missing; the message has the install command.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    os.environ |= ENVIRONMENT | ({} if on_gpu else IN_PROCESS)
    try:
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error} (to install it: {INSTALLATION})", name=error.name) from error
    engine = LLM(
        model=path,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=max(map(len, prompts)) + max(lengths),
        max_num_seqs=slots,
        enable_prefix_caching=False,
        # The other sides hold their weights on the same GPU.
        **({"gpu_memory_utilization": 0.4} if on_gpu else {}),
    )
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]

    def answer() -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def version() -> str:
    """Return the version of vLLM in this process's environment."""
    import vllm

    return vllm.__version__
