"""Causal depthwise convolution: the short filter in front of the scans."""

from anymamba.ops.conv.api import (
    ConvOutput,
    ConvStepOutput,
    ExtendedRow,
    causal_conv1d,
    causal_conv1d_step,
    extend_row,
)

__all__ = [
    "ConvOutput",
    "ConvStepOutput",
    "ExtendedRow",
    "causal_conv1d",
    "causal_conv1d_step",
    "extend_row",
]
