"""Mistakes in generation: sampling, schedules, replicas."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "probabilities of a bfloat16 model are taken in bfloat16",
        "archon/generation/sampler.py",
        "scores = logits.to(torch.promote_types(logits.dtype, torch.float32))",
        "scores = logits",
        ("tests/generation/test_parity.py::test_a_bfloat16_replica_follows_a_bfloat16_model",),
    ),
    Mutant(
        "neighboring seeds share their random streams, one token apart",
        "archon/generation/sampler.py",
        "_splitmix64(_splitmix64(seeds.astype(np.uint64)) + indices.astype(np.uint64))",
        "_splitmix64(seeds.astype(np.uint64) + indices.astype(np.uint64))",
        ("tests/generation/test_sampler.py",),
    ),
    Mutant(
        "the logprob of a token is that among the tokens that were allowed",
        "archon/generation/sampler.py",
        "logprobs = all_logprobs.gather(1, tokens[:, None])[:, 0]",
        "logprobs = torch.log_softmax(choices, dim=-1).gather(1, tokens[:, None])[:, 0]",
        ("tests/generation/test_sampler.py", "tests/generation/test_answers.py"),
    ),
    Mutant(
        "sequences are twins when rows of different steps agree",
        "archon/generation/generator.py",
        "sequence.drawn = (self.stats.steps, row, token)",
        "sequence.drawn = (0, row, token)",
        ("tests/generation/test_answers.py", "tests/generation/test_engine.py"),
    ),
    Mutant(
        "a drawn token's block is the first that has as much of the distribution",
        "models/native/kernels.c",
        "                before += sums[first / size];\n",
        "                (void)before;\n",
        ("tests/generation/test_sampler.py",),
    ),
    Mutant(
        "the most likely logit is divided by no temperature",
        "models/native/kernels.c",
        "        maximum /= heat;\n",
        "",
        ("tests/generation/test_sampler.py",),
    ),
    Mutant(
        "a prompt's state is copied with forks alone",
        "archon/generation/generator.py",
        "        self._copy_forked(forks)\n        for sequence",
        "        if forks:\n            self._copy_forked(forks)\n        for sequence",
        ("tests/generation/test_states.py",),
    ),
    Mutant(
        "tokens carry the version of the weights their answer began with",
        "archon/generation/generator.py",
        "sequence.append(token, logprob, (sequence.adapter or self).version)",
        "sequence.append(token, logprob, (sequence.versions or [self.version])[0])",
        ("tests/generation/test_engine.py",),
    ),
    Mutant(
        "an answer may stop one token too early",
        "archon/generation/sequence.py",
        "len(self.output) > self.request.gconfig.min_new_tokens",
        "len(self.output) >= self.request.gconfig.min_new_tokens",
        ("tests/generation/test_answers.py",),
    ),
    Mutant(
        "prompts read with the old weights are used with the new ones",
        "archon/generation/scheduler.py",
        "            if adapter in (None, owner):\n                self._drop_pages(prompt)\n",
        "            del owner, prompt\n",
        ("tests/generation/test_engine.py",),
    ),
    Mutant(
        "a generator that shares weights goes on multiplying by the packed old ones",
        "archon/generation/replica.py",
        "        parameter.data = tensor\n    return _pack_linears(replica)\n",
        "        parameter.data = tensor\n    return 0\n",
        ("tests/generation/test_replica.py", "tests/generation/test_engine.py"),
    ),
    Mutant(
        "a generator with its own weights goes on multiplying by the packed old ones",
        "archon/generation/replica.py",
        "        written += _pack_linears(replica)\n",
        "        pass\n",
        ("tests/generation/test_replica.py", "tests/generation/test_engine.py"),
    ),
    Mutant(
        "the generator has no balancing biases",
        "archon/generation/replica.py",
        "return dict(model.named_parameters()) | expert_biases(model)",
        "return dict(model.named_parameters())",
        ("tests/generation/test_replica.py",),
    ),
    Mutant(
        "a prompt that is read in parts is turned as if each part were all of it",
        "archon/generation/generator.py",
        "sequence.pages, sequence.total, sequence.state)",
        "sequence.pages, chunk.stop, sequence.state)",
        ("tests/generation/test_parity.py::test_rope_that_would_turn_cached_keys_is_refused",),
    ),
    Mutant(
        "a generator's packed head forgets the soft cap",
        "archon/generation/replica.py",
        "soft_capped(out, module.soft_cap) if isinstance(module, LMHead)",
        "out if isinstance(module, LMHead)",
        ("tests/generation/test_parity.py::test_first_step_ratio_is_one[gemma3_text-1.0]",),
    ),
    Mutant(
        "the logprobs of an echoed prompt stand a place early",
        "archon/serve/openai_completions.py",
        "[None, *scores.logprobs][: len(texts)]",
        "[*scores.logprobs, None][: len(texts)]",
        ("tests/serve/test_echo.py",),
    ),
)
