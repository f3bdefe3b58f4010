"""Train the same model, weights and batch with every peer, on one process and on two ranks.

    python -m benchmarks.peers            # the even cases of benchmarks.train_step
    python -m benchmarks.peers --quick    # small sizes: which peers are installed and agree with archon?

Losses are compared before timing. A missing peer is reported.
"""

from __future__ import annotations

from benchmarks import train_step

if __name__ == "__main__":
    train_step.main(__doc__, ("even", "even-two-ranks"))
