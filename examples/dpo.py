"""Direct preference optimization on pairs of answers.

    python examples/dpo.py runs/start runs/dpo --steps 50

The reference model is the checkpoint itself. With a LoRA (`"lora": {"rank": 8}`) it needs no second copy of the
weights.
"""

import argparse

from archon.rl import PreferenceTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("run_dir")
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

pairs = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(30) for b in range(30)
]
PreferenceTrainer(
    model={"path": options.checkpoint, "optimizer": {"lr": 1e-4}},
    train_dataset=pairs,
    run_dir=options.run_dir,
    loss="dpo",  # or ipo; `reward` trains a reward model
    beta=0.1,
    batch_size=32,
    total_steps=options.steps,
).train()
