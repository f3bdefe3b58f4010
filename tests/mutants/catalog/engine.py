"""Mistakes in the engine: micro-batches, metrics, optimizer, state."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import MATRIX, PIPELINE
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the marks of padding are not reordered with the documents",
        "archon/engine/plan.py",
        "            packed.valid_mask = shard.valid_mask\n",
        "            packed.valid_mask = None if shard.valid_mask is None else shard.valid_mask.roll(1)\n",
        (f"{PIPELINE}::test_padding_of_a_pipelines_micro_batches_is_counted_by_no_router",),
    ),
    Mutant(
        "the balancing loss of a micro-batch is weighted by their number, not by its tokens",
        "archon/engine/train_step.py",
        "fraction = float(loss.weight_fn(mb.documents)) / loss.denominator",
        "fraction = 1.0 / len(parts)",
        (f"{MATRIX}[moe-d2e2-float64-router_aux_loss_coef=0.1]",),
    ),
    Mutant(
        "metrics of a batch are those of its last micro-batch",
        "archon/engine/metrics.py",
        "self.sums[name] = self.sums.get(name, 0) + total.detach().double()",
        "self.sums[name] = total.detach().double()",
        ("tests/engine/test_gradients.py",),
    ),
    Mutant(
        "metrics are means of the ranks' means",
        "archon/engine/metrics.py",
        "tensors = [*scalars.values(), *self.sums.values(), *self.counts.values()]",
        "self.sums = {name: x / self.counts[name].clamp(min=1) for name, x in self.sums.items()}\n"
        "        self.counts = {name: (x > 0).double() for name, x in self.counts.items()}\n"
        "        tensors = [*scalars.values(), *self.sums.values(), *self.counts.values()]",
        ("tests/distributed/test_losses.py",),
    ),
    Mutant(
        "the loss that ranks of a context group report is a rank's own",
        "archon/engine/train_step.py",
        "loss = out.loss if plan.score_shard is None else all_reduce_replicated(out.loss, self.ranks.cp)",
        "loss = out.loss",
        (f"{MATRIX}[tied-d2c2-float64-loss=fused]",),
    ),
    Mutant(
        "a step whose gradient is infinite is taken",
        "archon/engine/engine.py",
        'finite = abs(metrics["grad_norm"]) < float("inf")',
        'finite = metrics["grad_norm"] == metrics["grad_norm"]',
        ("tests/engine/test_engine_state.py",),
    ),
    Mutant(
        "skipped steps count in a row although others lie between",
        "archon/engine/optim.py",
        "self._in_a_row = self._in_a_row + 1 if skipped else 0",
        "self._in_a_row += skipped",
        ("tests/engine/test_engine_state.py",),
    ),
    Mutant(
        "a schedule that is resumed keeps the first learning rate until it moves",
        "archon/engine/optim.py",
        'self._position = int(state["position"])\n        self._apply()',
        'self._position = int(state["position"])',
        ("tests/engine/test_optim.py",),
    ),
    Mutant(
        "Adam's betas change places",
        "archon/engine/optim.py",
        "betas = (config.beta1, config.beta2)",
        "betas = (config.beta2, config.beta1)",
        ("tests/engine/test_optim.py",),
    ),
    Mutant(
        "norms and biases decay",
        "archon/engine/optim.py",
        "parameter.ndim < 2 or id(parameter) in embeddings",
        "id(parameter) in embeddings",
        ("tests/engine/test_optim.py",),
    ),
    Mutant(
        "warm-up begins with a step of learning rate 0",
        "archon/engine/optim.py",
        "return (step + 1) / warmup",
        "return step / warmup",
        ("tests/engine/test_optim.py",),
    ),
    Mutant(
        "clipped gradients are shorter than the bound",
        "archon/engine/optim.py",
        "foreach_mul_(grads, max_norm / norm)",
        "foreach_mul_(grads, max_norm / (norm + 1.0))",
        ("tests/engine/test_optim.py",),
    ),
    Mutant(
        "Adam's step count begins anew after a resume",
        "archon/engine/state.py",
        "moments[key] = step.detach().to(local_tensor(parameter).device, copy=True)",
        "moments[key] = torch.zeros_like(step)",
        ("tests/engine/test_engine_state.py",),
    ),
    Mutant(
        "a resume leaves Python's random generator alone",
        "archon/engine/state.py",
        '    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))\n',
        "",
        ("tests/engine/test_engine_state.py",),
    ),
    Mutant(
        "biases follow the load of a rank's own share of tokens under tensor parallelism",
        "archon/engine/router_balance.py",
        "for group in (ranks.dp, ranks.cp, ranks.tp):",
        "for group in (ranks.dp, ranks.cp):",
        (f"{MATRIX}[moe-t2-float64-router_bias_update_rate=0.01]",),
    ),
    Mutant(
        "biases follow the load of the last micro-batch",
        "archon/engine/router_balance.py",
        "self._counts = counts if self._counts is None else self._counts + counts",
        "self._counts = counts",
        ("tests/engine/test_balancing.py",),
    ),
    Mutant(
        "a score stands at the token before the one it speaks of",
        "archon/engine/batch.py",
        "out[(packed.source[predicts] + 1).to(out.device)] = values[predicts.to(out.device)]",
        "out[packed.source[predicts].to(out.device)] = values[predicts.to(out.device)]",
        ("tests/engine/test_batch.py",),
    ),
    Mutant(
        "scores stay in the order of the lengths",
        "archon/engine/micro_batch.py",
        "return x if self.inverse is None else x.index_select(0, self.inverse)",
        "return x if self.inverse is None else x.index_select(0, self.rows)",
        ("tests/engine/test_batch.py",),
    ),
    Mutant(
        "sizes that are equal in the first batch are compiled in as one",
        "parallel/torch_private.py",
        "before, shapes.use_duck_shape = shapes.use_duck_shape, False",
        "before = shapes.use_duck_shape",
        ("tests/engine/test_precision.py::test_sizes_that_only_the_first_batch_has_in_common_are_not_compiled_in",),
    ),
)
