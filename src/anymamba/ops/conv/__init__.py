"""Causal depthwise convolution: the short filter in front of the scans."""

from anymamba.ops.conv.api import (
    ConvOutput,
    ConvStepOutput,
    causal_conv1d,
    causal_conv1d_step,
)

__all__ = ["ConvOutput", "ConvStepOutput", "causal_conv1d", "causal_conv1d_step"]
