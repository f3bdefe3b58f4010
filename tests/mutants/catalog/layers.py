"""Mistakes in rotations and norms."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import FURTHER_MATRIX, PARITY
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rotary angles in the compute dtype",
        "models/layers/rope.py",
        "        wide = torch.promote_types(dtype, torch.float32)\n",
        "        wide = dtype\n",
        ("tests/models/test_rope.py",),
    ),
    Mutant(
        "LongRoPE's long frequencies from the original context on, not beyond it",
        "models/layers/rope.py",
        "is_long = to_device_async(lengths > original,",
        "is_long = to_device_async(lengths >= original,",
        ("tests/models/test_rope.py",),
    ),
    Mutant(
        "the attention factor of YaRN multiplies the cosine alone",
        "models/layers/rope.py",
        "sin = angles.sin() * self.attention_factor",
        "sin = angles.sin()",
        ("tests/models/test_rope.py",),
    ),
    Mutant(
        "the norm is rounded after its weight",
        "models/cpu/fused.py",
        "out.to(x.dtype) * weight",
        "(out * weight).to(x.dtype)",
        ("tests/models/test_layers.py",),
    ),
    Mutant(
        "queries grow within the original context too",
        "models/layers/rope.py",
        "periods = torch.floor(positions.to(wide) / self.spec.query_period)",
        "periods = positions.to(wide) / self.spec.query_period",
        (f"{PARITY}[ministral3-1]",),
    ),
    Mutant(
        "a norm over all heads takes the squares of its own rank's heads alone",
        "models/layers/norm.py",
        "mean = all_reduce_sharded(wide.square().sum(-1, keepdim=True), self.tp) / copies",
        "mean = wide.square().sum(-1, keepdim=True) * self.tp.size / copies",
        (f"{FURTHER_MATRIX}[norms_after-t2-float64]",),
    ),
    Mutant(
        "the squares of other ranks' heads get no gradient",
        "parallel/comm.py",
        "return grad if ctx.replicated else all_reduce(grad, ctx.group), None, None",
        "return grad, None, None",
        (f"{FURTHER_MATRIX}[norms_after-t2-float64]",),
    ),
    Mutant(
        "a key head that several ranks hold counts once in the mean of squares",
        "models/layers/norm.py",
        "copies = x.shape[-1] * self.tp.size",
        "copies = self.weight.shape[0]",
        (f"{FURTHER_MATRIX}[norms_after_few_kv-t4-float64]",),
    ),
    Mutant(
        "the 1 that checkpoints leave out of a norm's factor is added twice",
        "models/layers/norm.py",
        "return local(self.weight), self.eps, self.offset, self.rounds_once",
        "return local(self.weight), self.eps, 2 * self.offset, self.rounds_once",
        (f"{PARITY}[gemma3_text-0]",),
    ),
    Mutant(
        "a feed-forward network without a gate gates its input with itself",
        "models/layers/feed_forward.py",
        "self.w2(self.act(up), lora_mapping)",
        "self.w2(gated_activation(self.act, up, up), lora_mapping)",
        (f"{PARITY}[arcee-0]",),
    ),
    Mutant(
        "squared ReLU keeps its input and its ReLU",
        "archon/engine/memory/activations.py",
        "inner, saved=not squared, is_op=True)",
        "inner, is_op=True)",
        ("tests/tools/planner/test_memory.py::test_memory_is_that_of_a_traced_step[squared-d2-none-rank0-1x4096]",),
    ),
    Mutant(
        "a layer norm without its bias",
        "models/layers/norm.py",
        "local(self.weight), bias, self.eps)",
        "local(self.weight), None if bias is None else 0 * bias, self.eps)",
        (f"{PARITY}[starcoder2-0]",),
    ),
    Mutant(
        "the gradient of a layer norm's bias is of a rank's own tokens",
        "models/layers/norm.py",
        "else local(self.bias)",
        "else getattr(self.bias, '_local_tensor', self.bias)",
        (f"{FURTHER_MATRIX}[layer_norms-t2-float64]",),
    ),
    Mutant(
        "the network of a parallel block reads the sum of input and attention",
        "models/base.py",
        "normed = normed if self.is_parallel else _normed(self.ffn_norm, x)",
        "normed = _normed(self.attention_norm, x) if self.is_parallel else _normed(self.ffn_norm, x)",
        (f"{PARITY}[cohere2-0]",),
    ),
    Mutant(
        "full attention of Cohere 2 has positions",
        "models/cohere2.py",
        "return [window is not None for window",
        "return [True for window",
        (f"{PARITY}[cohere2-0]", f"{PARITY}[cohere2-1]", f"{PARITY}[cohere2-2]"),
    ),
    Mutant(
        "every layer has the RoPE base of the first layer",
        "models/granite_swa.py",
        "theta=self.layer_thetas[layer]",
        "theta=self.layer_thetas[0]",
        (f"{PARITY}[granite_swa-0]", f"{PARITY}[granite_swa-1]", f"{PARITY}[granite_swa-2]"),
    ),
    Mutant(
        "the float64 reference computes softmax in float32",
        "archon/tools/check/oracle.py",
        "torch.float64 if arg is torch.float32 else arg for name",
        "arg for name",
        (f"{PARITY}[granite_swa-16]", "tests/models/test_parity.py::test_in_float64_too"),
    ),
    Mutant(
        "the groups of DeepSeek-V2 are chosen by the sum of their two best experts",
        "models/deepseek_v2.py",
        "normalize=False, group_best=1)",
        "normalize=False)",
        (f"{PARITY}[deepseek_v2-0]", f"{PARITY}[deepseek_v2-1]", f"{PARITY}[deepseek_v2-13]"),
    ),
    Mutant(
        "dense layers of mlp_layer_types after the first layer with experts have experts too",
        "models/args/moe.py",
        '"mlp_only_layers": later_dense}',
        '"mlp_only_layers": ()}',
        (f"{PARITY}[hy_v3-15]",),
    ),
)
