"""The same modules in transformers, with the same weights: what people would run otherwise."""

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.models import MambaLM
from anymamba.nn import Mamba, Mamba2

__all__ = ["ABSENT", "has_transformers", "their_lm", "their_mixer", "their_step", "why_no_peer"]

ABSENT = "transformers is not installed: pip install 'anymamba[bench]'"
NO_MAMBA3 = "transformers has no Mamba-3"
# What published configs say.
THEIR_CHUNK = 256


def has_transformers() -> bool:
    """Say whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def their_mixer(block: nn.Module) -> nn.Module | str:
    """Return the same block in transformers with the same weights, or why there is none.

    Args:
        block: one of ours.
    """
    if not isinstance(block, Mamba | Mamba2):
        return NO_MAMBA3
    if not has_transformers():
        return ABSENT
    _quiet()
    if isinstance(block, Mamba):
        from transformers.models.mamba.modeling_mamba import MambaMixer as Mixer
    else:
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Mixer
    mixer: nn.Module = Mixer(_config(block, 1, 8), 0)
    mixer.load_state_dict(copy.deepcopy(block.state_dict()))
    return mixer.eval()


def their_step(block: Any, mixer: nn.Module, u_bsd: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that runs one more token after the given ones; it remembers its state.

    Args:
        block: one of ours.
        mixer: what `their_mixer` made of it.
        u_bsd: the tokens before.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=_config(block, 1, 8))
    with torch.no_grad():
        mixer(u_bsd, cache_params=cache)
    return lambda u_bd: mixer(u_bd.unsqueeze(1), cache_params=cache).squeeze(1)


def their_lm(lm: MambaLM) -> nn.Module | str:
    """Return the same language model in transformers with the same weights, or why there is none.

    Args:
        lm: one of ours; all its layers of one family.
    """
    if why_not := why_no_peer(lm):
        return why_not
    layers: list[Any] = list(lm.backbone.layers)
    mixer = layers[0].mixer
    _quiet()
    from transformers import Mamba2ForCausalLM, MambaForCausalLM

    kind: Any = MambaForCausalLM if isinstance(mixer, Mamba) else Mamba2ForCausalLM
    model = kind(_config(mixer, len(layers), lm.config.padded_vocab_size))
    names = {
        name.replace("backbone.embedding.", "backbone.embeddings."): tensor
        for name, tensor in lm.state_dict().items()
    }
    model.load_state_dict(names)
    return model.to(lm.lm_head.weight.dtype).eval()


def why_no_peer(lm: MambaLM) -> str:
    """Return why transformers has no such language model, or nothing."""
    layers: list[Any] = list(lm.backbone.layers)
    if not isinstance(layers[0].mixer, Mamba | Mamba2):
        return NO_MAMBA3
    return "" if has_transformers() else ABSENT


def _config(block: Mamba | Mamba2, layers: int, vocabulary: int) -> Any:
    from transformers import Mamba2Config, MambaConfig

    options: dict[str, Any] = {
        "hidden_size": block.d_model,
        "state_size": block.d_state,
        "conv_kernel": block.d_conv,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "use_cache": False,
        "expand": 2,
    }
    if isinstance(block, Mamba):
        return MambaConfig(**options, time_step_rank=block.dt_rank)
    return Mamba2Config(
        **options,
        num_heads=block.nheads,
        head_dim=block.headdim,
        n_groups=block.ngroups,
        chunk_size=THEIR_CHUNK,
    )


def _quiet() -> None:
    """Keep its advice about CUDA kernels off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
