"""Fine-tune a LoRA on a list of rows, and load it with PEFT.

python examples/sft_lora.py runs/start runs/sft_lora --steps 50

A path, a hub id or one split of a Hugging Face dataset works in place of the list.
"""

import argparse

from archon.rl import SFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("run_dir")
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

# A row is a prompt and a response, or a conversation in `messages`.
rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(100) for b in range(a % 7, 100, 7)]
trainer = SFTTrainer(
    model={"path": options.checkpoint, "lora": {"rank": 8, "alpha": 16}, "optimizer": {"lr": 5e-3}},
    train_dataset=rows,
    run_dir=options.run_dir,
    batch_size=64,
    total_steps=options.steps,
)
trainer.train()

# The export is a PEFT folder.
from peft import AutoPeftModelForCausalLM  # noqa: E402

model = AutoPeftModelForCausalLM.from_pretrained(f"{options.run_dir}/export")
print(f"PEFT loads a LoRA of rank {model.peft_config['default'].r} for {len(list(model.modules()))} modules")
