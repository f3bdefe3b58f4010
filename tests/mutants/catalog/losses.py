"""Mistakes in policy losses, corrections and aggregation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOSSES = ("tests/rl/test_policy_losses.py", "tests/rl/test_objective.py")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the clip takes the lesser loss",
        "rl/algorithms/losses.py",
        "loss, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped",
        "loss, is_clipped = torch.minimum(unclipped, clipped), clipped > unclipped",
        LOSSES,
    ),
    Mutant(
        "the dual clip bounds positive advantages as well",
        "rl/algorithms/losses.py",
        "beyond = (advantages < 0) & (loss > bound)",
        "beyond = loss > bound",
        LOSSES,
    ),
    Mutant(
        "GSPO's ratio is not divided by the length",
        "rl/algorithms/losses.py",
        "return total / count.clamp(min=1)",
        "return total",
        LOSSES,
    ),
    Mutant(
        "GSPO's gradient is that of the mean, a length too small",
        "rl/algorithms/losses.py",
        "ratio = (mean[terms.documents] + terms.logprobs - terms.logprobs.detach()).exp()",
        "ratio = mean[terms.documents].exp() + 0 * terms.logprobs",
        LOSSES,
    ),
    Mutant(
        "CISPO's weight has a gradient",
        "rl/algorithms/losses.py",
        "ratio = terms.ratio.detach()\n    weight = ",
        "ratio = terms.ratio\n    weight = ",
        LOSSES,
    ),
    Mutant(
        "SAPO's temperatures change places",
        "rl/algorithms/losses.py",
        "(settings.tau_positive, settings.tau_negative)",
        "(settings.tau_negative, settings.tau_positive)",
        LOSSES,
    ),
    Mutant(
        "M2PO leaves out tokens by their own moment, not by the mean",
        "rl/algorithms/losses.py",
        "scatter(0, order, means <= threshold)",
        "scatter(0, order, moments <= threshold)",
        LOSSES,
    ),
    Mutant(
        "truncated importance sampling is bounded from below too",
        "rl/algorithms/corrections.py",
        "ratio = log_ratio.exp()\n    return ratio.clamp(max=settings.max_ratio)",
        "ratio = log_ratio.exp()\n    return ratio.clamp(min=0.5, max=settings.max_ratio)",
        (*LOSSES, "tests/rl/test_prepare.py"),
    ),
    Mutant(
        "IcePop bounds what strays, in place of leaving it out",
        "rl/algorithms/corrections.py",
        "return torch.where(outside, 0.0, ratio), outside",
        "return ratio.clamp(settings.min_ratio, settings.max_ratio), outside",
        (*LOSSES, "tests/rl/test_prepare.py"),
    ),
    Mutant(
        "the ratio of a whole answer is that of its prompt as well",
        "rl/algorithms/corrections.py",
        "torch.where(trained, log_ratio, 0.0).sum(1, keepdim=True)",
        "log_ratio.sum(1, keepdim=True)",
        (*LOSSES, "tests/rl/test_prepare.py"),
    ),
    Mutant(
        "k3 with its roles exchanged",
        "rl/algorithms/kl.py",
        "return (-d).expm1() + d",
        "return d.expm1() - d",
        LOSSES,
    ),
    Mutant(
        "the KL to the reference is weighted by the correction",
        "rl/algorithms/objective.py",
        "loss = loss + config.kl.coef * (kl * weights).sum()",
        "loss = loss + config.kl.coef * (kl * policy_weights).sum()",
        LOSSES,
    ),
    Mutant(
        "the entropy bonus is weighted by the correction",
        "rl/algorithms/objective.py",
        "loss = loss - config.entropy_coef * (entropy * weights).sum()",
        "loss = loss - config.entropy_coef * (entropy * policy_weights).sum()",
        LOSSES,
    ),
    Mutant(
        "the ratio is to the policy that generated, also where the policy scores the batch anew",
        "rl/algorithms/objective.py",
        'old = column("prox_logprobs") if config.recomputes_logprobs else generated',
        "old = generated",
        LOSSES,
    ),
    Mutant(
        "the critic's clipped loss takes the lesser error",
        "rl/algorithms/objective.py",
        "clipped, error = clipped_error > error, torch.maximum(error, clipped_error)",
        "clipped, error = clipped_error > error, torch.minimum(error, clipped_error)",
        ("tests/rl/test_objective.py", "tests/rl/test_plain_loops.py"),
    ),
    Mutant(
        "an answer of which nothing is trained counts in the mean over answers",
        "rl/algorithms/aggregation.py",
        "return loss_mask / counts.clamp(min=1)[documents], (counts > 0).sum()",
        "return loss_mask / counts.clamp(min=1)[documents], (counts >= 0).sum()",
        LOSSES,
    ),
    Mutant(
        "Dr. GRPO divides by the answer's own length",
        "rl/algorithms/aggregation.py",
        "return weights / settings.max_tokens, units",
        "return weights / sums_by_document(loss_mask, documents, n_documents).clamp(min=1)[documents], units",
        LOSSES,
    ),
    Mutant(
        "TOPR tapers each token by its own ratio",
        "rl/algorithms/off_policy.py",
        "answer.clamp(max=0).exp()",
        "log_ratio.clamp(max=0).exp()",
        LOSSES,
    ),
    Mutant(
        "sPPO bounds the ratio from above alone",
        "rl/algorithms/off_policy.py",
        "log_ratio.clamp(-bound, bound)",
        "log_ratio.clamp(max=bound)",
        LOSSES,
    ),
    Mutant(
        "REC leaves out what would come back",
        "rl/algorithms/off_policy.py",
        "torch.where(terms.advantages >= 0, above, below)",
        "torch.where(terms.advantages >= 0, below, above)",
        LOSSES,
    ),
    Mutant(
        "KPop bounds one direction",
        "rl/algorithms/corrections.py",
        "_binary_kl(trained, generated).maximum(_binary_kl(generated, trained))",
        "_binary_kl(trained, generated)",
        ("tests/rl/test_policy_losses.py", "tests/rl/test_plain_loops.py"),
    ),
)
