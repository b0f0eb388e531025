"""The functions of `mamba_ssm` and `causal_conv1d`, with their signatures, on any device.

Change the import and other people's code runs: arguments, their order, defaults, layouts and
results are the official ones. `README.md` beside this file says where the two differ.
"""

from anymamba.compat.conv import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from anymamba.compat.lm import MambaLMHeadModel
from anymamba.compat.mamba2_simple import Mamba2Simple
from anymamba.compat.mamba_inner import mamba_inner_fn
from anymamba.compat.norm import RMSNorm, layer_norm_fn, rms_norm_fn
from anymamba.compat.norm_gated import RMSNormGated, layernorm_fn, rmsnorm_fn
from anymamba.compat.selective_scan import selective_scan_fn, selective_scan_ref
from anymamba.compat.split_conv import mamba_split_conv1d_scan_combined
from anymamba.compat.ssd import mamba_chunk_scan_combined, ssd_minimal_discrete
from anymamba.compat.state_update import selective_state_update

__all__ = [
    "Mamba2Simple",
    "MambaLMHeadModel",
    "RMSNorm",
    "RMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "layer_norm_fn",
    "layernorm_fn",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "rms_norm_fn",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
    "ssd_minimal_discrete",
]
