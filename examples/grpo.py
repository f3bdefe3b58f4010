"""GRPO in one file: sample answers, score them, compare each with its group, update.

    python examples/grpo.py runs/start runs/grpo --steps 300

GRPO is of Shao et al. 2024 (arXiv:2402.03300). Each batch is sampled by the weights that it trains, so the ratio of
policies is 1, and clipping has no effect. `archon rl` adds what a long run needs: asynchronous rollouts, corrections
for old answers, checkpoints, servers, evaluations.
"""

import argparse
import random

import torch
from transformers import AutoTokenizer

from archon import ArchonEngine, EngineConfig
from archon.rl import GenerationHyperparameters, InProcessEngine, ModelRequest, concat_padded_tensors

PROMPTS, SAMPLES = 32, 8


def policy_gradient(logprobs, entropy, batch):
    """Return -Σ advantage × ratio over the tokens of the answers. Index t holds the prediction of token t + 1."""
    ratio = (logprobs - batch["logprobs"]).exp()
    return -(batch["advantages"] * ratio * batch["loss_mask"]).sum()


def answer_tokens(batch):
    """Return the denominator of the loss: the number of answer tokens in the whole batch."""
    return batch["loss_mask"].sum()


def as_row(response, advantage):
    """Return one answer as a batch of one row. All fields are about the token at the same index."""
    n_prompt, n_answer = response.input_len, response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
        "attention_mask": torch.ones(1, n_prompt + n_answer, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * n_prompt + [1] * n_answer]),
        "logprobs": torch.tensor([[0.0] * n_prompt + response.output_logprobs]),
        "advantages": torch.tensor([[0.0] * n_prompt + [advantage] * n_answer]),
    }


def evaluate(generator, tokenizer):
    """Return the share of right greedy answers to 200 fixed sums."""
    fixed = random.Random(1)
    sums = [(fixed.randrange(100), fixed.randrange(100)) for _ in range(200)]
    greedy = GenerationHyperparameters(max_new_tokens=5, greedy=True)
    requests = [ModelRequest(tokenizer(f"{a}+{b}=").input_ids, greedy) for a, b in sums]
    answers = [tokenizer.decode(r.output_tokens, skip_special_tokens=True) for r in generator.generate(requests)]
    return sum(answer == str(a + b) for answer, (a, b) in zip(answers, sums, strict=True)) / len(sums)


def main():
    """Train, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    random.seed(0)

    # 1. The trained model, and a generator that reads the same weights.
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    optimizer = {"lr": 1e-4, "weight_decay": 0.0}
    engine = ArchonEngine(EngineConfig.parse({"path": options.checkpoint, "optimizer": optimizer}))
    engine.initialize()
    generator = InProcessEngine.from_model(engine.model, tokenizer)
    sampling = GenerationHyperparameters(max_new_tokens=5)
    print(f"before: {evaluate(generator, tokenizer):.1%} of the greedy answers are right", flush=True)

    for step in range(1, options.steps + 1):
        # 2. Sample a group of answers to each prompt.
        sums = [(random.randrange(100), random.randrange(100)) for _ in range(PROMPTS)]
        prompts = [tokenizer(f"{a}+{b}=").input_ids for a, b in sums for _ in range(SAMPLES)]
        responses = generator.generate([ModelRequest(prompt, sampling) for prompt in prompts])

        # 3. Score: 1 for the right sum. The advantage compares an answer with its group.
        texts = [tokenizer.decode(response.output_tokens, skip_special_tokens=True) for response in responses]
        right = [float(text == str(sum(sums[index // SAMPLES]))) for index, text in enumerate(texts)]
        rewards = torch.tensor(right).view(PROMPTS, SAMPLES)
        spread = rewards.std(dim=1, keepdim=True)
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-6)).flatten().tolist()

        # 4. One optimizer step. Groups of equal rewards have no gradient.
        rows = [as_row(r, x) for r, x in zip(responses, advantages, strict=True) if x != 0]
        if rows:
            engine.train_batch(concat_padded_tensors(rows), policy_gradient, answer_tokens)
            generator.update_weights(engine.model)
        if step % 10 == 0:
            print(f"step {step:4} reward {rewards.mean():.3f}, {len(rows)} answers trained", flush=True)

    # 5. A Hugging Face checkpoint.
    print(f"after: {evaluate(generator, tokenizer):.1%} of the greedy answers are right")
    engine.save(options.output)


if __name__ == "__main__":
    main()
