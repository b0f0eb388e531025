"""Laws of stacks that read from both ends."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from anymamba.errors import ConfigError, PackingError, ShapeError
from anymamba.nn import (
    BidirectionalConfig,
    BidirectionalStack,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    VirtualLayers,
)
from laws import assert_same, randn

FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba1": {"layer": "Mamba1", "d_state": 4},
    "Mamba2": {"layer": "Mamba2", "d_state": 4, "headdim": 4, "chunk_size": 4},
    "Mamba3": {"layer": "Mamba3", "d_state": 8, "headdim": 4, "chunk_size": 4},
}
ATTENTION = {"causal": True, "num_heads": 2}
MARKERS = [Marker.start(), Marker.end(), Marker.middle(), Marker.custom(1)]
CASES: dict[str, dict[str, Any]] = {
    **{name: {"n_layer": 2, "ssm_cfg": options} for name, options in FAMILIES.items()},
    "hybrid": {"layers": ["Mamba3", "Mamba3", "MHA", "Mamba2"], "attn_cfg": ATTENTION},
    "concatenated": {"n_layer": 4, "merge": "cat_linear"},
    "mlp": {"n_layer": 2, "d_intermediate": 8, "merge": "cat_linear"},
    "shared": {"n_layer": 4, "virtual": VirtualLayers(10, "strided_cyclic")},
    "one_layer": {"n_layer": 1, "virtual": VirtualLayers(4, "symmetric_cyclic")},
    "gates": {"n_layer": 4, "residual": ResidualConfig(multi_gate=MultiGate(n_stream=2))},
    "replacing": {
        "n_layer": 4,
        "d_intermediate": 8,
        "residual": ResidualConfig(skip_first=True, skip_last=True),
    },
    "registers": {"n_layer": 4, "registers": RegisterConfig(stack=MARKERS), "final_norm": True},
}


def stack_of(name: str, **changes: Any) -> BidirectionalStack:
    options: dict[str, Any] = {"ssm_cfg": FAMILIES["Mamba3"], **CASES[name], **changes}
    if "layers" in options:
        # A name alone takes the options of its family; the others are spelled out.
        options["layers"] = [FAMILIES.get(x, x) for x in options["layers"]]
    return build(BidirectionalConfig(d_model=8, **options))


def build(config: BidirectionalConfig) -> BidirectionalStack:
    """Return the stack with random weights, so that nothing is zero by construction."""
    stack = BidirectionalStack(config, dtype=torch.float64)
    with torch.no_grad():
        for place, weight in enumerate(stack.parameters()):
            weight.add_(randn(*weight.shape, seed=place, scale=0.2))
    return stack


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_trains(name: str):
    """One backward gives every parameter a gradient that is not zero everywhere."""
    stack = stack_of(name)
    stack(randn(2, 7, 8, seed=1)).square().sum().backward()
    for key, weight in stack.named_parameters():
        assert weight.grad is not None, key
        assert bool(weight.grad.any()), key


@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_notice_its_padding(name: str):
    """In a padded batch every row gives what it gives alone, whatever stands in the padding."""
    stack = stack_of(name)
    x_bsd = randn(3, 9, 8, seed=2)
    lengths = torch.tensor([9, 4, 1])
    if name == "registers":
        lengths = torch.tensor([9, 4, 2])
    padded_bsd = stack(x_bsd, lengths=lengths)
    other_bsd = x_bsd.clone()
    other_bsd[1, 4:] = 1e3
    noisy_bsd = stack(other_bsd, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone_1sd = stack(x_bsd[row : row + 1, :length])
        many = alone_1sd.shape[1]
        assert_same(alone_1sd[0], padded_bsd[row, :many])
        assert_same(alone_1sd[0], noisy_bsd[row, :many])


@pytest.mark.parametrize("name", [name for name in CASES if name != "registers"])
def test_packed_equals_alone(name: str):
    """Packed and labelled sequences are reversed within their own borders."""
    stack = stack_of(name)
    x_1sd = randn(1, 9, 8, seed=3)
    expected_1sd = torch.cat([stack(piece) for piece in x_1sd.split([4, 5], dim=1)], dim=1)
    assert_same(expected_1sd, stack(x_1sd, cu_seqlens=torch.tensor([0, 4, 4, 9])))
    labels = torch.tensor([[0] * 4 + [1] * 5])
    assert_same(expected_1sd, stack(x_1sd, seq_idx=labels))
    both = stack(x_1sd.expand(2, -1, -1), seq_idx=labels.expand(2, -1))
    assert_same(expected_1sd.expand(2, -1, -1), both)


@pytest.mark.parametrize("name", ["Mamba1", "Mamba2", "Mamba3", "concatenated"])
def test_a_pair_is_two_layers_one_of_them_reversed(name: str):
    """The first pair equals its formula, written out with the parts."""
    stack = stack_of(name, n_layer=2)
    x_bsd = randn(2, 5, 8, seed=4)
    ahead, behind = stack.layers
    forwards = ahead.mixer(ahead.norm(x_bsd))  # pyright: ignore[reportCallIssue]
    backwards = behind.mixer(behind.norm(x_bsd.flip(1))).flip(1)  # pyright: ignore[reportCallIssue]
    if name == "concatenated":
        merged = stack.pairs[0].merge(torch.cat([forwards, backwards], -1))  # pyright: ignore[reportCallIssue]
    else:
        merged = 0.5 * forwards + 0.5 * backwards
    assert_same(x_bsd + merged, stack(x_bsd))


@pytest.mark.parametrize("name", CASES)
def test_running_twice_gives_the_same_bits(name: str):
    """Nothing is remembered from call to call, and registers lengthen the sequence as announced."""
    stack, x_bsd = stack_of(name), randn(2, 5, 8, seed=4)
    y_bsd = stack(x_bsd)
    assert torch.equal(y_bsd, stack(x_bsd))
    added = len(MARKERS) if name == "registers" else 0
    assert y_bsd.shape == (2, 5 + added, 8)


def test_every_place_sees_both_sides():
    """The output at any place depends on the input at every place."""
    stack = stack_of("Mamba3")
    x_bsd = randn(1, 5, 8, seed=5).requires_grad_()
    for place in range(5):
        (grad_x,) = torch.autograd.grad(stack(x_bsd)[0, place].sum(), x_bsd)
        assert bool(grad_x[0].abs().sum(-1).gt(0).all())


def test_reversing_the_input_of_a_shared_layer_reverses_the_output():
    """With one layer for both directions and the mean, the stack has no preferred direction."""
    stack = stack_of("one_layer")
    x_bsd = randn(2, 6, 8, seed=6)
    assert_same(stack(x_bsd).flip(1), stack(x_bsd.flip(1)))


def test_merges_belong_to_real_pairs():
    """Ten virtual layers over four real ones use two merges, and both train."""
    stack = stack_of("shared", merge="cat_linear")
    assert len(stack.pairs) == 2
    assert stack.stack_config.pairs == (0, 1, 0, 1, 0)
    stack(randn(1, 3, 8, seed=7)).sum().backward()
    for name, weight in stack.pairs.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


@pytest.mark.parametrize(("per_virtual", "count"), [(True, 5), (False, 2)])
def test_gates_count_pairs(per_virtual: bool, count: int):
    """Gates belong to virtual pairs or to real ones, never to a direction."""
    gates = MultiGate(n_stream=2, per_virtual=per_virtual)
    stack = stack_of("shared", residual=ResidualConfig(multi_gate=gates))
    assert len(stack.gates) == count


def test_registers_and_tokens_are_found_again():
    """What was inserted can be told from what was given, in whole and in padded batches."""
    config = BidirectionalConfig(
        d_model=8, n_layer=2, ssm_cfg=FAMILIES["Mamba3"], registers=RegisterConfig(stack=MARKERS)
    )
    stack = build(config)
    # Without mixers a stack only inserts.
    for weight in (reader.mixer.out_proj.weight for reader in stack.layers):  # pyright: ignore[reportAttributeAccessIssue]
        torch.nn.init.zeros_(weight)  # pyright: ignore[reportArgumentType]
    x_bsd = randn(2, 6, 8, seed=8)
    table = stack.registers.table.detach()
    for lengths in (None, torch.tensor([6, 3])):
        y_bsd = stack(x_bsd, lengths=lengths)
        tokens_bsd = stack.tokens_of(y_bsd, 6, lengths)
        found = stack.registers_of(y_bsd, 6, lengths)
        for row, length in enumerate((6, 6) if lengths is None else (6, 3)):
            assert_same(x_bsd[row, :length], tokens_bsd[row, :length])
            assert_same(table, found[row])


def test_a_register_that_does_not_land_is_told():
    """A custom register beyond the end of a row has no output to return."""
    stack = stack_of("registers")
    lengths = torch.tensor([3, 1])
    y_bsd = stack(randn(2, 3, 8, seed=9), lengths=lengths)
    with pytest.raises(ConfigError, match="beyond"):
        stack.registers_of(y_bsd, 3, lengths)


@pytest.mark.parametrize("name", CASES)
def test_configs_survive_json(name: str):
    """A config equals its JSON, and builds a stack with the same keys."""
    stack = stack_of(name)
    config = stack.stack_config
    again = BidirectionalConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    fresh = BidirectionalStack(again, dtype=torch.float64)
    fresh.load_state_dict(stack.state_dict())
    x_bsd = randn(1, 4, 8, seed=10)
    assert torch.equal(fresh(x_bsd), stack(x_bsd))


def test_half_types_keep_the_stream_wide():
    """In bfloat16 the stack stays within the rounding of its inputs and weights."""
    stack = stack_of("mlp", final_norm=True).float()
    x_bsd = randn(2, 9, 8, seed=11, dtype=torch.float32)
    half = BidirectionalStack(stack.stack_config, dtype=torch.bfloat16)
    half.load_state_dict(stack.state_dict())
    y_bsd = half(x_bsd.bfloat16())
    assert y_bsd.dtype == torch.bfloat16
    assert_same(stack(x_bsd).bfloat16(), y_bsd)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 3}, "pairs"),
        ({"merge": "sum"}, "merge"),
        ({"grad_horizon": 1}, "grad_horizon"),
        ({"virtual": VirtualLayers(5, "strided_cyclic")}, "even"),
        ({"virtual": VirtualLayers(2, "strided_cyclic")}, "leave out"),
        ({"virtual": VirtualLayers(4)}, "strided_cyclic"),
        ({"virtual": VirtualLayers(4, [0, 2, 1, 3]), "merge": "cat_linear"}, "leave out pairs"),
        ({"registers": RegisterConfig(layers={0: [Marker.start()]})}, "registers.stack"),
        ({"residual": ResidualConfig(multi_gate=MultiGate(n_stream=4))}, "streams"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 2}}, "causal"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    """A configuration that would leave weights untrained or cannot run says why."""
    with pytest.raises(ConfigError, match=message):
        BidirectionalConfig(**{"d_model": 8, "n_layer": 4, **changes})


def test_a_schedule_may_leave_out_pairs_that_have_no_weights():
    """With the mean and no MLP, any list that uses every layer is a schedule."""
    stack = stack_of("shared", virtual=VirtualLayers(4, [0, 2, 1, 3]))
    stack(randn(1, 3, 8, seed=12)).sum().backward()
    assert all(weight.grad is not None for weight in stack.parameters())


def borders(*ends: int) -> Tensor:
    return torch.tensor(ends)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": borders(3, 5)}, PackingError, "1..4"),
        ({"lengths": borders(0, 4)}, PackingError, "1..4"),
        ({"lengths": borders(4)}, ShapeError, "one number per row"),
        ({"lengths": [4, 4]}, TypeError, "int64"),
        ({"lengths": borders(4, 4), "seq_idx": torch.zeros(2, 4).long()}, PackingError, "one of"),
        ({"cu_seqlens": borders(0, 9)}, ValueError, "cu_seqlens|batch"),
        ({"seq_idx": torch.zeros(2, 3).long()}, PackingError, "seq_idx"),
    ],
)
def test_mistakes_in_calls_are_refused(options: dict[str, Any], error: type, message: str):
    """Lengths and borders must describe the batch."""
    with pytest.raises(error, match=message):
        stack_of("Mamba3")(randn(2, 4, 8, seed=13), **options)


def test_registers_refuse_packed_sequences():
    """Registers know one sequence per row."""
    with pytest.raises(PackingError, match="Pad the batch"):
        stack_of("registers")(randn(1, 4, 8, seed=14), cu_seqlens=borders(0, 4))
