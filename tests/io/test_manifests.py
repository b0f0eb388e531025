"""The four public checkpoints: names, shapes, counts, on modules without values."""

import json
from pathlib import Path

import pytest
import torch

from anymamba.io import load_pretrained
from anymamba.models import MambaLM, preset

Shapes = dict[str, tuple[int, ...]]

MAMBA1: Shapes = {
    "norm.weight": (768,),
    "mixer.A_log": (1536, 16),
    "mixer.D": (1536,),
    "mixer.conv1d.weight": (1536, 1, 4),
    "mixer.conv1d.bias": (1536,),
    "mixer.in_proj.weight": (3072, 768),
    "mixer.x_proj.weight": (80, 1536),
    "mixer.dt_proj.weight": (1536, 48),
    "mixer.dt_proj.bias": (1536,),
    "mixer.out_proj.weight": (768, 1536),
}
MAMBA2: Shapes = {
    "norm.weight": (768,),
    "mixer.A_log": (24,),
    "mixer.D": (24,),
    "mixer.dt_bias": (24,),
    "mixer.conv1d.weight": (1792, 1, 4),
    "mixer.conv1d.bias": (1792,),
    "mixer.norm.weight": (1536,),
    "mixer.in_proj.weight": (3352, 768),
    "mixer.out_proj.weight": (768, 1536),
}
SISO: Shapes = {
    "norm.weight": (768,),
    "norm2.weight": (768,),
    "mixer.B_bias": (24, 1, 128),
    "mixer.C_bias": (24, 1, 128),
    "mixer.B_norm.weight": (128,),
    "mixer.C_norm.weight": (128,),
    "mixer.D": (24,),
    "mixer.dt_bias": (24,),
    "mixer.in_proj.weight": (3432, 768),
    "mixer.out_proj.weight": (768, 1536),
    "mlp.fc1.weight": (3072, 768),
    "mlp.fc2.weight": (768, 1536),
}
MIMO: Shapes = {
    **SISO,
    "mixer.B_bias": (24, 4, 128),
    "mixer.C_bias": (24, 4, 128),
    "mixer.mimo_x": (24, 4, 64),
    "mixer.mimo_z": (24, 4, 64),
    "mixer.mimo_o": (24, 4, 64),
    "mixer.in_proj.weight": (4200, 768),
    "mlp.fc1.weight": (2560, 768),
    "mlp.fc2.weight": (768, 1280),
}
# name: layers, rows of the embedding, one layer, tensors without the head, parameters
PUBLIC: dict[str, tuple[int, int, Shapes, int, int]] = {
    "mamba-130m": (24, 50280, MAMBA1, 242, 129_135_360),
    "mamba2-130m": (24, 50288, MAMBA2, 218, 128_989_632),
    "mamba3-siso-187m": (12, 128256, SISO, 146, 186_849_600),
    "mamba3-mimo-187m": (12, 128256, MIMO, 182, 187_291_968),
}


def manifest(name: str) -> Shapes:
    """Return what the published file holds: the globals and n copies of one layer."""
    layers, rows, layer, _, _ = PUBLIC[name]
    shapes: Shapes = {"backbone.embedding.weight": (rows, 768), "backbone.norm_f.weight": (768,)}
    for place in range(layers):
        shapes |= {f"backbone.layers.{place}.{key}": shape for key, shape in layer.items()}
    return shapes


@pytest.mark.parametrize("name", PUBLIC)
def test_modules_have_the_published_tensors(name: str):
    """Names, shapes and counts of the public checkpoints, exactly; the head is the embedding."""
    _, _, _, tensors, parameters = PUBLIC[name]
    lm = MambaLM(preset(name), device="meta")
    own = {key: tuple(value.shape) for key, value in lm.state_dict().items()}
    assert own.pop("lm_head.weight") == own["backbone.embedding.weight"]
    assert own == manifest(name)
    assert len(own) == tensors
    assert sum(value.numel() for value in lm.parameters()) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_files_of_the_published_size_load(name: str, tmp_path: Path):
    """A whole file of half floats becomes a model, every parameter filled, dtypes as promised."""
    stored = {key: torch.full(shape, 0.5).half() for key, shape in manifest(name).items()}
    torch.save(stored, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(preset(name).to_dict()))
    lm = load_pretrained(tmp_path, dtype=torch.float16)
    new = MambaLM(lm.config, device="meta", dtype=torch.float16)
    for (key, value), fresh in zip(lm.named_parameters(), new.parameters(), strict=True):
        assert value.dtype == fresh.dtype, key
        assert bool((value == 0.5).all()), key
