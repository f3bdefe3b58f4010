"""A reward of your own, with parts that the run logs by name.

archon rl --config rl/recipes/arithmetic_cpu.yaml reward=examples.reward.close_sum run_dir=runs/close

A reward may also be `async`, return one number, or None for an answer that cannot be judged.
"""


def close_sum(prompt, completions, prompt_ids, completion_ids, *, answer, **data):
    """Return 1 for the right sum; otherwise up to half a point for a number near it."""
    try:
        distance = abs(int(completions) - int(answer))
    except ValueError:  # the completion is no number
        return {"right": 0.0, "near": 0.0}
    return {"right": float(distance == 0), "near": 0.5 / (1 + distance) if distance else 0.0}
