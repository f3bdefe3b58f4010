"""A training service for clients of the Tinker SDK: `archon serve-training CHECKPOINT`.

An engine holds one frozen base model, and each client's models are LoRAs over it. A request passes these modules:

- `routes`: HTTP, with the paths and messages of the installed SDK (`wire`).
- `service`: sessions, models, samplers, checkpoints and futures of each client, recorded in `store` (SQLite).
- `queues`: the requests of a model in the order of their sequence ids; waiting losses of several models become one
  batch. The id of a future is made of the model and the sequence id, so a retry finds the first request.
- `trainer`: the work of the engine thread, over `archon.engine.lora_pool`. `losses` defines the loss functions.
- `ranks`: the same work on several ranks. Rank 0 runs all other modules.
- `sampler`: the generator, in a thread of its own; it reads LoRAs from their checkpoints.

Clients poll for the result of a future. A restarted server knows sessions, checkpoints and finished futures; models
that were in memory are gone, and their unfinished futures fail. A client continues from its last saved state.
"""

from archon.schema.errors import ConfigError
from archon.schema.lazy import lazy_exports

try:
    import tinker  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"the training service needs the package {error.name}, which is not installed; install archon's extras: "
        "pip install 'archon-engine[rl,tinker]'"
    ) from None

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"routes": ("TrainingServer",)})
