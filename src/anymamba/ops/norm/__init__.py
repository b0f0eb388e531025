"""Root-mean-square and layer normalisation: plain, gated, and behind a residual sum."""

from anymamba.ops.norm.api import (
    AddNorm,
    add_layer_norm,
    add_rms_norm,
    gated_rms_norm,
    rms_norm,
)

__all__ = ["AddNorm", "add_layer_norm", "add_rms_norm", "gated_rms_norm", "rms_norm"]
