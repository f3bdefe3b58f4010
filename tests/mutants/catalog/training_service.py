"""Mistakes in the training service for clients of the Tinker SDK."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NUMBERS = "tests/serve/training/test_numbers.py"
SERVICE = "tests/serve/training/test_service.py"
QUEUES, FUZZ, PAGE = (f"tests/serve/training/test_{name}.py" for name in ("queues", "fuzz", "page"))
LAYOUTS = "tests/serve/training/test_layouts.py"
IDLE = "tests/serve/training/test_idle.py"
DEFINITIONS = f"{NUMBERS}::test_each_loss_is_its_definition"
PEFT = f"{NUMBERS}::test_a_plain_loop_with_peft_agrees_while_another_client_trains"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the gradient of CISPO flows through the clipped ratio",
        "archon/serve/training/losses.py",
        "-_clip(_ratio(logprobs, inputs), inputs).detach() * logprobs",
        "-_clip(_ratio(logprobs, inputs), inputs) * logprobs",
        (f"{PEFT}[cispo]",),
    ),
    Mutant(
        "the ratio of GSPO is the mean over all positions",
        "archon/serve/training/losses.py",
        'inputs["logprobs"])[inside].mean()',
        'inputs["logprobs"]).mean()',
        (f"{DEFINITIONS}[gspo]",),
    ),
    Mutant(
        "a call replaces the gradients of earlier calls",
        "archon/engine/lora_pool.py",
        "parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)",
        "parameter.grad = grad if parameter.grad is None else parameter.grad",
        (f"{NUMBERS}::test_gradients_accumulate_over_calls",),
    ),
    Mutant(
        "an optimizer step ignores the request's weight decay",
        "archon/engine/lora_pool.py",
        '                "weight_decay": settings.weight_decay,\n',
        "",
        (f"{NUMBERS}::test_a_lora_after_ten_steps_is_the_one_that_sft_trains",),
    ),
    Mutant(
        "a loaded optimizer has no second moment",
        "archon/engine/lora_pool.py",
        'value.copy_(moments[f"{single}:{key}"])',
        'value.copy_(torch.ones_like(value) if key == MOMENTS[1] else moments[f"{single}:{key}"])',
        (f"{NUMBERS}::test_a_loaded_state_continues_as_if_it_had_not_been_saved",),
    ),
    Mutant(
        "a retry of an optimizer step is run again",
        "archon/serve/training/service.py",
        "        if not self._known(owner, future):\n            self.queues.check(model, sequence_id)\n",
        "        if True:\n",
        (f"{SERVICE}::test_a_retry_finds_the_first_request",),
    ),
    Mutant(
        "a client finds the checkpoints of another client",
        "archon/serve/training/store.py",
        '"SELECT * FROM checkpoints WHERE path=? AND owner=?", path, owner)',
        '"SELECT * FROM checkpoints WHERE path=?", path)',
        (f"{SERVICE}::test_another_clients_checkpoints_are_not_there",),
    ),
    Mutant(
        "a body is decompressed without a limit",
        "archon/serve/training/wire.py",
        "if len(inflated) > INFLATED_BYTES:",
        "if len(inflated) < 0:",
        (f"{SERVICE}::test_hostile_bodies_and_other_keys",),
    ),
    Mutant(
        "each batch has the losses of one model",
        "archon/serve/training/queues.py",
        "tokens, kind = tokens + task.n_tokens, task.kind\n",
        "tokens, kind = tokens + BATCH_TOKENS, task.kind\n",
        ("tests/serve/training/test_queues.py::test_losses_of_several_models_become_one_batch",),
    ),
    Mutant(
        "a client with many models has a turn for each",
        "archon/serve/training/queues.py",
        "self._owner_turns.get(queue.owner, 0), queue.turn",
        "queue.turn",
        ("tests/serve/training/test_queues.py::test_clients_take_turns_and_models_keep_their_order",),
    ),
    Mutant(
        "a batch does not wait for models whose next request is expected",
        "archon/serve/training/queues.py",
        "        return max(ends - now, 0.0) if late else 0.0\n",
        "        return 0.0\n",
        (f"{QUEUES}::test_clients_that_train_at_the_same_time_share_batches",),
    ),
    Mutant(
        "losses that wait longer run before optimizer steps",
        "archon/serve/training/queues.py",
        '(queue.head.kind != "short", self',
        "(False, self",
        (f"{QUEUES}::test_clients_that_train_at_the_same_time_share_batches",),
    ),
    Mutant(
        "batches wait again and again for a client that has left",
        "archon/serve/training/queues.py",
        "queue.awaited = now < ends",
        "queue.awaited = True",
        (f"{QUEUES}::test_a_batch_waits_only_once_for_a_client_that_has_left",),
    ),
    Mutant(
        "a request may be any number ahead of the next",
        "archon/serve/training/queues.py",
        "if sequence_id > queue.next_id + MAX_AHEAD:",
        "if sequence_id < 0:",
        (f"{FUZZ}::test_hostile_requests_fail_alone",),
    ),
    Mutant(
        "token ids of a prompt become a tensor before they are checked",
        "archon/serve/training/wire.py",
        "(ids.aminmax() if isinstance(ids, Tensor) else (min(ids), max(ids)))",
        "torch.as_tensor(ids).aminmax()",
        (f"{FUZZ}::test_hostile_requests_fail_alone",),
    ),
    Mutant(
        "a decompressed body may have any size",
        "archon/serve/training/wire.py",
        "reader.read(INFLATED_BYTES + 1)",
        "reader.read()",
        (f"{FUZZ}::test_hostile_requests_fail_alone",),
    ),
    Mutant(
        "unfinished checkpoints of a killed server stay",
        "archon/serve/training/store.py",
        "            if folder not in recorded:\n                shutil.rmtree(folder)\n",
        "            pass\n",
        ("tests/serve/training/test_store.py",),
    ),
    Mutant(
        "a restart forgets a checkpoint whose replacement was interrupted",
        "archon/serve/training/store.py",
        "            undo_replacement(folder)\n",
        "            pass\n",
        ("tests/serve/training/test_store.py",),
    ),
    Mutant(
        "the page shows every client all sessions",
        "archon/serve/training/routes.py",
        "service.status(owner if service.tokens else None)",
        "service.status(None)",
        (f"{PAGE}::test_a_client_sees_only_its_own_sessions",),
    ),
    Mutant(
        "a loss curve grows without bound",
        "archon/serve/training/activity.py",
        "if len(self.points) > POINTS:",
        "if len(self.points) < 0:",
        (f"{PAGE}::test_rates_and_curves_are_bounded",),
    ),
    Mutant(
        "the loss curve shows the mean of all steps",
        "archon/serve/training/activity.py",
        "        self._sum, self._count = 0.0, 0\n        if len",
        "        if len",
        (f"{PAGE}::test_rates_and_curves_are_bounded",),
    ),
    Mutant(
        "the gradients of the parts are not summed over ranks",
        "archon/engine/lora_pool.py",
        "        dist.all_reduce(flat, group=default_group())\n        for single",
        "        for single",
        (f"{LAYOUTS}::test_a_layout_gives_the_numbers_of_one_process[d2]",),
    ),
    Mutant(
        "data-parallel ranks run the same documents",
        "archon/serve/training/trainer.py",
        "return sorted(shares[rank])",
        "return sorted(shares[0])",
        (f"{LAYOUTS}::test_a_layout_gives_the_numbers_of_one_process[d2]",),
    ),
    Mutant(
        "a rank with an error of its own goes on alone",
        "archon/serve/training/ranks.py",
        "if not failed:",
        "if not failed or error is None:",
        (f"{LAYOUTS}::test_an_error_of_one_rank_is_every_ranks",),
    ),
    Mutant(
        "an idle model loses its gradient",
        "archon/engine/lora_pool.py",
        'tensors[f"{_GRADIENT}{single}"] = parameter.grad',
        "pass",
        (f"{IDLE}::test_idle_models_return_from_disk_bitwise",),
    ),
    Mutant(
        "an idle model loses its moments",
        "archon/engine/lora_pool.py",
        "self.load(name, part(_WEIGHT), part(_MOMENT))",
        "self.load(name, part(_WEIGHT), {})",
        (f"{IDLE}::test_idle_models_return_from_disk_bitwise",),
    ),
    Mutant(
        "idle models take any space on disk",
        "archon/serve/training/trainer.py",
        "if used + n_bytes > self._idle_bytes:",
        "if False:",
        (f"{IDLE}::test_idle_models_have_a_limit_on_disk",),
    ),
)
