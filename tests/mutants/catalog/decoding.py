"""Mistakes in the decode step of CUDA and its kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STEP = "tests/generation/test_decode_step.py"
_FORKS = f"{_STEP}::test_preemption_and_forks"
_PAGED = "tests/models/cuda/test_paged_attention.py"
_ELEMENTWISE = "tests/models/cuda/test_elementwise.py"
_KERNEL = "models/cuda/paged_attention.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every sequence attends to the pages of the first",
        _KERNEL,
        "Pages + row * page_stride + token // PAGE",
        "Pages + token // PAGE",
        (_PAGED,),
    ),
    Mutant(
        "a sequence does not attend to its last token",
        _KERNEL,
        "length = tl.load(Lengths + row).to(tl.int32)",
        "length = tl.load(Lengths + row).to(tl.int32) - 1",
        (_PAGED,),
    ),
    Mutant(
        "a sink has no weight",
        _KERNEL,
        "total = tl.where(split == 0, 1.0, total)",
        "total = tl.where(split == 0, 0.0, total)",
        (_PAGED,),
    ),
    Mutant(
        "a window is one token too long",
        _KERNEL,
        "first = tl.maximum(length - window, 0)",
        "first = tl.maximum(length - window - 1, 0)",
        (_PAGED,),
    ),
    Mutant(
        "splits are merged with equal weights",
        _KERNEL,
        "kept, weight = tl.exp(maximum - highest), tl.exp(lse - highest)",
        "kept, weight = 1.0, 1.0",
        (_PAGED,),
    ),
    Mutant(
        "the last features of a key have no score",
        _KERNEL,
        "scores += tl.dot(q_tail, k_tail",
        "scores += 0 * tl.dot(q_tail, k_tail",
        (_PAGED,),
    ),
    Mutant(
        "a new token is stored in the first page of its sequence",
        _KERNEL,
        "page = tl.load(Pages + row * page_stride + last // PAGE)",
        "page = tl.load(Pages + row * page_stride)",
        (_PAGED,),
    ),
    Mutant(
        "joined projections of the generator have no biases",
        "archon/generation/replica.py",
        "layers[0].joint = partial(F.linear, weight=weight, bias=bias)",
        "layers[0].joint = partial(F.linear, weight=weight, bias=None)",
        ("tests/generation/test_replica.py::test_joined_projections_follow_updates",),
    ),
    Mutant(
        "joined projections of the generator are copies that updates miss",
        "archon/generation/replica.py",
        "        parameter.data = part\n",
        "        parameter.data = part.clone()\n",
        ("tests/generation/test_replica.py::test_joined_projections_follow_updates",),
    ),
    Mutant(
        "SwiGLU's kernel lets a gradient through a clamped gate",
        "models/cuda/elementwise.py",
        "gate_grad = tl.where(gate > limit, 0.0, grad * factor * slope)",
        "gate_grad = grad * factor * slope",
        (f"{_ELEMENTWISE}::test_swiglu",),
    ),
    Mutant(
        "SwiGLU's kernel has the slope of a sigmoid",
        "models/cuda/elementwise.py",
        "gate_grad = activated_grad * sigmoid * (1 + gate * (1 - sigmoid))",
        "gate_grad = activated_grad * sigmoid * (1 - sigmoid)",
        (f"{_ELEMENTWISE}::test_swiglu",),
    ),
    Mutant(
        "a fused rotation pairs neighbors as halves",
        "models/cuda/elementwise.py",
        "second = first + 1 if INTERLEAVED else first + HALF",
        "second = first + HALF",
        (_ELEMENTWISE,),
    ),
    Mutant(
        "a fused norm divides by the padded width",
        "models/cuda/elementwise.py",
        "squares / WIDTH + eps",
        "squares / (2 * PADDED_HALF + PADDED_REST) + eps",
        (_ELEMENTWISE,),
    ),
    Mutant(
        "padding rows of a decode step write to page 0",
        "archon/generation/decode_step.py",
        "pages = np.full((n_rows, width), self.cache.n_pages)",
        "pages = np.full((n_rows, width), 0)",
        (f"{_STEP}::test_padding_rows_write_to_the_scratch_page_and_state_only",),
    ),
    Mutant(
        "padding rows of a decode step write to state 0",
        "archon/generation/decode_step.py",
        'rows["state"] = -1, 1, self.cache.states.n_slots',
        'rows["state"] = -1, 1, 0',
        (f"{_STEP}::test_padding_rows_write_to_the_scratch_page_and_state_only",),
    ),
    Mutant(
        "a draw does not count the token that the host has not read",
        "archon/generation/decode_step.py",
        "index = np.array([len(s.output) + s.unread for",
        "index = np.array([len(s.output) for",
        (_FORKS,),
    ),
    Mutant(
        "a length does not count the token that the host has not read",
        "archon/generation/decode_step.py",
        'rows["length"] = [s.total + s.unread for s in sequences]',
        'rows["length"] = [s.total for s in sequences]',
        (_FORKS,),
    ),
    Mutant(
        "a row takes the unread token of the equal row of the previous step",
        "archon/generation/decode_step.py",
        'rows["source"] = [source.get(s, -1) for s in sequences]',
        'rows["source"] = [row if s in source else -1 for row, s in enumerate(sequences)]',
        (_STEP,),
    ),
    Mutant(
        "a row takes the token that the host knows, one token late",
        "archon/generation/decode_step.py",
        'tokens = torch.where(row["source"] >= 0, sampled, row["token"])',
        'tokens = torch.where(row["source"] < -1, sampled, row["token"])',
        (_FORKS,),
    ),
    Mutant(
        "banned ids are forgotten one token too late",
        "archon/generation/decode_step.py",
        "len(sequence.output) + sequence.unread < sequence.min_new_tokens",
        "len(sequence.output) < sequence.min_new_tokens",
        (f"{_STEP}::test_answers_of_every_family",),
    ),
    Mutant(
        "the host reads the tokens of a step before it starts the next",
        "archon/generation/generator.py",
        "        if self._unread is not None and not self.scheduler.fits():\n",
        "        if True:\n",
        (f"{_STEP}::test_the_host_reads_a_step_after_it_started_the_next",),
    ),
    Mutant(
        "a sequence is preempted with a token on the device",
        "archon/generation/generator.py",
        "        if self._unread is not None and not self.scheduler.fits():\n",
        "        if False:\n",
        (_FORKS,),
    ),
    Mutant(
        "tokens of the old weights are read as those of the new ones",
        "archon/generation/generator.py",
        "            self._read_tokens()\n        except NotFiniteError",
        "            pass\n        except NotFiniteError",
        (_STEP,),
    ),
    Mutant(
        "a step follows the token that reaches the limit",
        "archon/generation/sequence.py",
        "return self.unread > 0 and len(self.output) + self.unread >= self.limit",
        "return False",
        (_STEP,),
    ),
    Mutant(
        "an answer that has ended gets the token of the step that was under way",
        "archon/generation/generator.py",
        "            if sequence.stop_reason is None:  # otherwise",
        "            if True:  # otherwise",
        (_STEP,),
    ),
    Mutant(
        "a token on the device is banned where it is most likely, and drawn elsewhere",
        "archon/generation/sampler.py",
        "    for x in (scores, logprobs):\n",
        "    for x in (scores,):\n",
        (_STEP,),
    ),
)
