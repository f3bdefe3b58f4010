"""Numbers of the training service, through the real SDK, next to the engine, to plain definitions and to PEFT."""

from __future__ import annotations

import math
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from archon.engine import ArchonEngine, CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig, LoRAConfig, OptimizerConfig
from tests.serve.training.data import datum, policy_inputs, rows, tensor

pytestmark = pytest.mark.xdist_group("training_service")
pytest.importorskip("tinker")

RANK, SEED, LR = 4, 7, 3e-3
# AdamW divides by the root of the second moment: with the SDK's eps of 1e-12 a gradient of 1e-10, which is rounding
# noise, moves a weight by lr.
ADAM = {"learning_rate": LR, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.1, "grad_clip_norm": 1.0}
CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}


def adam(**changes: float) -> Any:
    from tinker import types

    return types.AdamParams(**{**ADAM, **changes})


def saved_weights(client: Any, name: str = "out") -> dict[str, Tensor]:
    """The LoRA of a training client, downloaded in PEFT's format."""
    path = client.save_weights_external(name).result(30).path
    return downloaded(client, path)[0]


def downloaded(client: Any, path: str, folder: Path | None = None) -> tuple[dict[str, Tensor], Path]:
    import tempfile

    from tinker.lib.public_interfaces.rest_client import RestClient

    folder = Path(tempfile.mkdtemp()) if folder is None else folder
    rest = RestClient(client.holder) if not hasattr(client, "rest") else client.rest
    for name, address in rest.get_external_weights_urls(path).result(30).urls.items():
        with urllib.request.urlopen(address) as file:
            (folder / name).write_bytes(file.read())
    return load_file(folder / "adapter_model.safetensors"), folder


def padded(documents: Sequence[list[int]]) -> dict[str, Tensor]:
    """The documents as a batch of the engine."""
    width = max(map(len, documents))
    return {
        "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids in documents]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in documents]),
        "loss_mask": torch.tensor([[0] + [1] * (len(ids) - 1) + [0] * (width - len(ids)) for ids in documents]),
    }


def make_engine(base: Path) -> ArchonEngine:
    """An engine with the same LoRA and optimizer."""
    optimizer = OptimizerConfig(lr=LR, beta2=0.95, eps=1e-5, weight_decay=0.1, max_grad_norm=1.0)
    lora = LoRAConfig(rank=RANK, alpha=32, seed=SEED)
    engine = ArchonEngine(EngineConfig(path=str(base), device="cpu", lora=lora, optimizer=optimizer))
    engine.initialize()
    return engine


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def test_losses_and_logprobs_are_the_engines(base: Path, train: Callable[..., Any]) -> None:
    documents = rows()
    output = train(seed=SEED).forward([datum(ids) for ids in documents], "cross_entropy").result(30)
    expected = make_engine(base).forward_batch(padded(documents))
    for ids, result, row in zip(documents, output.loss_fn_outputs, expected, strict=True):
        # Both compute in float32, in batches of other shapes.
        torch.testing.assert_close(tensor(result, "logprobs"), row[1 : len(ids)], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(tensor(result, "elementwise_loss"), -row[1 : len(ids)], atol=1e-6, rtol=1e-6)
    total = -sum(float(row[1 : len(ids)].sum()) for ids, row in zip(documents, expected, strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_a_lora_after_ten_steps_is_the_one_that_sft_trains(
    base: Path, train: Callable[..., Any], tmp_path: Path
) -> None:
    engine, client = make_engine(base), train(seed=SEED)
    for step in range(10):
        documents = rows(step)
        engine.train_batch(padded(documents), CrossEntropyLoss(), loss_token_count)
        weight = 1 / sum(len(ids) - 1 for ids in documents)  # the mean of the engine, as the sum of the service
        data = [datum(ids, weights=[weight] * (len(ids) - 1)) for ids in documents]
        future = client.forward_backward(data, "cross_entropy")
        client.optim_step(adam()).result(30)
        future.result(30)
    engine.save(tmp_path / "sft", format="peft")
    expected = load_file(tmp_path / "sft" / "adapter_model.safetensors")
    actual = saved_weights(client)
    assert largest_difference(actual, expected) < 1e-6
    engine = make_engine(base)
    engine.save(tmp_path / "start", format="peft")
    start = load_file(tmp_path / "start" / "adapter_model.safetensors")
    assert largest_difference(actual, start) > 5 * LR  # it has moved


def test_gradients_accumulate_over_calls(train: Callable[..., Any]) -> None:
    data = [datum(ids) for ids in rows()]
    together, apart = train(seed=1), train(seed=1)
    together.forward_backward(data, "cross_entropy")
    norm = together.optim_step(adam()).result(30).metrics["grad_norm"]
    for one in data:
        apart.forward_backward([one], "cross_entropy")
    apart.forward(data, "cross_entropy")
    assert apart.optim_step(adam()).result(30).metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    # Rounding of the sums, and the next steps of AdamW.
    assert largest_difference(saved_weights(together), saved_weights(apart)) < 1e-6


def test_sampled_logprobs_are_those_of_forward(train: Callable[..., Any]) -> None:
    from tinker import types

    client = train(seed=3)
    for _ in range(3):
        client.forward_backward([datum(ids) for ids in rows()], "cross_entropy")
        client.optim_step(adam(learning_rate=1e-2)).result(30)
    prompt = rows()[0][:5]
    sampler = client.save_weights_and_get_sampling_client()
    answers = sampler.sample(
        types.ModelInput.from_ints(prompt),
        3,
        types.SamplingParams(max_tokens=24, seed=5, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result(30)
    assert len({tuple(answer.tokens) for answer in answers.sequences}) == 3
    for answer in answers.sequences:
        assert answer.stop_reason == "length" and len(answer.tokens) == 24
        ids = prompt + answer.tokens
        scores = tensor(client.forward([datum(ids)], "cross_entropy").result(30).loss_fn_outputs[0], "logprobs")
        # The generator decodes token by token from its cache: other sums of float32.
        torch.testing.assert_close(torch.tensor(answer.logprobs), scores[4:], atol=1e-5, rtol=1e-5)
        prompt_scores = torch.tensor(answers.prompt_logprobs[1:])
        torch.testing.assert_close(prompt_scores, scores[:4], atol=1e-5, rtol=1e-5)
        for token, logprob, best in zip(answer.tokens, answer.logprobs, answer.topk_logprobs, strict=True):
            assert (len(best) == 2 and best[0][1] >= best[1][1] >= logprob) or token in dict(best)
    assert answers.prompt_logprobs[0] is None and answers.topk_prompt_logprobs[0] is None
    for logprob, best in zip(answers.prompt_logprobs[1:], answers.topk_prompt_logprobs[1:], strict=True):
        assert len(best) == 3 and best[0][1] + 1e-6 >= logprob
    again = sampler.sample(types.ModelInput.from_ints(prompt), 3, types.SamplingParams(max_tokens=24, seed=5, stop=[]))
    assert [answer.tokens for answer in again.result(30).sequences] == [answer.tokens for answer in answers.sequences]


def by_hand(name: str, p: Sequence[float], inputs: dict[str, Sequence[float]], beta: float = 0.3) -> list[float]:
    """The loss of each position by its published definition, as a loop over floats."""
    losses = []
    low, high = CLIP.values()
    if name == "gspo":
        mask = inputs["sequence_ratio_mask"]
        inside = [p[t] - inputs["logprobs"][t] for t in range(len(p)) if mask[t]]
        sequence_ratio = math.exp(sum(inside) / len(inside))
    for t, logprob in enumerate(p):
        if name == "cross_entropy":
            losses.append(-logprob * inputs["weights"][t])
            continue
        q, advantage = inputs["logprobs"][t], inputs["advantages"][t]
        ratio = sequence_ratio if name == "gspo" else math.exp(logprob - q)
        clipped = min(max(ratio, low), high)
        losses.append(
            {
                "importance_sampling": -ratio * advantage,
                "ppo": -min(ratio * advantage, clipped * advantage),
                "gspo": -min(ratio * advantage, clipped * advantage),
                "cispo": -clipped * logprob * advantage,
                "dro": -(logprob * advantage - beta / 2 * (logprob - q) ** 2),
            }[name]
        )
    return losses


CONFIGS = {
    "cross_entropy": None,
    "importance_sampling": None,
    "ppo": CLIP,
    "cispo": CLIP,
    "dro": {"beta": 0.3},
    "gspo": CLIP,
}


def loss_inputs(name: str, number: int, length: int) -> dict[str, Tensor]:
    inputs = policy_inputs(number, length)
    if name == "cross_entropy":
        return {"weights": inputs["advantages"]}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = (torch.arange(length) >= length // 2).float()
    return inputs


@pytest.mark.parametrize("name", CONFIGS)
def test_each_loss_is_its_definition(name: str, train: Callable[..., Any]) -> None:
    documents = rows()
    inputs = [loss_inputs(name, number, len(ids) - 1) for number, ids in enumerate(documents)]
    data = [datum(ids, **one) for ids, one in zip(documents, inputs, strict=True)]
    output = train(seed=2).forward_backward(data, name, CONFIGS[name]).result(30)
    total = 0.0
    for one, result in zip(inputs, output.loss_fn_outputs, strict=True):
        logprobs = tensor(result, "logprobs").tolist()
        expected = by_hand(name, logprobs, {key: x.tolist() for key, x in one.items()})
        # float32 next to Python's float64
        torch.testing.assert_close(tensor(result, "elementwise_loss"), torch.tensor(expected), atol=1e-5, rtol=1e-5)
        total += sum(expected)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5, abs=1e-5)


def torch_loss(name: str, p: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The losses for the PEFT loop."""
    if name == "cross_entropy":
        return -(p * inputs["weights"]).sum()
    ratio = (p - inputs["logprobs"]).exp()
    if name == "gspo":
        mean = (p.detach() - inputs["logprobs"])[inputs["sequence_ratio_mask"] > 0].mean()
        ratio = (mean + p - p.detach()).exp()
    clipped, advantages = ratio.clamp(*CLIP.values()), inputs["advantages"]
    objective = {
        "importance_sampling": ratio * advantages,
        "ppo": torch.minimum(ratio * advantages, clipped * advantages),
        "gspo": torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": clipped.detach() * p * advantages,
        "dro": p * advantages - 0.15 * (p - inputs["logprobs"]) ** 2,
    }
    return -objective[name].sum()


def peft_loop(base: Path, folder: Path, name: str, steps: int) -> dict[str, Tensor]:
    """Train the LoRA in a folder with torch, transformers and peft; return its tensors."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import Qwen3ForCausalLM

    model = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(base), folder, is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for step in range(steps):
        for number, ids in enumerate(rows(step)):
            logits = model(torch.tensor([ids[:-1]])).logits[0]
            logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            torch_loss(name, logprobs, loss_inputs(name, number, len(ids) - 1)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in get_peft_model_state_dict(model).items()}


def service_loop(client: Any, name: str, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        documents = rows(step + seed)
        data = [datum(ids, **loss_inputs(name, n, len(ids) - 1)) for n, ids in enumerate(documents)]
        future = client.forward_backward(data, name, CONFIGS[name])
        client.optim_step(adam()).result(60)
        future.result(60)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plain_loop_with_peft_agrees_while_another_client_trains(
    name: str, base: Path, train: Callable[..., Any], tmp_path: Path
) -> None:
    steps = 20 if name == "cross_entropy" else 4
    client, other = train(seed=5), train("tml-two", seed=6, rank=8)
    start = client.save_weights_external("start").result(30).path
    downloaded(client, start, tmp_path)
    ended, finished = threading.Event(), []

    def disturb() -> None:
        while not ended.is_set():
            service_loop(other, "importance_sampling", 1, len(finished))
            finished.append(1)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        service_loop(client, name, steps)
    finally:
        ended.set()
        thread.join()
    assert finished
    expected = peft_loop(base, tmp_path, name, steps)
    # Rounding of float32 through the steps of AdamW.
    assert largest_difference(saved_weights(client), expected) < 1e-5


def test_a_position_with_several_targets_is_a_document_per_target(train: Callable[..., Any]) -> None:
    from tinker import types

    ids = rows()[1]
    targets = torch.tensor([ids[1:], ids[:-1], [3] * (len(ids) - 1)]).T
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(0))
    inputs = {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}
    several = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    singles = [
        types.Datum(
            model_input=several.model_input,
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch(column),
                "weights": types.TensorData.from_torch(weight),
            },
        )
        for column, weight in zip(targets.T.contiguous(), weights.T.contiguous(), strict=True)
    ]
    one, other = train(seed=1), train(seed=1)
    first = one.forward_backward([several], "cross_entropy").result(30)
    second = other.forward_backward(singles, "cross_entropy").result(30)
    columns = torch.stack([tensor(output, "logprobs") for output in second.loss_fn_outputs], 1)
    torch.testing.assert_close(tensor(first.loss_fn_outputs[0], "logprobs"), columns, atol=1e-6, rtol=1e-6)
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-6)
    norms = [client.optim_step(adam()).result(30).metrics["grad_norm"] for client in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_custom_losses_take_two_passes(train: Callable[..., Any]) -> None:
    data = [datum(ids) for ids in rows()]

    def squares(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return sum((x**2).sum() for x in logprobs), {"documents": float(len(logprobs))}

    custom, surrogate = train(seed=1), train(seed=1)
    output = custom.forward_backward_custom(data, squares).result(30)
    logprobs = [tensor(result, "logprobs") for result in output.loss_fn_outputs]
    assert output.metrics["loss:sum"] == pytest.approx(float(sum((x**2).sum() for x in logprobs)), rel=1e-5)
    assert output.metrics["documents"] == len(data)
    # d(p²) = 2 p dp: cross-entropy with the weights -2 p
    weighted = [datum(ids, weights=-2 * x) for ids, x in zip(rows(), logprobs, strict=True)]
    surrogate.forward_backward(weighted, "cross_entropy")
    norms = [client.optim_step(adam()).result(30).metrics["grad_norm"] for client in (custom, surrogate)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_clients_that_train_together_get_the_weights_of_training_alone(train: Callable[..., Any]) -> None:
    def run(names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        clients = {
            name: train(f"tml-{name}", seed=index) for index, name in enumerate(("a", "b", "c")) if name in names
        }
        threads = [
            threading.Thread(target=service_loop, args=(client, "ppo", 6, 10 * ord(name)))
            for name, client in clients.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: saved_weights(client) for name, client in clients.items()}

    together = run(["a", "b", "c"])
    for name in ("a", "b", "c"):
        # A batch of several models has matmuls of other shapes, which round differently.
        assert largest_difference(run([name])[name], together[name]) < 1e-6


def test_a_loaded_state_continues_as_if_it_had_not_been_saved(train: Callable[..., Any], connect: Any) -> None:
    client = train(seed=1)
    service_loop(client, "ppo", 3)
    path = client.save_state("middle").result(30).path
    service_loop(client, "ppo", 3, 50)
    expected = saved_weights(client)
    service = connect()
    resumed = service.create_training_client_from_state_with_optimizer(path).result(30)
    service_loop(resumed, "ppo", 3, 50)
    assert largest_difference(saved_weights(resumed), expected) == 0
    without = service.create_training_client_from_state(path).result(30)
    service_loop(without, "ppo", 3, 50)
    assert largest_difference(saved_weights(without), expected) > LR / 10
    with pytest.warns(FutureWarning):
        client.load_state_with_optimizer(path).result(30)
    service_loop(client, "ppo", 3, 50)
    assert largest_difference(saved_weights(client, "again"), expected) == 0
