"""The models that the tests of the decoder visit: every option that it reads, all tiny and odd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import Mamba, ModelCache, QuantizedLinear
from laws import assert_same

# Sets that multiply bytes.
BYTES = ("native-avx512_vnni", "native-avx512_bf16")
# Sets that multiply bfloat16: activations are rounded to it.
PAIRS = ("native-avx512_bf16",)
VOCABULARY = 37
MAMBA2 = {"layer": "Mamba2", "d_state": 20, "headdim": 6}
MAMBA3 = {"layer": "Mamba3", "d_state": 20, "headdim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"ssm_cfg": {"d_state": 5}},
    "mamba1 normed": {"ssm_cfg": {"bcdt_rms_eps": 1e-6, "d_conv": 3, "bias": True, "dt_rank": 3}},
    "layer norm untied": {"rms_norm": False, "tie_embeddings": False},
    "mamba2": {"ssm_cfg": MAMBA2 | {"ngroups": 2}},
    "mamba2 around": {
        "ssm_cfg": MAMBA2 | {"d_ssm": 12, "D_has_hdim": True, "norm_before_gate": True},
        "d_intermediate": 40,
    },
    "mamba2 bare": {
        "ssm_cfg": MAMBA2 | {"rmsnorm": False, "bias": True, "conv_bias": False,
                             "dt_limit": (0.01, 0.2), "d_conv": 2},
    },
    "mamba3": {"ssm_cfg": MAMBA3 | {"ngroups": 2}, "d_intermediate": 40},
    "mamba3 whole softplus": {
        "ssm_cfg": MAMBA3 | {"rope_fraction": 1.0, "a_activation": "softplus", "bias": True,
                             "is_outproj_norm": True, "dt_limit": (0.01, 0.2)},
    },
    "mamba3 unrotated": {"ssm_cfg": MAMBA3 | {"rope_fraction": 0.0, "pathway": "double"}},
    "mamba3 rank 2": {"ssm_cfg": MAMBA3 | {"is_mimo": True, "mimo_rank": 2}},
    "mamba3 rank 3": {"ssm_cfg": MAMBA3 | {"is_mimo": True, "mimo_rank": 3, "ngroups": 2}},
    "mamba3 rank 4 normed": {
        "ssm_cfg": MAMBA3 | {"is_mimo": True, "mimo_rank": 4, "is_outproj_norm": True},
    },
    "mamba3 quaternion": {
        "ssm_cfg": MAMBA3 | {"rotation": "quaternion", "rope_fraction": 1.0, "rotation_range": 2.0,
                             "learnable_init_state": True},
    },
    "mamba3 quaternion still": {
        "ssm_cfg": MAMBA3 | {"rotation": "quaternion", "rope_fraction": 0.0},
    },
}  # fmt: skip

# Keys and values of attention grow, so these decode by `advance`, not by `step_`.
HYBRIDS: dict[str, dict[str, Any]] = {
    "turned halves": {
        "attn_layer_idx": [1],
        "attn_cfg": {"causal": True, "num_heads": 2, "num_heads_kv": 1, "rotary_emb_dim": 4},
    },
    "turned neighbours": {
        "ssm_cfg": MAMBA3 | {"is_mimo": True, "mimo_rank": 2},
        "n_layer": 3,
        "attn_layer_idx": [0, 2],
        "attn_cfg": {"causal": True, "num_heads": 3, "head_dim": 20, "rotary_emb_dim": 20,
                     "rotary_emb_interleaved": True, "rotary_emb_base": 50.0,
                     "qkv_proj_bias": False, "out_proj_bias": False},
        "d_intermediate": 40,
    },
    "convolved, with an MLP beside": {
        "ssm_cfg": MAMBA2,
        "attn_layer_idx": [0],
        "attn_cfg": {"causal": True, "num_heads": 4, "num_heads_kv": 2, "head_dim": 5, "d_conv": 3,
                     "mlp_dim": 20, "softmax_scale": 0.7, "out_proj_bias": False},
    },
    "attention alone": {
        "attn_layer_idx": [0, 1],
        "attn_cfg": {"causal": True, "num_heads": 1, "head_dim": 72, "rotary_emb_dim": 64,
                     "d_conv": 4},
    },
}  # fmt: skip


def model(
    name: str, dtype: torch.dtype = torch.float32, *, noise: float = 0.2, **options: Any
) -> MambaLM:
    """Return a model whose parameters differ from their neat initial values by some noise."""
    torch.manual_seed(0)
    sizes = {"d_model": 12, "n_layer": 2, "vocab_size": VOCABULARY}
    lm = MambaLM(MambaConfig(**(sizes | (MODELS | HYBRIDS)[name] | options)), dtype=dtype)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return lm.requires_grad_(False)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Return token ids."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def used_cache(lm: MambaLM, rows: int) -> ModelCache:
    """Return a state with a past, computed by the portable code."""
    with torch.no_grad():
        return lm.prefill(tokens(rows, 5, seed=2), impl="portable").cache


def state_fields(cache: ModelCache) -> dict[str, Tensor]:
    """Return the tensors of a cache; angles as what they mean, which has no seam at a half turn."""
    found = {}
    for name, tensor in cache.to_tensors().items():
        if "angle" in name:
            found[f"{name} cos"], found[f"{name} sin"] = tensor.cos(), tensor.sin()
        else:
            found[name] = tensor
    return found


def assert_near(want: Tensor, got: Tensor, limit: float, name: str = "logits") -> None:
    """Assert an error of at most `limit` of the largest entry, besides that of storing it.

    Half types round an entry by half an eps of its own size.
    """
    expected, actual = want.double(), got.double()
    stored = torch.finfo(got.dtype).eps / 2
    error = ((actual - expected).abs() - stored * expected.abs()).max() / expected.abs().max()
    assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g}"


def assert_near_states(want: ModelCache, got: ModelCache, limit: float) -> None:
    """Assert that every field of a state is near, and that positions are equal."""
    fields = state_fields(want)
    assert fields.keys() == state_fields(got).keys()
    for name, actual in state_fields(got).items():
        if actual.is_floating_point():
            assert_near(fields[name], actual, limit, name)
        else:
            assert torch.equal(fields[name], actual), name


def round_inputs(lm: MambaLM, dtype: torch.dtype) -> None:
    """Round what meets a matrix; the decoder has the step size's small projection in float32."""
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("dt_proj"):
            module.register_forward_pre_hook(lambda _, args: (args[0].to(dtype).to(args[0]),))


def round_windows(lm: MambaLM, dtype: torch.dtype) -> None:
    """Round what enters the windows of Mamba-1, from which the convolution reads it."""

    def rounded(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        x, z = out.chunk(2, -1)
        return torch.cat([x.to(dtype).to(x), z], -1)

    for layer in lm.backbone.layers:
        if isinstance(layer.mixer, Mamba):
            layer.mixer.in_proj.register_forward_hook(rounded)


def _rounded(x: Tensor, largest: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return activations as integers up to `largest`, with a scale for so many columns.

    And how far the nearest of each row was from a half, in steps.
    """
    blocks = F.pad(x, (0, -x.shape[-1] % columns)).unflatten(-1, (-1, columns))
    top = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    steps = blocks * (largest / top)
    margin_b = (steps - steps.floor() - 0.5).abs().reshape(len(x), -1).amin(1)
    return (steps.round() * (top / largest)).flatten(-2)[..., : x.shape[-1]], margin_b


def round_activations(monkeypatch: Any, scheme: str, kind: str, margins: list[Tensor]) -> float:
    """Give the modules of integer weights the activations that the decoder gives them.

    Sums in another order put an activation off by some 1e-7, and now and then on the other side of
    a half. That moves all that follow a little, some of them over a half too, and ends at what
    rounding costs at all: of 15 bits 6e-4 at most in twenty seeds of two layers and four tokens, of
    7 bits 1e-2. Few rows meet a half of 7 bits, and tests keep to the others: 1e-5 is left there,
    as of float32.

    Args:
        monkeypatch: undoes it.
        scheme: of the weights.
        kind: whose activations.
        margins: takes, of every product, how far each row stayed from a half; the rows of
            `clearest` are to be compared.

    Returns:
        The error that is left.
    """
    has_bytes = kind in BYTES
    largest = 127 if scheme == "int4" or has_bytes else 32767
    columns = 128 if scheme == "int4" and has_bytes else 32
    exact = QuantizedLinear.forward

    def forward(layer: QuantizedLinear, x: Tensor) -> Tensor:
        rounded, margin_b = _rounded(x, largest, columns)
        margins.append(margin_b)
        return exact(layer, rounded)

    monkeypatch.setattr(QuantizedLinear, "forward", forward)
    return 1e-3 if largest == 32767 else 1e-5


def clearest(margins: list[Tensor], count: int) -> list[int]:
    """Return the rows that stayed furthest from a half, in all products.

    Activations that changed sides were up to 5e-5 of a step of 7 bits away from a half. The best 9
    of 128 rows of 3000 activations keep 4e-4, whatever the machine: it is the numbers at hand that
    choose them.
    """
    return torch.stack(margins).amin(0).topk(count).indices.tolist()


def assert_current(lm: MambaLM) -> None:
    """Assert that the decoder computes with the weights that the model has now.

    No prompt is read, after which the decoder would look more closely.
    """
    ids_b = tokens(2)
    with torch.no_grad():
        cache = lm.step(ids_b, lm.empty_cache(2), impl="portable").cache
        want = lm.step(ids_b, cache, impl="portable").logits
    assert_same(want, lm.step_(ids_b, cache, impl="native"))


def run_once(lm: MambaLM) -> MambaLM:
    """Return the model after a token of the decoder, which has compiled it then."""
    lm.step_(tokens(2), used_cache(lm, 2), impl="native")
    return lm


def merge_lora(lm: MambaLM, projection: str = "in_proj") -> None:
    """Add an adapter of rank 2 to a projection, in place."""
    weight = getattr(lm.backbone.layers[1].mixer, projection).weight
    with torch.no_grad():
        weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
