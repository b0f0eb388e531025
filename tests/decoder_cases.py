"""The models that the tests of the decoder visit: every option that it reads, all tiny and odd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import ModelCache, QuantizedLinear
from laws import assert_same

# Sets that multiply bytes.
BYTES = ("native-avx512_vnni", "native-avx512_bf16")
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


def model(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> MambaLM:
    """Return a model whose parameters differ from their neat initial values."""
    torch.manual_seed(0)
    sizes = {"d_model": 12, "n_layer": 2, "vocab_size": VOCABULARY}
    lm = MambaLM(MambaConfig(**(sizes | (MODELS | HYBRIDS)[name] | options)), dtype=dtype)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return lm.requires_grad_(False)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Return token ids."""
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def used_cache(lm: MambaLM, rows: int) -> ModelCache:
    """Return a state with a past, computed by the portable code."""
    with torch.no_grad():
        return lm.prefill(tokens(rows, 5, seed=2), impl="portable").cache


def _rounded(x: Tensor, largest: int, columns: int) -> Tensor:
    """Return activations as integers up to `largest`, with a scale for so many columns."""
    blocks = F.pad(x, (0, -x.shape[-1] % columns)).unflatten(-1, (-1, columns))
    top = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((blocks * (largest / top)).round() * (top / largest)).flatten(-2)[..., : x.shape[-1]]


def round_activations(monkeypatch: Any, scheme: str, kind: str) -> float:
    """Give the modules of integer weights the activations that the decoder gives them.

    Returns the error that is left: sums in another order put some activations on the other side of
    a half, one step in one entry of a block.
    """
    has_bytes = kind in BYTES
    largest = 127 if scheme == "int4" or has_bytes else 32767
    columns = 128 if scheme == "int4" and has_bytes else 32
    exact = QuantizedLinear.forward
    monkeypatch.setattr(
        QuantizedLinear, "forward", lambda m, x: exact(m, _rounded(x, largest, columns))
    )
    return 1e-2 if largest == 127 else 1e-3


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
