"""Pseudo-code of a model's blocks, generated from its layer specs: one line per operation, with shapes.

The text after `#` names every parameter of a block once: `wq: 1024 -> 2048 + bias` is a linear layer, `q_norm: [128]` a
parameter or the weight of a module. Names are relative to their section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from archon.models import BaseModelArgs
from archon.models.base import TransformerBlock
from archon.models.layers.attention import AttentionLayer
from archon.models.layers.delta_net import DeltaNetLayer
from archon.models.layers.feed_forward import ClampedSwiGLU, DenseLayer
from archon.models.layers.latent_attention import LatentLayer
from archon.models.layers.mamba import MambaLayer
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import RopeSpec
from archon.models.layers.spec import FeedForwardSpec, LayerSpec, MixerSpec, NoFeedForward, NoMixer

CODE_WIDTH = 52


def describe_blocks(args: BaseModelArgs) -> list[str]:
    """Return pseudo-code of embeddings, each kind of block, and head; T is the number of tokens.

    Args:
        args: arguments of the model; layers with equal specs share one description.
    """
    kinds: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(args.layer_specs):
        kinds.setdefault(spec, []).append(layer)
    lines = _embeddings(args)
    for spec, layers in kinds.items():
        parts = filter(None, (_mixer_kind(spec.mixer), _network_kind(spec.feed_forward)))
        lines += ["", f"{_ranges(layers)}: {'; '.join(parts)}"]
        lines += _block(args, layers[0], spec)
    return [*lines, "", *_head(args)]


class _Section:
    """Lines of one module, and its tensors that are not named yet.

    Attributes:
        shapes: shape of each unnamed parameter and buffer.
    """

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], indent: str = "  ") -> None:
        self.shapes, self.indent = dict(tensors), indent
        self.lines: list[str] = []

    def add(self, code: str, *notes: str, names: Sequence[str] = ()) -> None:
        """Add a line; absent tensors of `names` are skipped, so callers may list optional ones."""
        notes = (*notes, *filter(None, map(self.name, names)))
        text = f"{self.indent}{code}".ljust(CODE_WIDTH) + (f"  # {', '.join(notes)}" if notes else "")
        self.lines.append(text.rstrip())

    def has(self, name: str) -> bool:
        """Return whether the module has this parameter, or a submodule with a weight of this name."""
        return name in self.shapes or f"{name}.weight" in self.shapes

    def name(self, name: str) -> str:
        """Return name and shape of a tensor or linear layer, and mark it as named; empty if absent."""
        bias = self.shapes.pop(f"{name}.bias", None)
        weight = self.shapes.pop(f"{name}.weight", None)
        shape = weight or self.shapes.pop(name, None)
        if shape is None:
            return ""
        size = f"{shape[1]} -> {shape[0]}" if weight is not None and len(weight) == 2 else f"{[*shape]}"
        return f"{name}: {size}" + (" + bias" if bias else "")

    def finish(self) -> list[str]:
        """Return the lines; a last line lists the unnamed tensors."""
        if self.shapes:
            self.add("...", *(f"{name}: {[*shape]}" for name, shape in self.shapes.items()))
        return self.lines


def _tensors(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in (*module.named_parameters(), *module.named_buffers())}


def _block(args: BaseModelArgs, layer: int, spec: LayerSpec) -> list[str]:
    with torch.device("meta"):
        block = TransformerBlock(layer, spec, args.dim)
    mixer, network = spec.mixer.module_name, spec.feed_forward.module_name
    tensors = _tensors(block)
    inner = {
        name: {key.removeprefix(f"{name}."): shape for key, shape in tensors.items() if key.startswith(f"{name}.")}
        for name in (mixer, network)
    }
    outer = _Section({key: s for key, s in tensors.items() if key.partition(".")[0] not in inner})
    parts: tuple[tuple[str, str, Callable[..., None], Any], ...] = (
        (mixer, "attention", _describe_mixer, spec.mixer),
        (network, "ffn", _describe_network, spec.feed_forward),
    )
    factor = "" if spec.residual_multiplier == 1 else f"{spec.residual_multiplier:g} * "
    for name, norm, describe, part in parts:
        if not name:  # an absent mixer or network
            continue
        # A parallel block has one norm, which feeds both parts.
        source, normed = ("n", "n") if spec.norm_placement == "parallel" else ("x", "h")
        norm_name = "attention_norm" if normed == "n" else f"{norm}_norm"
        if outer.has(norm_name):
            outer.add(f"{normed} = {norm_name}(x)", _norm(spec.norm), names=[norm_name])
            source = normed
        section = _Section(inner[name], "    ")
        describe(section, part, source, args.dim)
        outer.lines += [f"  {name}:", *section.finish()]
        if outer.has(f"{norm}_post_norm"):
            outer.add(f"h = {norm}_post_norm(h)", _norm(spec.norm), names=[f"{norm}_post_norm"])
        outer.add(f"x = x + {factor}h", f"[T, {args.dim}]")
    return outer.finish()


def _describe_mixer(section: _Section, spec: MixerSpec, x: str, dim: int) -> None:
    if isinstance(spec, AttentionLayer):
        _attention(section, spec, x, dim)
    elif isinstance(spec, LatentLayer):
        _latent_attention(section, spec, x, dim)
    elif isinstance(spec, DeltaNetLayer):
        _delta_net(section, spec, x, dim)
    elif isinstance(spec, MambaLayer):
        _mamba(section, spec, x, dim)
    else:
        section.add(f"h = {type(spec).__name__}({x})", f"[T, {dim}]")


def _attention(section: _Section, spec: AttentionLayer, x: str, dim: int) -> None:
    heads, kv_heads, features = spec.n_heads, spec.n_kv_heads, spec.head_dim
    _add_rope(section, spec.rope, features)
    if spec.gated:
        section.add(f"q, gate = split(wq({x}))", f"each [T, {heads}, {features}]", names=["wq"])
    for part, count in (("q", heads), ("k", kv_heads)):
        code = part if part == "q" and spec.gated else f"w{part}({x})"
        notes = [f"[T, {count}, {features}]"]
        if spec.qk_norm is not None:
            code = f"{part}_norm({code})"
            notes.append(f"RMS norm over {'all heads' if spec.full_width_qk_norm else 'each head'}")
        code = code if spec.rope is None else f"rope({code})"
        section.add(f"{part} = {code}", *notes, names=[f"w{part}", f"{part}_norm"])
    section.add(f"v = wv({x})", f"[T, {kv_heads}, {features}]", names=["wv"])
    _add_query_scale(section, spec.rope)
    scale = features**-0.5 if spec.scale is None else spec.scale
    scores = f"{scale:.4g} * q @ k.T"
    if spec.soft_cap is not None:
        scores = f"{spec.soft_cap:g} * tanh({scores} / {spec.soft_cap:g})"
    sinks = ", sinks" if spec.sinks else ""
    notes = [f"[T, {heads}, {features}]", _mask(spec.window)]
    section.add(f"h = softmax({scores}{sinks}) @ v", *notes, names=["sinks"])
    if spec.gated:
        section.add("h = h * sigmoid(gate)", f"[T, {heads}, {features}]")
    section.add("h = wo(h)", f"[T, {dim}]", names=["wo"])


def _latent_attention(section: _Section, spec: LatentLayer, x: str, dim: int) -> None:
    heads, rotated = spec.n_heads, spec.rope.dim
    _add_rope(section, spec.rope, rotated)
    query = x
    if spec.q_rank:
        section.add(f"q_latent = q_a_norm(wq_a({x}))", f"[T, {spec.q_rank}]", names=["wq_a", "q_a_norm"])
        query = "q_latent"
    project = "wq_b" if spec.q_rank else "wq"
    section.add(
        f"q, q_rot = split({project}({query}))", f"[T, {heads}, {spec.key_features} + {rotated}]", names=[project]
    )
    section.add(f"latent, k_rot = split(wkv_a({x}))", f"[T, {spec.kv_rank} + {rotated}]", names=["wkv_a"])
    expanded = f"[T, {heads}, {spec.key_features} + {spec.value_features}]"
    section.add("k, v = split(wkv_b(kv_a_norm(latent)))", expanded, names=["kv_a_norm", "wkv_b"])
    section.add("q, k = cat(q, rope(q_rot)), cat(k, rope(k_rot))", f"[T, {heads}, {spec.q_features}]")
    _add_query_scale(section, spec.rope)
    notes = [f"[T, {heads}, {spec.value_features}]", _mask(spec.window)]
    section.add(f"h = softmax({spec.scale:.4g} * q @ k.T) @ v", *notes)
    section.add("h = wo(h)", f"[T, {dim}]", names=["wo"])


def _delta_net(section: _Section, spec: DeltaNetLayer, x: str, dim: int) -> None:
    for part in "qkv":
        heads, features = (spec.n_heads, spec.value_dim) if part == "v" else (spec.n_key_heads, spec.key_dim)
        shape = f"[T, {heads}, {features}]"
        code = f"{part} = {spec.hidden_act}({part}_conv(w{part}({x})))"
        section.add(code, shape, names=[f"w{part}", f"{part}_conv"])
    names = ["wa", "decay.A_log", "decay.dt_bias"]
    section.add(f"g = -exp(A_log) * softplus(wa({x}) + dt_bias)", f"[T, {spec.n_heads}], log decay", names=names)
    section.add(f"beta = sigmoid(wb({x}))", f"[T, {spec.n_heads}]", names=["wb"])
    values = f"[T, {spec.n_heads}, {spec.value_dim}]"
    state = f"state [{spec.n_heads}, {spec.key_dim}, {spec.value_dim}]"
    section.add("h = gated_delta_rule(q, k, v, g, beta)", values, state)
    section.add(f"h = norm(h) * silu(wz({x}))", values, names=["norm", "wz"])
    section.add("h = wo(h)", f"[T, {dim}]", names=["wo"])


def _mamba(section: _Section, spec: MambaLayer, x: str, dim: int) -> None:
    values = f"[T, {spec.n_heads}, {spec.head_dim}]"
    for part, name in (("x", "x"), ("B", "b"), ("C", "c")):
        shape = values if part == "x" else f"[T, {spec.n_groups}, {spec.state_dim}]"
        names = [f"w{name}", f"{name}_conv"]
        section.add(f"{part} = {spec.hidden_act}({name}_conv(w{name}({x})))", shape, names=names)
    low, high = spec.dt_limits
    dt = f"softplus(wdt({x}) + dt_bias)"
    dt = dt if (low, high) == (0, float("inf")) else f"clamp({dt}, {low:g}, {high:g})"
    section.add(f"dt = {dt}", f"[T, {spec.n_heads}], step size", names=["wdt", "step.dt_bias"])
    state = f"state [{spec.n_heads}, {spec.state_dim}, {spec.head_dim}]"
    section.add(
        "h = state_space_scan(x, B, C, -exp(A_log) * dt, dt) + D * x", values, state, names=["step.A_log", "step.D"]
    )
    group = "all heads" if spec.n_groups == 1 else f"each of {spec.n_groups} groups of heads"
    section.add(f"h = norm(h * silu(wz({x})))", values, f"RMS norm over {group}", names=["norm", "wz"])
    section.add("h = wo(h)", f"[T, {dim}]", names=["wo"])


def _describe_network(section: _Section, spec: FeedForwardSpec, x: str, dim: int) -> None:
    if isinstance(spec, DenseLayer):
        gated = _gated(spec.hidden_act, f"w1({x})", f"w3({x})")
        code = gated if spec.is_gated else f"{spec.hidden_act}(w3({x}))"
        section.add(f"h = w2({code})", f"[T, {dim}]", names=["w1", "w3", "w2"])
        return
    if not isinstance(spec, ExpertsLayer):
        section.add(f"h = {type(spec).__name__}({x})", f"[T, {dim}]")
        return
    score = "softmax" if spec.score == "softmax" else spec.score
    dtype = ["float32 logits"] if spec.fp32_logits else []
    section.add(f"s = {score}(router.gate({x}))", f"[T, {spec.n_experts}]", *dtype, names=["router.gate"])
    ranked = "s + router.expert_bias" if section.has("router.expert_bias") else "s"
    groups = [f"within the best {spec.top_groups} of {spec.n_groups} groups"] if spec.n_groups > 1 else []
    section.add(f"e = topk({ranked}, {spec.top_k})", f"[T, {spec.top_k}]", *groups, names=["router.expert_bias"])
    weights = "s[e] / sum(s[e])" if spec.normalize else "s[e]"
    section.add(f"w = {weights}" + ("" if spec.scale == 1 else f" * {spec.scale:g}"), f"[T, {spec.top_k}]")
    hidden = f"[T, {spec.top_k}, {spec.hidden_dim}]"
    rows = x
    if spec.latent_dim:
        rows = "c"
        section.add(f"c = latent_in({x})", f"[T, {spec.latent_dim}]", names=["latent_in"])
    for name, matrix in (("gate", "1"), ("up", "3")) if spec.is_gated else (("up", "3"),):
        bias = f" + b{matrix}[e]" if spec.expert_biases else ""
        tensors = [f"experts.w{matrix}", f"experts.b{matrix}"]
        section.add(f"{name} = w{matrix}[e]({rows}){bias}", hidden, names=tensors)
    code = f"w2[e]({_gated(spec.hidden_act, 'gate', 'up') if spec.is_gated else f'{spec.hidden_act}(up)'})"
    code = f"({code} + b2[e])" if spec.expert_biases else code
    out = "y" if spec.shared_hidden_dim else "h"
    code = f"latent_out(sum(w * {code}))" if spec.latent_dim else f"sum(w * {code})"
    section.add(f"{out} = {code}", f"[T, {dim}]", names=["experts.w2", "experts.b2", "latent_out"])
    if spec.shared_hidden_dim:
        names = [f"shared_experts.{name}" for name in ("w1", "w3", "w2")]
        code = _gated(spec.hidden_act, f"w1({x})", f"w3({x})") if spec.is_gated else f"{spec.hidden_act}(w3({x}))"
        section.add(f"shared = w2({code})", f"[T, {dim}], shared experts", names=names)
        gate = f"sigmoid(shared_gate({x})) * " if spec.shared_gate else ""
        section.add(f"h = y + {gate}shared", f"[T, {dim}]", names=["shared_gate"])


def _gated(act: str | ClampedSwiGLU, gate: str, up: str) -> str:
    if isinstance(act, ClampedSwiGLU):
        return f"clamped_swiglu({gate}, {up}, alpha={act.alpha:g}, limit={act.limit:g})"
    return f"{act}({gate}) * {up}"


def _norm(spec: NormSpec) -> str:
    if spec.centered:
        return f"layer norm, eps {spec.eps:g}"
    return f"RMS norm, eps {spec.eps:g}" + (f", factor {spec.offset:g} + weight" if spec.offset else "")


def _mask(window: int | None) -> str:
    return "causal" if window is None else f"causal, sliding window {window}"


def _add_rope(section: _Section, rope: RopeSpec | None, features: int) -> None:
    """Add a line with the parameters of RoPE; none for a layer without positions."""
    if rope is None:
        return
    scaling = vars(rope.scaling).items()
    # LongRoPE's lists of divisors are too long for a line.
    settings = [f"{name} {value:g}" for name, value in scaling if type(value) in (int, float)]
    notes = [f"rotates {rope.dim} of {features} features"] if rope.dim != features else []
    notes += ["adjacent pairs"] if rope.interleaved else []
    notes += [f"M-RoPE sections {[*rope.sections]} for time, row, column"] if rope.sections else []
    section.add(f"rope = {', '.join([rope.scaling.kind, f'theta {rope.theta:g}', *settings])}", *notes)


def _add_query_scale(section: _Section, rope: RopeSpec | None) -> None:
    if rope is not None and rope.query_beta is not None:
        section.add(f"q = q * (1 + {rope.query_beta:g} * log(1 + position // {rope.query_period}))")


def _mixer_kind(spec: MixerSpec) -> str:
    if isinstance(spec, NoMixer):
        return ""
    if isinstance(spec, DeltaNetLayer):
        return f"gated delta net ({spec.n_heads} heads)"
    if isinstance(spec, MambaLayer):
        return f"Mamba-2 ({spec.n_heads} heads)"
    kind = "latent attention" if isinstance(spec, LatentLayer) else "attention"
    width = "full" if spec.window is None else f"sliding-window ({spec.window})"
    return f"{width} {kind}" + ("" if spec.rope is not None else " without positions")


def _network_kind(spec: FeedForwardSpec) -> str:
    if isinstance(spec, NoFeedForward):
        return ""
    if not spec.n_experts:
        return "dense feed-forward"
    return f"mixture of experts ({spec.top_k} of {spec.n_experts})"


def _ranges(layers: Sequence[int]) -> str:
    """Return layer indices as "layers 0-27", "layers 0-2, 4-6", or "layers 0, 2, ..., 34" for a constant step."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if step > 1 and len(layers) > 3 and [*layers] == [*range(layers[0], layers[-1] + 1, step)]:
        return f"layers {layers[0]}, {layers[1]}, ..., {layers[-1]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"


def _embeddings(args: BaseModelArgs) -> list[str]:
    section = _Section({"tok_embeddings": (args.vocab_size, args.dim)}, "")
    factor = "" if args.embedding_multiplier == 1 else f" * {args.embedding_multiplier:.6g}"
    section.add(f"x = tok_embeddings(tokens){factor}", f"[T, {args.dim}]", names=["tok_embeddings"])
    vision = getattr(args, "vision", None)
    if vision is not None:
        size = f"{vision.depth} blocks of {vision.dim}, {vision.n_heads} heads"
        section.add("x[placeholders] = vision_encoder(images)", size, f"{vision.merge_size}^2 patches per row")
        if vision.deepstack:
            layers = _ranges(range(len(vision.deepstack)))
            section.add("", f"DeepStack: features of encoder blocks {[*vision.deepstack]} added after {layers}")
    return section.finish()


def _head(args: BaseModelArgs) -> list[str]:
    head, size = ("score", 1) if args.is_critic else ("output", args.vocab_size)
    is_tied = args.tie_word_embeddings and not args.is_critic
    norm = {"norm": (args.dim,)} | ({"norm.bias": (args.dim,)} if args.norm_bias else {})
    tensors = norm | ({} if is_tied else {f"{head}.weight": (size, args.dim)})
    section = _Section(tensors, "")
    section.add("x = norm(x)", _norm(args.norm), names=["norm"])
    if args.logits_divisor != 1 and not args.is_critic:
        section.add(f"x = x / {args.logits_divisor:g}", f"[T, {args.dim}]")
    tied = ["output.weight is tok_embeddings.weight"] if is_tied else []
    section.add(f"{'values' if args.is_critic else 'logits'} = {head}(x)", f"[T, {size}]", *tied, names=[head])
    if args.logits_soft_cap is not None and not args.is_critic:
        cap = f"{args.logits_soft_cap:g}"
        section.add(f"logits = {cap} * tanh(logits / {cap})", f"[T, {size}]")
    return section.finish()
