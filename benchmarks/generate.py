"""Greedy generation, side by side with transformers (`generate` and continuous batching) and vLLM's CPU build.

A Qwen3 of 26 million parameters in float32. Even: 32 prompts, 128 new tokens each. Ragged: 128 prompts, answers of 16
to 256 tokens, at most 32 at once. Answer lengths are forced, so that all sides do the same work. All prompts have one
length, so that transformers needs no padding. `generate` receives the ragged prompts in batches of 32; a batch ends
with its longest answer. Of its static and dynamic cache, only the faster one is timed. vLLM has a separate environment
(`.ci/setup_vllm`) and runs as the offline `LLM`.

    python -m benchmarks.generate
    python -m benchmarks.generate --case ragged --quick

`benchmarks.gpu` measures generation on a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from archon.tools.bench.origin import spread
from benchmarks import harness, vllm_side
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, say
from benchmarks.profiles import step_profile
from benchmarks.record import Record

ARCHON = "archon"
STATIC, DYNAMIC = "transformers generate (static cache)", "transformers generate (dynamic cache)"
CONTINUOUS = "transformers continuous batching"
VLLM, VLLM_GPU = "vLLM (CPU build)", "vLLM"
CPU_SIDES = (ARCHON, STATIC, DYNAMIC, CONTINUOUS, VLLM)
VLLM_AIM = ">= 1"
AIMS = {
    "even": {"transformers": ">= 1.4", VLLM: VLLM_AIM},
    "ragged": {"transformers": ">= 2.2", VLLM: VLLM_AIM},
}
"""Aims of the CPU cases by the other side; `transformers` means the fastest of its sides."""
PROMPT_LENGTH = 32
TIE = 1e-5  # float32 logits of different kernels differ by about 1e-6 of the largest

Generate = Callable[[], list[list[int]]]


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Load the checkpoint into a side and generate once; the parent compares the tokens."""
    prompts = make_prompts(options)
    makers = {ARCHON: archon, STATIC: transformers, DYNAMIC: transformers, CONTINUOUS: continuous, VLLM: vllm}
    makers[VLLM_GPU] = vllm
    make = makers[side]
    generate = make(side, prompts, options)
    start = time.perf_counter()
    tokens = generate()
    seconds = time.perf_counter() - start
    got = [len(answer) for answer in tokens]
    if got != options["lengths"]:
        raise RuntimeError(f"answers of {got[:5]}… tokens came back, asked for {options['lengths'][:5]}…")

    def run(profile: bool = False) -> dict[str, Any]:
        if profile:
            return {"profile": step_profile(generate, options["device"])}
        generate()
        return {}

    version = vllm_side.version() if makers[side] is vllm else None
    return {"tokens": tokens, "seconds": seconds, "version": version}, run


def make_prompts(options: dict[str, Any]) -> list[list[int]]:
    """Random prompts of one length, the same for every side."""
    import torch

    generator = torch.Generator().manual_seed(2)
    vocab = shape(options["model"])["vocab_size"]
    return torch.randint(vocab, (len(options["lengths"]), options["prompt_length"]), generator=generator).tolist()


def archon(side: str, prompts: Sequence[list[int]], options: dict[str, Any]) -> Generate:
    """`InProcessEngine.generate` with as many slots as the other sides have rows."""
    import torch

    from archon import load_model
    from archon.generation import InProcessEngine
    from archon.rl import GenerationHyperparameters, ModelRequest

    model = load_model(options["checkpoint"], device=options["device"], dtype=getattr(torch, options["dtype"]))
    longest = options["prompt_length"] + max(options["lengths"])
    engine = InProcessEngine.from_model(model, max_slots=options["slots"], max_seq_len=longest)
    sampling = [
        GenerationHyperparameters(greedy=True, ignore_eos=True, max_new_tokens=length) for length in options["lengths"]
    ]

    def generate() -> list[list[int]]:
        requests = [ModelRequest(prompt, gconfig) for prompt, gconfig in zip(prompts, sampling, strict=True)]
        return [response.output_tokens for response in engine.generate(requests)]

    return generate


def transformers(side: str, prompts: Sequence[list[int]], options: dict[str, Any]) -> Generate:
    """`generate`, batch by batch; a row ends at its length, a batch with its last row."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    from benchmarks.peer_models import transformers_model

    model = transformers_model(options["checkpoint"], device=options["device"], dtype=options["dtype"]).eval()
    size, lengths, prompt_length = options["slots"], options["lengths"], options["prompt_length"]

    class EnoughTokens(StoppingCriteria):
        """Says of each row whether it has its forced length."""

        def __init__(self, wanted: Any) -> None:
            self.wanted = wanted

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] - prompt_length >= self.wanted

    def batch(first: int) -> list[list[int]]:
        wanted = lengths[first : first + size]
        ids = torch.tensor(prompts[first : first + size], device=options["device"])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max(wanted),
            pad_token_id=0,
            cache_implementation="static" if side == STATIC else "dynamic",
            stopping_criteria=StoppingCriteriaList([EnoughTokens(torch.tensor(wanted, device=options["device"]))]),
        )
        return [row[:length] for row, length in zip(out[:, prompt_length:].tolist(), wanted, strict=True)]

    return lambda: [answer for first in range(0, len(prompts), size) for answer in batch(first)]


def continuous(side: str, prompts: Sequence[list[int]], options: dict[str, Any]) -> Generate:
    """transformers' continuous batching; its manager is kept between runs, so that only generation is timed."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from benchmarks.peer_models import transformers_model

    model = transformers_model(options["checkpoint"], device=options["device"], dtype=options["dtype"]).eval()
    page = 32
    pages = -(-(options["prompt_length"] + max(options["lengths"]) + 1) // page)
    sizes = {
        "page_size": page,
        "num_blocks": (options["slots"] + 1) * pages,
        "max_requests_per_batch": options["slots"],
    }
    if options["device"] == "cuda":
        sizes = {"max_requests_per_batch": options["slots"]}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=max(options["lengths"]), eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            **sizes, max_batch_tokens=options["slots"] * options["prompt_length"]
        ),
    )
    manager.start()

    def generate() -> list[list[int]]:
        order = {
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1): index
            for index, (prompt, length) in enumerate(zip(prompts, options["lengths"], strict=True))
        }
        answers: list[list[int]] = [[] for _ in prompts]
        left = len(prompts)
        while left:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                answers[order[result.request_id]] = list(result.generated_tokens)
                left -= 1
        return answers

    return generate


def vllm(side: str, prompts: Sequence[list[int]], options: dict[str, Any]) -> Generate:
    """vLLM's offline `LLM` with the same number of concurrent requests as the other sides."""
    chosen = (options[name] for name in ("lengths", "slots", "dtype"))
    return vllm_side.greedy_answers(options["checkpoint"], prompts, *chosen)


def measure(
    case: str,
    options: dict[str, Any],
    rounds: int,
    names: Sequence[str],
    aims: dict[str, str],
    *,
    benchmark: str = "generate",
    profiled: bool = False,
) -> Record:
    """Measure one case: checks that every side generates the same tokens, then times them.

    Args:
        case: case of the record.
        options: options of all sides.
        rounds: timed runs of each side.
        names: the sides.
        aims: aims of archon's ratio to other sides, as in `AIMS`.
        benchmark: benchmark of the record.
        profiled: record a profile of archon.
    """
    total = sum(options["lengths"])
    what = f"{len(options['lengths'])} prompts, {total} new tokens, {options['dtype']}"
    say(f"{benchmark}.{case}: {options['model']}, {what}")
    record = harness.new_record(benchmark, case, options["threads"])
    record.setup = {"model": shape(options["model"])}
    record.setup |= {key: options[key] for key in ("prompt_length", "lengths", "slots", "dtype")}
    if python := vllm_side.python():
        options = options | {"pythons": dict.fromkeys((VLLM, VLLM_GPU), str(python))}
    with Sides("benchmarks.generate", names, options) as sides:
        ours = sides.facts(ARCHON)["tokens"]
        theirs = {name: sides.facts(name)["tokens"] for name in sides.workers if name != ARCHON}
        for name, tokens in theirs.items():
            record.notes += compare(name, ours, tokens, options)
            record.checks.append(harness.NumericCheck(what="greedy tokens", peer=name, difference=0.0, tolerance=0.0))
        record.notes += keep_faster_cache(sides)
        for name in {VLLM, VLLM_GPU} & sides.workers.keys():
            record.versions["vllm"] = sides.facts(name)["version"]
        runs = sides.alternate(rounds, warmup=0)
        if profiled:
            record.profiles[ARCHON] = sides.workers[ARCHON].run(profile=True)["profile"]
    rates = {side: [total / run["seconds"] for run in results] for side, results in runs.items()}
    for side, values in rates.items():
        record.sides[side] = spread(values, "tok/s", runs[side])
    peers = {side: values for side, values in rates.items() if side != ARCHON}
    of_transformers = [side for side in peers if side.startswith("transformers")]
    if of_transformers and "transformers" in aims:
        fastest = max(of_transformers, key=lambda side: record.sides[side].median)
        aims = aims | {fastest: aims["transformers"]}
    for side, values in peers.items():
        record.ratios[f"archon / {side}"] = harness.ratio(rates[ARCHON], values, aims.get(side))
    record.missing = sides.missing
    return record


def keep_faster_cache(sides: Sides) -> list[str]:
    """End the slower of transformers' two caches, by the pass that was checked; a note on it."""
    seconds = {side: sides.facts(side)["seconds"] for side in (STATIC, DYNAMIC) if side in sides.workers}
    if len(seconds) < 2:
        return []
    faster, slower = sorted(seconds, key=seconds.__getitem__)
    sides.close(slower)
    took = f"{seconds[slower]:.1f} s in its first pass, {faster} {seconds[faster]:.1f} s"
    return [f"{slower} was checked but not timed: {took}"]


def compare(peer: str, ours: list[list[int]], theirs: list[list[int]], options: dict[str, Any]) -> list[str]:
    """Demand equal answers, or a near tie of two tokens where an answer first differs; notes on the latter.

    Greedy decoding takes the larger of two logits, and in float32 rounding decides between two that differ by less than
    its error. In bfloat16 that is common, and only the share of equal tokens is reported.
    """
    firsts = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
        for x, y in zip(ours, theirs, strict=True)
    ]
    differing = [(row, first) for row, first in enumerate(firsts) if first is not None]
    say(f"  greedy tokens: archon and {peer} agree in {len(ours) - len(differing)} of {len(ours)} answers")
    if not differing:
        return []
    if options["dtype"] != "float32":
        equal = sum(len(answer) if first is None else first for answer, first in zip(ours, firsts, strict=True))
        share = equal / sum(map(len, ours))
        return [f"bfloat16: {share:.0%} of the tokens come before archon and {peer} first differ in an answer"]
    widest = max(tie_width(row, first, ours, theirs, options) for row, first in differing)
    if widest > TIE:
        raise harness.BenchmarkError(
            f"greedy tokens of archon and {peer} differ by more than a near tie; nothing is timed"
        )
    return [
        f"{len(differing)} of {len(ours)} answers of {peer} differ after a near tie (relative {widest:.0e} in float64)"
    ]


def tie_width(row: int, first: int, ours: list[list[int]], theirs: list[list[int]], options: dict[str, Any]) -> float:
    """|a - b| / max |logit| in float64 between the logits of two tokens that were chosen at the same place."""
    import torch

    from benchmarks.peer_models import transformers_model

    model = transformers_model(options["checkpoint"], dtype="float64").eval()
    with torch.no_grad():
        logits = model(torch.tensor([make_prompts(options)[row] + ours[row][:first]])).logits[0, -1]
    return ((logits[ours[row][first]] - logits[theirs[row][first]]).abs() / logits.abs().max()).item()


def case_lengths(case: str, quick: bool) -> list[int]:
    """Answer lengths in tokens; ragged ones spread evenly over their range, in a fixed random order."""
    import random

    if case == "even":
        return [16] * 4 if quick else [128] * 32
    count, low, high = (12, 4, 24) if quick else (128, 16, 256)
    lengths = [low + round(i * (high - low) / (count - 1)) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def main() -> None:
    """Parse, make the checkpoint, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=["even", "ragged"], help="one case only")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    keep = not (arguments.quick or arguments.no_record)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"threads": arguments.threads, "slots": 4 if arguments.quick else 32}
        model = "tiny" if arguments.quick else "26M"
        # vLLM's attention for CPUs has no heads below 32.
        made = make_checkpoint(Path(folder), model, fields={"head_dim": 32} if arguments.quick else None)
        options |= {"checkpoint": str(made), "model": model, "device": "cpu", "dtype": "float32"}
        options |= {"prompt_length": PROMPT_LENGTH}
        for case in [arguments.case] if arguments.case else ["even", "ragged"]:
            lengths = case_lengths(case, arguments.quick)
            record = measure(case, {**options, "lengths": lengths}, arguments.rounds, CPU_SIDES, AIMS[case])
            harness.finish(record, keep)
    return None


if __name__ == "__main__":
    main()
