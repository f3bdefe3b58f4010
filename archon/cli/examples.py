"""Examples at the end of each command's help."""

from __future__ import annotations

EXAMPLES = {
    "init": (
        "archon init",
        "archon init --task rl --model Qwen/Qwen3-0.6B --data gsm8k --gpus 1 --method lora",
        "archon init --recipe arithmetic_cpu",
    ),
    "models": ("archon models", "archon models Qwen3.8"),
    "inspect": ("archon inspect Qwen/Qwen3-0.6B", "archon inspect runs/chat/export --blocks"),
    "check-model": ("archon check-model qwen3", "archon check-model my_family.py --reference llama"),
    "new-model": ("archon new-model path/to/checkpoint",),
    "plan": (
        "archon plan Qwen/Qwen3-8B --gpus 16 --gpu h100-80gb --seq 8192",
        "archon plan Qwen/Qwen3-8B --gpus 1 --lora rank=16 --output run.yaml",
    ),
    "convert": ("archon convert path/to/Qwen3-0.6B ranks --to megatron --tp 2", "archon convert ranks back --to hf"),
    "export": ("archon export runs/chat/checkpoints adapter", "archon export adapter merged --merge"),
    "bootstrap": ("archon bootstrap --config rl/recipes/arithmetic_bootstrap.yaml path=start",),
    "sft": (
        "archon sft run_dir=runs/chat model.path=Qwen/Qwen3-0.6B train_data.path=chats.jsonl --dry-run",
        "archon sft --config run.yaml model.lora.rank=16 resume=true",
    ),
    "preference": (
        "archon preference run_dir=runs/dpo model.path=runs/chat/export train_data.path=pairs.jsonl",
        "archon preference loss=reward run_dir=runs/rm model.path=runs/chat/export train_data.path=pairs.jsonl",
    ),
    "rl": (
        "archon rl run_dir=runs/rl actor.path=Qwen/Qwen3-0.6B train_data.path=prompts.jsonl reward=rewards.score",
        "archon rl --config run.yaml --preset gspo",
        "archon rl --preset list",
    ),
    "generate": ("archon generate Qwen/Qwen3-0.6B --prompt 'What is 12+34?' temperature=0.7",),
    "eval": (
        "archon eval runs/rl/export --data gsm8k --reward gsm8k --n 8",
        "archon eval --url http://127.0.0.1:8000/v1 --model x --data questions.jsonl --reward rewards.score",
    ),
    "serve": ("archon serve runs/chat/export", "archon serve base --lora math=runs/math/export --token secret"),
    "serve-training": ("archon serve-training Qwen/Qwen3-0.6B",),
    "bench": ("archon bench path/to/Qwen3-0.6B d2 t2 p2 --tokens 8192 --seq 1024", "archon bench --config run.yaml"),
    "launch": (
        "archon launch --nproc-per-node 4 sft --config run.yaml model.layout=d2t2",
        "archon launch --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host0:29400 --rdzv-id run1 rl --config run.yaml",
    ),
    "report": ("archon report runs/rl", "archon report runs/rl runs/rl-no-kl"),
    "doctor": ("archon doctor", "archon doctor path/to/Qwen3-32B --layout d512t8 --rank 17"),
}


def epilog(command: str) -> str:
    """Return the examples of a command as the end of its help."""
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in EXAMPLES[command])])
