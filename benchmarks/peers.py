"""The same model, weights and batch in every peer, on one process and on two ranks.

    python -m benchmarks.peers            # trains each alongside archon: the even cases of benchmarks.train_step
    python -m benchmarks.peers --quick    # small, to see which are installed and compute what archon does

The losses are compared before anything is timed, and a peer that is not installed is reported.
"""

from __future__ import annotations

from benchmarks import train_step

if __name__ == "__main__":
    train_step.main(__doc__, ("even", "even-two-ranks"))
