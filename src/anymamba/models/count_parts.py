"""The parts of a model in the order of the computation, and what a token costs in each."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import nn

from anymamba.models.encoder import Encoder
from anymamba.models.latent import LatentModel
from anymamba.models.lm import MambaLM
from anymamba.nn import MHA, BidirectionalStack, GatedMLP, Stack, flops_per_token, state_bytes

__all__ = ["Part", "parts_of"]


class Part(NamedTuple):
    """A module with a kind, the bytes of its state, the FLOP of a token and its passes.

    State and FLOP are those of all passes.
    """

    name: str
    kind: str
    module: nn.Module
    state: int = 0
    flops: int = 0
    passes: int = 1


def parts_of(model: MambaLM | LatentModel | Encoder, length: int) -> Iterator[Part]:
    """Yield every part of a model; `length` as in `count_model`."""
    if isinstance(model, MambaLM):
        yield Part("backbone.embedding", "embedding", model.backbone.embedding)
        yield from _causal("backbone", model.backbone, length)
        flops = 2 * model.config.d_model * model.config.padded_vocab_size
        yield Part("lm_head", "head", model.lm_head, flops=flops)
        return
    if isinstance(model, LatentModel):
        yield Part("in_proj", "projection", model.in_proj, flops=_linear(model.in_proj))
        reads_once = model.config.readout != "each"
    else:
        yield Part("embedding", "embedding", model.embedding)
        reads_once = model.config.head == "pooled"
    if isinstance(model.stack, Stack):
        yield from _causal("stack", model.stack, length)
    else:
        yield from _paired("stack", model.stack, length)
    if isinstance(model, Encoder) and model.config.head == "masked":
        weight = model.embedding.weight
        yield Part("embedding (as head)", "head", model.embedding, flops=2 * weight.numel())
    elif "head" in model._modules:
        flops = _linear(model.head)
        yield Part("head", "head", model.head, flops=-(-flops // length) if reads_once else flops)


def _causal(name: str, stack: Stack, length: int) -> Iterator[Part]:
    passes = Counter(stack.schedule)
    yield from _registers(name, stack)
    rows: Any = stack._modules.get("layer_registers", {})
    for place, layer in enumerate(cast("list[Any]", stack.layers)):
        if str(place) in rows:
            yield Part(f"{name}.layer_registers.{place}", "registers", rows[str(place)])
        # Virtual layers share weights, but each pass has a state of its own and costs as much.
        many = passes[place]
        own = f"{name}.layers.{place}"
        yield Part(f"{own}.norm", "norm", layer.norm, passes=many)
        yield _mixer(f"{own}.mixer", layer.mixer, many, length)
        if layer.has_mlp:
            yield from _mlp(own, layer, many)
    yield from _top(name, stack)


def _paired(name: str, stack: BidirectionalStack, length: int) -> Iterator[Part]:
    passes = Counter(stack.stack_config.schedule)
    yield from _registers(name, stack)
    for place, layer in enumerate(cast("list[Any]", stack.layers)):
        own = f"{name}.layers.{place}"
        yield Part(f"{own}.norm", "norm", layer.norm, passes=passes[place])
        mixer = _mixer(f"{own}.mixer", layer.mixer, passes[place], length)
        yield mixer._replace(state=0)
    passes = Counter(stack.stack_config.pairs)
    for place, pair in enumerate(cast("list[Any]", stack.pairs)):
        own, many = f"{name}.pairs.{place}", passes[place]
        if "merge" in pair._modules:
            flops = many * _linear(pair.merge)
            yield Part(f"{own}.merge", "merge", pair.merge, flops=flops, passes=many)
        if "mlp" in pair._modules:
            yield from _mlp(own, pair, many)
    yield from _top(name, stack)


def _registers(name: str, stack: nn.Module) -> Iterator[Part]:
    if "registers" in stack._modules:
        yield Part(f"{name}.registers", "registers", cast("nn.Module", stack.registers))


def _mlp(name: str, layer: Any, passes: int) -> Iterator[Part]:
    yield Part(f"{name}.norm2", "norm", layer.norm2, passes=passes)
    mlp = layer.mlp
    flops = passes * _linear(mlp.fc1, mlp.fc2) if isinstance(mlp, GatedMLP) else 0
    yield Part(f"{name}.mlp", type(mlp).__name__, mlp, flops=flops, passes=passes)


def _top(name: str, stack: Any) -> Iterator[Part]:
    passes = Counter(stack.stack_config.gate_names)
    for place, gates in stack._modules.get("gates", {}).items():
        yield Part(f"{name}.gates.{place}", "gates", gates, passes=passes[place])
    if "norm_f" in stack._modules:
        yield Part(f"{name}.norm_f", "norm", stack.norm_f)


def _mixer(name: str, mixer: Any, passes: int, length: int) -> Part:
    state, flops = state_bytes(mixer), 0
    if isinstance(mixer, MHA):
        entry = mixer.empty_cache(1, device="meta").k_bhst.element_size()
        state += 2 * mixer.num_heads_kv * mixer.head_dim * length * entry
        convolution = 2 * mixer.d_conv * mixer.qkv_dim
        # Scores and sums, two FLOP each per entry of a head; a token sees (length + 1) / 2 on
        # average.
        scores = 2 * mixer.num_heads * mixer.head_dim * (length + 1)
        flops = _linear(mixer.in_proj, mixer.out_proj) + convolution + scores
    else:
        flops = flops_per_token(mixer)
    return Part(name, type(mixer).__name__, mixer, passes * state, passes * flops, passes)


def _linear(*modules: Any) -> int:
    return sum(2 * x.in_features * x.out_features for x in modules)
