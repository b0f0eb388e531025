"""Our models as files of llama.cpp: GGUF, with the names and the layouts it reads."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.models import MambaLM
from anymamba.nn import Mamba, Mamba2

__all__ = ["write_gguf"]

NAMES = {
    "backbone.embedding.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}
# It wants a number here and uses it nowhere.
CONTEXT = 2**20


def write_gguf(lm: MambaLM, file: Path) -> None:
    """Write a model in float32, without a tokenizer.

    Args:
        lm: all layers Mamba-1, or all Mamba-2; without MLPs.
        file: to write.

    Raises:
        KeyError: a weight has no place in llama.cpp's models.
    """
    # By name: type checkers need not have what only one extra brings.
    gguf: Any = importlib.import_module("gguf")
    layers: list[Any] = list(lm.backbone.layers)
    mixer = layers[0].mixer
    writer = gguf.GGUFWriter(file, "mamba" if isinstance(mixer, Mamba) else "mamba2")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(lm.config.padded_vocab_size)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(lm.config.d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(len(layers))
    writer.add_layer_norm_rms_eps(lm.backbone.norm_f.eps)
    writer.add_ssm_conv_kernel(mixer.d_conv)
    writer.add_ssm_inner_size(mixer.d_inner)
    writer.add_ssm_state_size(mixer.d_state)
    # What is the rank of dt in Mamba-1 is the number of heads in Mamba-2.
    writer.add_ssm_time_step_rank(mixer.dt_rank if isinstance(mixer, Mamba) else mixer.nheads)
    if isinstance(mixer, Mamba2):
        writer.add_ssm_group_count(mixer.ngroups)
    for name, tensor in _tensors(lm, mixer):
        writer.add_tensor(name, tensor.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(lm: MambaLM, mixer: Mamba | Mamba2) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in lm.state_dict().items():
        if name == "lm_head.weight" and lm.config.tie_embeddings:
            continue
        layer = re.fullmatch(r"backbone\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            yield NAMES[name], tensor
            continue
        theirs = LAYER_NAMES[layer[2]]
        yield f"blk.{layer[1]}.{theirs}", _as_stored(theirs, tensor, mixer)


def _as_stored(name: str, tensor: Tensor, mixer: Mamba | Mamba2) -> Tensor:
    """Return a weight in the shape in which llama.cpp keeps it."""
    if name == "ssm_conv1d.weight":
        return tensor.squeeze(1)
    if name == "ssm_a":
        tensor = -torch.exp(tensor.float())
    if isinstance(mixer, Mamba2):
        if name in ("ssm_a", "ssm_d"):
            return tensor.unsqueeze(-1)
        if name == "ssm_norm.weight":
            return tensor.unflatten(0, (mixer.ngroups, -1))
    return tensor
