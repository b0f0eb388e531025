"""Counts against numbers worked out by hand from the published sizes (d_model 768)."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from anymamba.errors import ConfigError
from anymamba.nn import (
    Mamba,
    Mamba2,
    Mamba3,
    count_parameters,
    flops_per_token,
    state_bytes,
)

BLOCKS = {
    "mamba1": (Mamba, {}),
    "mamba2": (Mamba2, {"d_state": 128, "headdim": 64}),
    "mamba3": (Mamba3, {"d_state": 128, "headdim": 64}),
    "mimo": (Mamba3, {"d_state": 128, "headdim": 64, "is_mimo": True, "mimo_rank": 4}),
}
OUT_PROJ = 768 * 1536
PARAMETERS = {
    # A_log, D, in_proj, conv1d weight and bias, x_proj, dt_proj weight and bias
    "mamba1": 1536 * 16 + 1536 + 3072 * 768 + 1536 * 5 + 80 * 1536 + 1536 * 49 + OUT_PROJ,
    # in_proj rows 1536 + 1536 + 2 * 128 + 24, conv1d, dt_bias A_log D, norm
    "mamba2": 3352 * 768 + 1792 * 5 + 3 * 24 + 1536 + OUT_PROJ,
    # in_proj rows 1536 + 1536 + 2 * 128 + 3 * 24 + 32, dt_bias D, B_bias C_bias, B_norm C_norm
    "mamba3": 3432 * 768 + 2 * 24 + 2 * 24 * 128 + 2 * 128 + OUT_PROJ,
    # in_proj rows 1536 + 1536 + 2 * 4 * 128 + 3 * 24 + 32; biases per rank; mimo_x mimo_z mimo_o
    "mimo": 4200 * 768 + 2 * 24 + 2 * 24 * 4 * 128 + 3 * 24 * 4 * 64 + 2 * 128 + OUT_PROJ,
}
STATE_FLOAT32 = {
    "mamba1": 4 * (1536 * 4 + 1536 * 16),
    "mamba2": 4 * (1792 * 4 + 24 * 64 * 128),
    "mamba3": 4 * (24 * 64 * 128 + 24 * 128 + 24 * 64 + 24 * 32),
    "mimo": 4 * (24 * 64 * 128 + 4 * 24 * 128 + 24 * 64 + 24 * 32),
}
STATE_BFLOAT16 = {
    "mamba1": 2 * 1536 * 4 + 4 * 1536 * 16,
    "mamba2": 2 * 1792 * 4 + 4 * 24 * 64 * 128,
    "mamba3": 4 * (24 * 64 * 128 + 24 * 32) + 2 * (24 * 128 + 24 * 64),
    "mimo": 4 * (24 * 64 * 128 + 24 * 32) + 2 * (4 * 24 * 128 + 24 * 64),
}
# In order: in_proj, (x_proj, dt_proj,) out_proj, (convolution,) scan.
FLOPS = {
    "mamba1": 4_718_592 + 245_760 + 147_456 + 2_359_296 + 12_288 + 221_184,
    "mamba2": 5_148_672 + 2_359_296 + 14_336 + 1_081_344,
    "mamba3": 5_271_552 + 2_359_296 + 1_081_344,
    "mimo": 6_451_200 + 2_359_296 + 4_325_376,
}
each_block = pytest.mark.parametrize("name", list(BLOCKS))


def build(name: str, **options):
    kind, sizes = BLOCKS[name]
    return kind(768, device="meta", **(sizes | options))


@each_block
def test_parameters_equal_hand_count(name):
    """Each published block has as many parameters as its table of shapes says."""
    assert PARAMETERS[name] == count_parameters(build(name))


def test_parameters_add_up_to_the_published_models():
    """Blocks, norms, MLPs and embedding make up the published sizes of whole models."""
    count = {name: count_parameters(build(name)) for name in BLOCKS}
    assert 24 * (count["mamba1"] + 768) + 50_280 * 768 + 768 == 129_135_360
    assert 24 * (count["mamba2"] + 768) + 50_288 * 768 + 768 == 128_989_632
    mlp = 3 * 768 * 1536
    assert 12 * (count["mamba3"] + 2 * 768 + mlp) + 128_256 * 768 + 768 == 186_849_600


@pytest.mark.parametrize(("name", "rows"), [("mamba3", 3432), ("mimo", 4200)])
def test_mamba3_projects_to_the_official_width(name, rows):
    """The rows of `in_proj` are those of the official checkpoints."""
    assert rows == build(name).in_proj.out_features


def test_tied_parameters_count_once_and_frozen_ones_count():
    """A weight used twice is stored once; freezing does not shrink a model."""
    pair = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5))
    assert count_parameters(pair) == 55
    pair[1].weight = pair[0].weight
    pair.requires_grad_(False)
    assert count_parameters(pair) == 30
    assert count_parameters(nn.ReLU()) == 0


@each_block
def test_state_bytes_equal_hand_count(name):
    """The state of one sequence, in float32 and beside bfloat16; sequences add up."""
    assert STATE_FLOAT32[name] == state_bytes(build(name))
    assert 5 * STATE_FLOAT32[name] == state_bytes(build(name), batch_size=5)
    assert STATE_BFLOAT16[name] == state_bytes(build(name, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["mamba2", "mamba3"])
def test_state_bytes_equal_the_real_state(name):
    """The count is that of an allocated cache, with quaternions and learnable start as well."""
    kind, _ = BLOCKS[name]
    options = {"rotation": "quaternion", "pathway": "double"} if name == "mamba3" else {}
    block = kind(16, d_state=8, headdim=8, learnable_init_state=True, **options)
    cache = block.empty_cache(3)
    assert state_bytes(block, 3) == cache.nbytes
    _, after = block.prefill(torch.ones(3, 5, 16), cache)
    assert state_bytes(block, 3) == after.nbytes


@each_block
def test_flops_equal_hand_count(name):
    """Projections, convolution and scan, each worked out as a number; training is three times."""
    block = build(name)
    assert FLOPS[name] == flops_per_token(block)
    assert 3 * FLOPS[name] == flops_per_token(block, training=True)


@pytest.mark.parametrize("name", ["mamba2", "mamba3", "mimo"])
def test_flops_grow_with_the_chunk(name):
    """Doubling the chunk adds chunk * (r + p) per head and rank; Mamba-1 has no chunk."""
    rank = 4 if name == "mimo" else 1
    added = flops_per_token(build(name), chunk_len=128) - flops_per_token(build(name))
    assert added == 24 * rank * 64 * (128 + 64)
    mamba1 = build("mamba1")
    assert flops_per_token(mamba1, chunk_len=1) == flops_per_token(mamba1)


def test_flops_follow_the_sizes():
    """Options that change a size change the count; options that do not, do not."""
    base = flops_per_token(build("mamba2"))
    # Two groups: 256 more rows of in_proj and 256 more channels.
    assert flops_per_token(build("mamba2", ngroups=2)) == base + 2 * 256 * 768 + 2 * 4 * 256
    # Half the width goes around the scan: 12 heads less, and 12 rows and 768 channels less.
    skipped = 12 * 45_056 + 2 * 12 * 768 + 2 * 4 * 768
    assert flops_per_token(build("mamba2", d_ssm=768)) == base - skipped
    mamba3 = flops_per_token(build("mamba3"))
    assert flops_per_token(build("mamba3", pathway="double", is_outproj_norm=True)) == mamba3


@each_block
def test_projections_are_what_torch_counts(name):
    """Without convolution and scan, the count is torch's own for the block's linear maps."""
    block = build(name)
    beside = {
        "mamba1": 12_288 + 221_184,
        "mamba2": 14_336 + 1_081_344,
        "mamba3": 1_081_344,
        "mimo": 4_325_376,
    }
    with FlopCounterMode(display=False) as counter:
        for linear in block.modules():
            if isinstance(linear, nn.Linear):
                linear(torch.zeros(1, linear.in_features, device="meta"))
    assert counter.get_total_flops() == flops_per_token(block) - beside[name]


def test_wrapped_projections_are_counted():
    """A projection of another class counts by its sizes."""

    class Quantised(nn.Module):
        in_features, out_features = 768, 3352

    block = build("mamba2")
    block.in_proj = Quantised()
    assert flops_per_token(block) == FLOPS["mamba2"]


def test_rejects_other_modules_and_empty_chunks():
    """Something that is not one of the three blocks has no count, nor has a chunk of nothing."""
    with pytest.raises(ConfigError, match=r"flops_per_token: .*Mamba3; got Linear\. Count"):
        flops_per_token(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="chunk_len must be positive; got 0"):
        flops_per_token(build("mamba2"), chunk_len=0)
