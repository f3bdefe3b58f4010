"""Generation in this process: continuous batching over a paged cache, with the modules that train."""

from archon.rl.generation.engine import InProcessEngine
from archon.rl.generation.replica import fingerprint

__all__ = ["InProcessEngine", "fingerprint"]
