"""The blocks that the tests of `nn` visit: every family, rotation, rank and pathway, all tiny."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.nn import Mamba, Mamba2, Mamba3

WIDTH = 8

# Each option that changes what is computed appears in at least one row. Quaternion states have two
# blocks: an axis of size 1 has a stride that means nothing, but the compiler guards on it.
CASES: dict[str, Callable[..., Any]] = {
    "mamba1": lambda **extra: Mamba(WIDTH, d_state=4, bias=True, **extra),
    "mamba1_normed": lambda **extra: Mamba(
        WIDTH, d_state=4, dt_rank=3, bcdt_rms_eps=1e-6, conv_bias=False, **extra
    ),
    "mamba2": lambda **extra: Mamba2(WIDTH, d_state=4, headdim=4, ngroups=2, **extra),
    "mamba2_mlp": lambda **extra: Mamba2(
        WIDTH,
        d_state=4,
        headdim=4,
        d_ssm=8,
        D_has_hdim=True,
        norm_before_gate=True,
        dt_limit=(0.002, 0.08),
        learnable_init_state=True,
        chunk_size=16,
        **extra,
    ),
    "mamba3": lambda **extra: Mamba3(WIDTH, d_state=8, headdim=4, ngroups=2, **extra),
    "mamba3_quaternion": lambda **extra: Mamba3(
        WIDTH,
        d_state=8,
        headdim=4,
        rotation="quaternion",
        rotation_range=0.5,
        rope_fraction=1.0,
        **extra,
    ),
    "mamba3_double": lambda **extra: Mamba3(
        WIDTH,
        d_state=8,
        headdim=4,
        pathway="double",
        rope_fraction=1.0,
        a_activation="softplus",
        dt_limit=(0.002, 0.08),
        learnable_init_state=True,
        bias=True,
        **extra,
    ),
    "mamba3_mimo": lambda **extra: Mamba3(
        WIDTH, d_state=8, headdim=4, is_mimo=True, mimo_rank=2, is_outproj_norm=True, **extra
    ),
    "mamba3_mimo_quaternion": lambda **extra: Mamba3(
        WIDTH,
        d_state=16,
        headdim=4,
        is_mimo=True,
        mimo_rank=2,
        rotation="quaternion",
        pathway="double",
        chunk_size=16,
        **extra,
    ),
    "mamba3_unrotated": lambda **extra: Mamba3(
        WIDTH, d_state=8, headdim=4, rope_fraction=0.0, is_outproj_norm=True, **extra
    ),
}


def build(case: str, **extra: Any) -> Any:
    """Return the block of a case with parameters that differ from their neat initial values."""
    torch.manual_seed(0)
    block = CASES[case](**extra)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return inputs of the tests' width that require a gradient."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=random).to(dtype).requires_grad_()


def used_cache(block: Any, batch: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a state with a past: no field of it is zero, and a rotation is a rotation."""
    with torch.no_grad():
        return block.prefill(tokens(batch, 5, seed=2, dtype=dtype).detach())[1]


def parameters_of(block: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name."""
    return dict(block.named_parameters())
