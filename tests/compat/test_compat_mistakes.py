"""What the functions of `anymamba.compat` refuse, and how they say it."""

import re

import pytest
import torch

from anymamba.compat import (
    Mamba2Simple,
    causal_conv1d_fn,
    causal_conv1d_update,
    layer_norm_fn,
    layernorm_fn,
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    rms_norm_fn,
    rmsnorm_fn,
    selective_scan_fn,
    selective_state_update,
)
from anymamba.errors import (
    AnyMambaError,
    ConfigError,
    DtypeError,
    PackingError,
    ShapeError,
)
from compat_inputs import (
    conv_inputs,
    inner_inputs,
    split_inputs,
    ssd_inputs,
)

ONES = {n: torch.ones(*([2] * n)) for n in range(1, 6)}
MISTAKES = {
    "u rank": (lambda: selective_scan_fn(ONES[2], *[ONES[2]] * 4), ShapeError, "3 axes"),
    "no A": (lambda: selective_scan_fn(ONES[3], ONES[3], None, ONES[2], ONES[2]), DtypeError, "A"),
    "B rank": (
        lambda: selective_scan_fn(ONES[3], ONES[3], ONES[2], ONES[1], ONES[2]),
        ShapeError,
        "B must have the axes",
    ),
    "B length": (
        lambda: selective_scan_fn(ONES[3], ONES[3], ONES[2], torch.ones(2, 2, 3), ONES[2]),
        ShapeError,
        re.escape("B must have shape (2, 2, 2)"),
    ),
    "groups": (
        lambda: selective_scan_fn(ONES[3], ONES[3], ONES[2], torch.ones(2, 3, 2, 2), ONES[2]),
        ConfigError,
        "groups of B must divide",
    ),
    "complex B": (
        lambda: selective_scan_fn(ONES[3], ONES[3], ONES[2], ONES[2] * 1j, ONES[2]),
        DtypeError,
        "A must be complex",
    ),
    "float64 mix": (
        lambda: selective_scan_fn(ONES[3].double(), ONES[3], *[ONES[2]] * 3),
        DtypeError,
        "float64",
    ),
    "checkpoint level": (
        lambda: mamba_inner_fn(**inner_inputs(), checkpoint_lvl=2),
        ConfigError,
        "checkpoint_lvl",
    ),
    "xz width": (
        lambda: mamba_inner_fn(**(inner_inputs() | {"xz": ONES[3]})),
        ShapeError,
        re.escape("(batch, 12, length)"),
    ),
    "x_proj rows": (
        lambda: mamba_inner_fn(**(inner_inputs() | {"x_proj_weight": torch.ones(7, 6)})),
        ShapeError,
        re.escape("(8, 6)"),
    ),
    "norm of given B": (
        lambda: mamba_inner_fn(**inner_inputs(), B=torch.ones(6, 3), b_rms_weight=torch.ones(3)),
        ConfigError,
        "b_rms_weight",
    ),
    "inner float64 weight": (
        lambda: mamba_inner_fn(**(inner_inputs() | {"xz": torch.ones(2, 12, 7)})),
        DtypeError,
        "accumulate",
    ),
    "chunk size": (
        lambda: mamba_chunk_scan_combined(*ssd_inputs(1, 3)[:5], 0),
        ConfigError,
        "chunk_size",
    ),
    "D rank": (
        lambda: mamba_chunk_scan_combined(*ssd_inputs(1, 3)[:5], 8, ONES[3]),
        ShapeError,
        "D_h",
    ),
    "heads and groups": (
        lambda: mamba_chunk_scan_combined(
            *ssd_inputs(1, 3)[:3], *[torch.ones(1, 3, 3, 5).double()] * 2, 8
        ),
        ConfigError,
        "must divide the heads 4; got 3",
    ),
    "labels shape": (
        lambda: mamba_chunk_scan_combined(
            *ssd_inputs(1, 3)[:5], 8, seq_idx=torch.zeros(1, 4).int()
        ),
        PackingError,
        "seq_idx must have shape",
    ),
    "labels dtype": (
        lambda: mamba_chunk_scan_combined(*ssd_inputs(1, 3)[:5], 8, seq_idx=torch.zeros(1, 3)),
        DtypeError,
        "seq_idx",
    ),
    "no borders": (
        lambda: mamba_chunk_scan_combined(*ssd_inputs(1, 3)[:5], 8, return_varlen_states=True),
        PackingError,
        "needs cu_seqlens",
    ),
    "varlen batch": (
        lambda: mamba_chunk_scan_combined(
            *ssd_inputs(2, 3)[:5], 8, cu_seqlens=torch.tensor([0, 3]), return_varlen_states=True
        ),
        PackingError,
        "batch must be 1",
    ),
    "labels against borders": (
        lambda: mamba_chunk_scan_combined(
            *ssd_inputs(1, 3)[:5],
            8,
            seq_idx=torch.tensor([[0, 1, 1]]),
            cu_seqlens=torch.tensor([0, 2, 3]),
            return_varlen_states=True,
        ),
        PackingError,
        re.escape("[1] and borders [0, 2, 3]"),
    ),
    "same label twice": (
        lambda: mamba_chunk_scan_combined(
            *ssd_inputs(1, 3)[:5],
            8,
            seq_idx=torch.zeros(1, 3).int(),
            cu_seqlens=torch.tensor([0, 2, 3]),
            return_varlen_states=True,
        ),
        PackingError,
        "exactly at the borders",
    ),
    "state dtype": (
        lambda: mamba_split_conv1d_scan_combined(
            **split_inputs(0, False), chunk_size=8, headdim=3, ngroups=2, state_dtype=torch.int32
        ),
        DtypeError,
        "state_dtype",
    ),
    "no headdim": (
        lambda: mamba_split_conv1d_scan_combined(**split_inputs(0, False), chunk_size=8),
        ConfigError,
        "headdim must be given",
    ),
    "zxbcdt width": (
        lambda: mamba_split_conv1d_scan_combined(
            **(split_inputs(0, False) | {"zxbcdt": ONES[3].double()}),
            chunk_size=8,
            headdim=3,
            ngroups=2,
        ),
        ShapeError,
        "48 or an even number more",
    ),
    "split groups": (
        lambda: mamba_split_conv1d_scan_combined(
            **split_inputs(0, False), chunk_size=8, headdim=3, ngroups=3
        ),
        ConfigError,
        "ngroups=3",
    ),
    "activation": (
        lambda: causal_conv1d_fn(*conv_inputs(3, 2)[:3], activation="relu"),
        ConfigError,
        "'silu' or 'swish'",
    ),
    "labels with states": (
        lambda: causal_conv1d_fn(
            *conv_inputs(3, 2)[:3], torch.zeros(2, 3).int(), conv_inputs(3, 2)[3]
        ),
        PackingError,
        "initial_states",
    ),
    "initial width": (
        lambda: causal_conv1d_fn(*conv_inputs(3, 2)[:3], None, torch.ones(2, 6, 2).double()),
        ShapeError,
        re.escape("(2, 6, 1)"),
    ),
    "short state": (
        lambda: causal_conv1d_update(ONES[2], torch.ones(2, 2, 2), torch.ones(2, 4)),
        ShapeError,
        "width - 1 = 3",
    ),
    "index dtype": (
        lambda: causal_conv1d_update(ONES[2], ONES[3], ONES[2], conv_state_indices=ONES[1]),
        DtypeError,
        "conv_state_indices",
    ),
    "index length": (
        lambda: causal_conv1d_update(ONES[2], ONES[3], ONES[2], cache_seqlens=torch.zeros(3).int()),
        ShapeError,
        "one entry per batch row",
    ),
    "state rank": (
        lambda: selective_state_update(ONES[2], *[ONES[2]] * 5),
        ShapeError,
        "state must have the axes",
    ),
    "state rows": (
        lambda: selective_state_update(torch.ones(3, 2, 2), *[ONES[2]] * 5),
        ShapeError,
        "batch is 2",
    ),
    "residual shape": (
        lambda: rms_norm_fn(ONES[2], ONES[1], None, ONES[3]),
        ShapeError,
        "residual must have the shape",
    ),
    "dropout": (lambda: rms_norm_fn(ONES[2], ONES[1], None, dropout_p=1.0), ConfigError, "0 <= p"),
    "rowscale and x1": (
        lambda: rms_norm_fn(ONES[2], ONES[1], None, x1=ONES[2], rowscale=ONES[1]),
        ConfigError,
        "exclude each other",
    ),
    "bias1 alone": (
        lambda: layer_norm_fn(ONES[2], ONES[1], None, bias1=ONES[1]),
        ConfigError,
        "bias1 needs weight1",
    ),
    "group size": (
        lambda: layernorm_fn(ONES[2], ONES[1], None, group_size=3),
        ConfigError,
        "group_size must divide",
    ),
    "gate shape": (lambda: rmsnorm_fn(ONES[2], ONES[1], None, ONES[3]), ShapeError, "z must have"),
    "head width": (lambda: Mamba2Simple(8, headdim=5), ConfigError, "headdim must divide"),
    "block groups": (lambda: Mamba2Simple(8, headdim=4, ngroups=3), ConfigError, "ngroups=3"),
    "A range": (lambda: Mamba2Simple(8, headdim=4, A_init_range=(0, 1)), ConfigError, "A_init"),
    "dt range": (lambda: Mamba2Simple(8, headdim=4, dt_min=0.2), ConfigError, "dt_min"),
    "input width": (lambda: Mamba2Simple(8, headdim=4)(ONES[3]), ShapeError, "length, 8"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_rejects(name):
    """Each mistake raises one of our errors and says what was expected."""
    call, error, message = MISTAKES[name]
    assert issubclass(error, AnyMambaError)
    with pytest.raises(error, match=message):
        call()
