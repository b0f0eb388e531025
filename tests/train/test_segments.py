"""The plan of fused projections: the published rows, and that rows do what their names say."""

import pytest
import torch
from torch import nn

from anymamba.errors import ConfigError, ShapeError
from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import MHA, GatedMLP, Mamba, Mamba2, Mamba3
from anymamba.train import Segment, SegmentPlan, segment_plan

ATTENTION = {"num_heads": 4, "num_heads_kv": 2, "causal": True}
BLOCKS = {
    "mamba1": lambda: Mamba(32, d_state=4),
    "mamba2": lambda: Mamba2(32, d_state=4, headdim=16, ngroups=2, conv_bias=False, rmsnorm=False),
    "mamba2_mlp": lambda: Mamba2(32, d_state=4, headdim=16, d_ssm=32, conv_bias=False),
    "mamba3": lambda: Mamba3(32, d_state=8, headdim=16),
    "mamba3_mimo": lambda: Mamba3(32, d_state=8, headdim=16, ngroups=2, is_mimo=True, mimo_rank=3),
    "mamba3_quaternion": lambda: Mamba3(32, d_state=8, headdim=16, rotation="quaternion"),
    "attention": lambda: MHA(32, **ATTENTION),
    "attention_mlp": lambda: MHA(32, mlp_dim=256, **ATTENTION),
    "mlp": lambda: GatedMLP(32, 100),
}
# The order of the fused rows, with a star on what makes one number per head.
EXPECTED = {
    "mamba1": {"in_proj": "x 64, z 64", "x_proj": "dt 2*, B 4, C 4", "out_proj": "whole 32"},
    "mamba2": {"in_proj": "z 64, x 64, B 8, C 8, dt 4*", "out_proj": "whole 32"},
    "mamba2_mlp": {
        "in_proj": "z0 32, x0 32, z 32, x 32, B 4, C 4, dt 2*",
        "out_proj": "whole 32",
    },
    "mamba3": {
        "in_proj": "z 64, x 64, B 8, C 8, dt 4*, A 4*, lambda 4*, rotation 2",
        "out_proj": "whole 32",
    },
    "mamba3_mimo": {
        "in_proj": "z 64, x 64, B 48, C 48, dt 4*, A 4*, lambda 4*, rotation 2",
        "out_proj": "whole 32",
    },
    "mamba3_quaternion": {
        "in_proj": "z 64, x 64, B 8, C 8, dt 4*, A 4*, lambda 4*, rotation 12",
        "out_proj": "whole 32",
    },
    "attention": {"in_proj": "q 32, k 16, v 16", "out_proj": "whole 32"},
    "attention_mlp": {
        "in_proj": "q 32, k 16, v 16, value 128, gate 128",
        "out_proj": "whole 32",
    },
    "mlp": {"fc1": "value 128, gate 128", "fc2": "whole 32"},
}


def words(segments: tuple[Segment, ...]) -> str:
    return ", ".join(f"{s.name} {s.rows}{'*' * (s.owner == 'adamw')}" for s in segments)


def language_model(layer: str) -> MambaLM:
    options = {"layer": layer, "d_state": 8}
    if layer == "Mamba3":
        options |= {"headdim": 16, "is_mimo": True, "mimo_rank": 2, "learnable_init_state": True}
    elif layer == "Mamba2":
        options |= {"headdim": 16, "learnable_init_state": True}
    return MambaLM(
        MambaConfig(
            d_model=32,
            n_layer=3,
            vocab_size=64,
            ssm_cfg=options,
            d_intermediate=64,
            attn_layer_idx=[1],
            attn_cfg={"d_conv": 3, **ATTENTION},
            tie_embeddings=False,
        )
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_every_family_has_the_published_segments(name: str) -> None:
    """The parts, their widths, their order, and which of them stay on AdamW."""
    plan = segment_plan(BLOCKS[name]())
    expected = {f"{projection}.weight": parts for projection, parts in EXPECTED[name].items()}
    assert expected == {weight: words(parts) for weight, parts in plan.weights.items()}


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_a_plan_covers_matrices_of_the_model_and_nothing_else(layer: str) -> None:
    """Every weight of the plan exists, is a matrix, and its parts add up to its rows."""
    lm = language_model(layer)
    parameters = dict(lm.named_parameters())
    plan = segment_plan(lm)
    plan.check(parameters)
    per_layer = 5 if layer == "Mamba1" else 4
    assert 2 * per_layer + 4 == len(plan.weights)
    for name, parts in plan.weights.items():
        assert parameters[name].dim() == 2
        assert parameters[name].shape[0] == sum(part.rows for part in parts)
        assert any(part.owner == "muon" for part in parts)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_a_plan_leaves_everything_else_to_adamw(layer: str) -> None:
    """Embedding, head, vectors, convolutions, `dt_proj`, decays and rank scalings are not in it."""
    lm = language_model(layer)
    projections = ("in_proj.weight", "x_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight")
    left = {name for name, _ in lm.named_parameters()} - set(segment_plan(lm).weights)
    assert not [name for name in left if name.endswith(projections)]
    assert {"backbone.embedding.weight", "lm_head.weight"} <= left
    if layer == "Mamba1":
        assert "backbone.layers.0.mixer.dt_proj.weight" in left


def rows_of(block: nn.Module, projection: str, part: str) -> slice:
    start = 0
    for segment in segment_plan(block).weights[f"{projection}.weight"]:
        if segment.name == part:
            return slice(start, start + segment.rows)
        start += segment.rows
    raise AssertionError(part)


@pytest.mark.parametrize(
    ("name", "projection", "part"),
    [
        ("mamba1", "in_proj", "x"),
        ("mamba1", "in_proj", "z"),
        ("mamba2", "in_proj", "x"),
        ("mamba2", "in_proj", "z"),
        ("mamba3", "in_proj", "x"),
        ("mamba3", "in_proj", "z"),
        ("mamba3_mimo", "in_proj", "z"),
        ("mamba3_quaternion", "in_proj", "z"),
        ("mlp", "fc1", "value"),
        ("mlp", "fc1", "gate"),
    ],
)
def test_without_a_factor_there_is_no_output(name: str, projection: str, part: str) -> None:
    """Values and gates multiply the output, so the output is 0 when their rows are."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    u_bsd = torch.randn(2, 9, 32)
    with torch.no_grad():
        if name == "mamba1":
            block.conv1d.bias.zero_()
        assert block(u_bsd).abs().max() > 1e-3
        getattr(block, projection).weight[rows_of(block, projection, part)] = 0
        assert block(u_bsd).abs().max() == 0


@pytest.mark.parametrize(
    ("name", "projection", "part"),
    [
        ("mamba1", "x_proj", "B"),
        ("mamba1", "x_proj", "C"),
        ("mamba2", "in_proj", "B"),
        ("mamba2", "in_proj", "C"),
        ("mamba3", "in_proj", "B"),
        ("mamba3", "in_proj", "C"),
        ("mamba3_mimo", "in_proj", "B"),
        ("mamba3_mimo", "in_proj", "C"),
    ],
)
def test_without_keys_or_queries_only_the_skip_is_left(
    name: str, projection: str, part: str
) -> None:
    """With B or C at 0 (their biases too) the state is not heard, so no token hears another."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    with torch.no_grad():
        if hasattr(block, "conv1d"):
            block.conv1d.weight[..., :-1] = 0
        if hasattr(block, "B_bias"):
            block.B_bias.zero_()
            block.C_bias.zero_()

        def influence() -> float:
            u_bsd = torch.randn(1, 9, 32)
            changed_bsd = u_bsd.clone()
            changed_bsd[:, 0] += 1
            return float((block(u_bsd) - block(changed_bsd))[:, 1:].abs().max())

        assert influence() > 1e-6
        getattr(block, projection).weight[rows_of(block, projection, part)] = 0
        assert influence() == 0


@pytest.mark.parametrize("part", ["dt", "A", "lambda", "rotation"])
@pytest.mark.parametrize("name", ["mamba3", "mamba3_mimo", "mamba3_quaternion"])
def test_a_coefficient_has_its_own_rows(name: str, part: str) -> None:
    """What the block calls step size, decay, trapezoid weight and turn comes from those rows."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    u_d = torch.randn(1, 32)
    raw = block.in_proj(u_d)[0, rows_of(block, "in_proj", part)]
    *_, coefficients, turn = block._project(u_d)
    with torch.no_grad():
        block.in_proj.weight[rows_of(block, "in_proj", part)] += 1
    *_, after, turn_after = block._project(u_d)
    moved = {
        "dt": not torch.equal(coefficients.dt, after.dt),
        "rotation": not torch.equal(turn, turn_after),
    }
    assert moved == {key: key == part for key in moved}
    if part == "rotation":
        assert torch.equal(raw, turn[0])
    if part in ("A", "lambda"):
        assert any(not torch.equal(a, b) for a, b in zip(coefficients, after, strict=True))


def test_a_segment_can_be_given_back_to_adamw() -> None:
    """`without_segment` moves that name alone; the old plan is as it was."""
    plan = segment_plan(Mamba3(32, d_state=8, headdim=16))
    less = plan.without_segment("rotation")
    expected = "z 64, x 64, B 8, C 8, dt 4*, A 4*, lambda 4*, rotation 2*"
    assert expected == words(less.weights["in_proj.weight"])
    assert EXPECTED["mamba3"]["in_proj"] == words(plan.weights["in_proj.weight"])
    with pytest.raises(ConfigError, match=r"'angles'. It has: A, B, C, dt, lambda, rotation"):
        plan.without_segment("angles")


def test_a_plan_can_be_extended_by_other_matrices() -> None:
    """A weight that no block owns is taken in by name."""
    model = nn.Sequential(GatedMLP(32, 100), nn.Linear(32, 6))
    plan = segment_plan(model).extend({"1.weight": (Segment("whole", 6, "muon"),)})
    plan.check(dict(model.named_parameters()))
    assert {"0.fc1.weight", "0.fc2.weight", "1.weight"} == set(plan.weights)


@pytest.mark.parametrize(
    ("weight", "segments", "error", "says"),
    [
        ("weight", (Segment("a", 3, "muon"), Segment("b", 4, "muon")), ShapeError, "its 6 rows"),
        ("weight", (), ShapeError, "its 6 rows; got none"),
        ("bias", (Segment("a", 6, "muon"),), ShapeError, r"must be a matrix; got shape \(6,\)"),
        ("other", (Segment("a", 6, "muon"),), ConfigError, "must have a parameter 'other'"),
        ("weight", (Segment("a", 6, "muon"), Segment("b", 0, "muon")), ConfigError, "one row each"),
        ("weight", (Segment("a", 3, "muon"),) * 2, ConfigError, "names of their own"),
    ],
)
def test_rejects_a_plan_that_does_not_fit(weight, segments, error, says: str) -> None:
    """Wrong widths, vectors, strangers, empty and nameless parts are named."""
    parameters = dict(nn.Linear(3, 6).named_parameters())
    with pytest.raises(error, match=says):
        SegmentPlan({weight: segments}).check(parameters)


def test_a_replaced_projection_is_left_out() -> None:
    """Where an adapter stands in for a projection, there is no fused weight to cut."""
    block = Mamba(32, d_state=4)
    block.in_proj = nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 128))
    assert {"x_proj.weight", "out_proj.weight"} == set(segment_plan(block).weights)
