"""The first weights of a language model."""

import math

import torch
from torch import nn

from anymamba.models.config import MambaConfig

__all__ = ["initialise"]


def initialise(backbone: nn.Module, config: MambaConfig) -> None:
    """Draw weights as the official models do.

    Linear biases start at zero unless tagged, embeddings have deviation 0.02, and the projections
    back into the residual stream are scaled down by the root of the number of branches: one per
    layer, two with an MLP. (Official code means that too, but a second pass loses the MLP's half.)
    Virtual layers count each; gated residuals average branches, so nothing is scaled for them.
    """
    branches = len(config.stack.schedule) * (1 if config.d_intermediate == 0 else 2)
    if config.stack.residual.multi_gate is not None:
        branches = 1
    for module in backbone.modules():
        if isinstance(module, nn.Linear):
            if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    for name, parameter in backbone.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            with torch.no_grad():
                parameter /= math.sqrt(branches)
