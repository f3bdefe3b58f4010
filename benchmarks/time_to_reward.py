"""Time to reward: archon's GRPO against TRL's, from the same checkpoint, on the same task and batch.

Two-digit addition with exact-match rewards, 32 prompts × 8 samples per step. A Qwen3 of 0.9 million parameters is
fine-tuned once. For each seed, both sides train from it in separate processes, in alternating order. One evaluator
scores both sides with one sampled answer to each of 1,000 held-out prompts and the same random streams; its time does
not count. TRL runs with the best settings found for it (learning rate 5e-5, beta2 0.99). archon runs its recipe without
the KL term, which TRL also leaves out by default.

TRL trains for its time budget. archon is timed to TRL's best reward, and must reach it within six tenths of the budget.

    python -m benchmarks.time_to_reward
    python -m benchmarks.time_to_reward --quick
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from archon.tools.bench.origin import spread
from benchmarks import harness
from benchmarks.harness import Sides, say

ARCHON, TRL = "archon", "TRL"
RECIPE = harness.ROOT / "rl" / "recipes" / "arithmetic_cpu.yaml"
PROMPTS, SAMPLES = 32, 8
SPEED_AIM, SOONER_AIM = ">= 4", ">= 4"

Curve = list[dict[str, float]]


class Clock:
    """Seconds of training since `start`, without evaluations."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._left_out = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._left_out

    def leave_out(self, measure: Callable[[], float]) -> float:
        """Run `measure` with the clock stopped."""
        begin = time.perf_counter()
        result = measure()
        self._left_out += time.perf_counter() - begin
        return result


class Progress:
    """The curve of a run: evaluates every so many seconds of training, and says when the budget is used up."""

    def __init__(self, evaluate: Callable[[], float], budget: float, every: float) -> None:
        self.curve: Curve = []
        self.steps = self.trained = self.generated = 0
        self._evaluate, self._budget, self._every = evaluate, budget, every
        self.clock = Clock()
        self._measure()

    def step(self, trained: int, generated: int) -> bool:
        """Count one step of so many samples; True when the budget is used up."""
        self.steps, self.trained, self.generated = self.steps + 1, self.trained + trained, self.generated + generated
        done = self.clock.seconds >= self._budget
        if done or self.clock.seconds - self.curve[-1]["seconds"] >= self._every:
            self._measure()
        return done

    def _measure(self) -> None:
        seconds = self.clock.seconds
        reward = self.clock.leave_out(self._evaluate)
        self.curve.append({"seconds": seconds, "steps": self.steps, "reward": reward})

    def result(self) -> dict[str, Any]:
        seconds = self.curve[-1]["seconds"]
        counts = {"steps": self.steps, "trained_per_second": self.trained / seconds}
        return {
            "curve": self.curve,
            "training_seconds": seconds,
            **counts,
            "generated_per_second": self.generated / seconds,
        }


def rl_config(options: dict[str, Any]) -> Any:
    """Return the recipe's run from the made checkpoint, on this benchmark's batch."""
    from archon.cli.config import load_config
    from archon.rl.config import RLConfig

    overrides = {
        "run_dir": options["folder"],
        "seed": options["seed"],
        "total_steps": 1_000_000,
        "actor.path": options["checkpoint"],
        "algorithm.kl.coef": 0,
        "rollout.prompts_per_step": PROMPTS,
        "gconfig.n_samples": SAMPLES,
        "evaluation.greedy": "false",
        "evaluation.max_prompts": options["held_out"],
    }
    return load_config(RLConfig, RECIPE, [f"{key}={value}" for key, value in overrides.items()])


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Open a side at the checkpoint; the parent compares prompts and the reward before training."""
    import logging

    from archon.data import encode_prompt
    from archon.rl.trainer import RLTrainer

    logging.disable(logging.WARNING)
    trainer = RLTrainer(rl_config(options))
    # The worker's lifetime is the run's, so resources stay open until the process ends.
    opened = trainer.opened()
    opened.__enter__()
    run = {ARCHON: archon_run, TRL: trl_run}[side](trainer, options)
    prompts = [encode_prompt(trainer.tokenizer, row) for row in trainer.prompts.rows[:64]]
    if side == TRL:
        prompts = [trl_prompt_ids(trainer.tokenizer, row) for row in trl_rows(trainer)[:64]]
    facts = {"prompts": prompts, "reward": trainer.evaluate()["eval/reward"]}

    def measured() -> dict[str, Any]:
        try:
            return run()
        finally:
            opened.__exit__(None, None, None)

    return facts, measured


def archon_run(trainer: Any, options: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """`RLTrainer.train_step` until the budget is used up."""

    def run() -> dict[str, Any]:
        progress = Progress(lambda: trainer.evaluate()["eval/reward"], options["budget"][ARCHON], options["every"])
        done = False
        while not done:
            metrics = trainer.train_step()
            trainer.step += 1
            prompts = metrics["rollout/prompts"] + metrics.get("rollout/resampled", 0)
            done = progress.step(int(metrics.get("samples", 0)), int(prompts * SAMPLES))
        return progress.result()

    return run


def trl_rows(trainer: Any) -> list[dict[str, Any]]:
    """archon's training rows in TRL's conversational form."""
    return [{"prompt": row["messages"], "answer": row["answer"]} for row in trainer.prompts.rows]


def trl_prompt_ids(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Return the ids TRL makes of a prompt."""
    return tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)


def exact_match(completions: Sequence[list[dict[str, str]]], answer: Sequence[str], **_: Any) -> list[float]:
    """TRL's form of the reward that archon's recipe names."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [float(text == str(gold).strip()) for text, gold in zip(texts, answer, strict=True)]


def trl_run(evaluator: Any, options: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """GRPOTrainer with its defaults, except for what the task, a CPU and its best known settings need.

    Gradient checkpointing and mixed precision, on by default, would only slow it down here. `evaluator` is an archon
    trainer that never trains: it receives TRL's weights and evaluates them.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gconfig = evaluator.config.gconfig
    config = GRPOConfig(
        output_dir=options["folder"],
        seed=options["seed"],
        learning_rate=5e-5,
        adam_beta2=0.99,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=1_000_000,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=gconfig.max_new_tokens,
        temperature=gconfig.temperature,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        write_run_report="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(options["checkpoint"], dtype="float32")

    def evaluate() -> float:
        weights = evaluator.engine.adapter.from_hf({name: p.detach() for name, p in model.named_parameters()})
        evaluator.generator.update_weights(iter(weights.items()))
        return evaluator.evaluate()["eval/reward"]

    class Watch(TrainerCallback):
        """Counts steps, and stops when the budget is used up."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.progress = Progress(evaluate, options["budget"][TRL], options["every"])

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            samples = PROMPTS * SAMPLES
            control.should_training_stop = self.progress.step(samples, samples)

    watch = Watch()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list(trl_rows(evaluator)),
        processing_class=evaluator.tokenizer,
        callbacks=[watch],
    )

    def run() -> dict[str, Any]:
        trainer.train()
        return watch.progress.result()

    return run


def first_time(curve: Curve, reward: float) -> float | None:
    """Seconds of training at the first evaluation of at least `reward`, or None."""
    return next((point["seconds"] for point in curve if point["reward"] >= reward), None)


def measure(options: dict[str, Any], seeds: int, keep: bool) -> None:
    """Measure every seed, the sides in alternating order."""
    record = harness.new_record("time_to_reward", "arithmetic", options["threads"])
    record.setup = {key: options[key] for key in ("budget", "every", "held_out")}
    record.setup |= {"prompts": PROMPTS, "samples": SAMPLES, "recipe": RECIPE.name, "curves": {}}
    results: dict[str, list[dict[str, Any]]] = {ARCHON: [], TRL: []}
    for seed in range(seeds):
        facts: dict[str, dict[str, Any]] = {}
        for side in [ARCHON, TRL] if seed % 2 == 0 else [TRL, ARCHON]:
            with Sides("benchmarks.time_to_reward", [side], {**options, "seed": seed}) as sides:
                record.missing |= sides.missing
                if side not in sides.workers:
                    continue
                facts[side] = sides.facts(side)
                result = sides.workers[side].run()
            results[side].append(result)
            record.setup["curves"][f"{side}, seed {seed}"] = result["curve"]
            rewards = [point["reward"] for point in result["curve"]]
            say(f"  seed {seed}, {side}: {result['steps']} steps, held-out {rewards[0]:.3f} → {max(rewards):.3f}")
        if TRL in facts:
            # Both before training: the checkpoint, the evaluator and the prompts are the same.
            record.checks += harness.check_same("prompts", facts[ARCHON]["prompts"], {TRL: facts[TRL]["prompts"]})
            theirs = {TRL: facts[TRL]["reward"]}
            record.checks += harness.check_same("reward before training", facts[ARCHON]["reward"], theirs)
    summarize(record, results)
    harness.finish(record, keep)


def summarize(record: Any, results: dict[str, list[dict[str, Any]]]) -> None:
    """Return rates, rewards and, if both sides ran, how much sooner archon reached TRL's best reward."""
    for side, runs in results.items():
        if not runs:
            continue
        for key in ("trained_per_second", "generated_per_second"):
            what = f"{side}, samples {key.partition('_')[0]}"
            record.sides[what] = spread([run[key] for run in runs], "samples/s", runs)
        rewards = [max(point["reward"] for point in run["curve"]) for run in runs]
        record.sides[f"{side}, best held-out reward"] = spread(rewards, "reward")
        last = [run["curve"][-1]["reward"] for run in runs]
        record.sides[f"{side}, last held-out reward"] = spread(last, "reward")
    if len(results[TRL]) != len(results[ARCHON]):
        return
    # Of a batch that both sample, score and learn from; that a sample whose group has no spread has no gradient is
    # known to archon before its backward pass, and "trained" above leaves it out.
    our_rates, their_rates = ([run["generated_per_second"] for run in results[side]] for side in (ARCHON, TRL))
    record.ratios["archon / TRL, samples per second"] = harness.ratio(our_rates, their_rates, SPEED_AIM)
    targets = [max(point["reward"] for point in run["curve"]) for run in results[TRL]]
    ours, theirs = [], []
    for seed, target in enumerate(targets):
        theirs.append(first_time(results[TRL][seed]["curve"], target) or 0.0)
        seconds = first_time(results[ARCHON][seed]["curve"], target)
        if seconds is None:
            seconds = results[ARCHON][seed]["training_seconds"]
            record.notes.append(
                f"seed {seed}: archon did not reach TRL's {target:.3f} within its budget, which is counted as its time"
            )
        ours.append(seconds)
    record.sides["archon, time to TRL's best reward"] = spread(ours, "s")
    record.sides["TRL, time to its best reward"] = spread(theirs, "s")
    # A target that both start at says nothing; less than a second of training counts as one.
    ours, theirs = ([max(seconds, 1.0) for seconds in side] for side in (ours, theirs))
    record.ratios["TRL / archon, time to TRL's best reward"] = harness.ratio(theirs, ours, SOONER_AIM)


def make(options: dict[str, Any]) -> None:
    """Make the recipe's checkpoint, warmed up by SFT."""
    import torch

    from archon.cli.config import read_bootstrap
    from archon.rl.bootstrap import ensure_checkpoint

    torch.set_num_threads(options["threads"])
    bootstrap = read_bootstrap(rl_config({**options, "seed": 0}).bootstrap)
    assert bootstrap is not None
    # Its progress lines are of no interest here.
    with contextlib.redirect_stdout(io.StringIO()):
        if ensure_checkpoint(bootstrap, options["checkpoint"]):
            raise KeyboardInterrupt


def main() -> None:
    """Parse, make the checkpoint, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--budget", type=float, default=360.0, help="seconds of training for TRL (default 360)")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    seeds, budget, every, held_out = arguments.seeds, arguments.budget, 10.0, 1000
    if arguments.quick:
        seeds, budget, every, held_out = 1, 40.0, 10.0, 200
    with tempfile.TemporaryDirectory() as folder:
        options = {"threads": arguments.threads, "every": every, "held_out": held_out}
        options |= {"checkpoint": f"{folder}/checkpoint", "folder": f"{folder}/run"}
        options |= {"budget": {ARCHON: 0.6 * budget, TRL: budget}}
        say("time_to_reward: making the checkpoint")
        make(options)
        measure(options, seeds, not (arguments.quick or arguments.no_record))
    return None


if __name__ == "__main__":
    main()
