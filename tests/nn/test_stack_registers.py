"""Registers: where they stand, and that no splitting of the sequence can tell."""

from itertools import combinations, pairwise

import pytest
import torch
from stack_cases import (
    FAMILIES,
    GATES,
    WIDTH,
    assert_agree,
    build,
    config,
    in_pieces,
    inputs,
    outcome,
    parameter_gradients,
    stepwise,
)

from anymamba.errors import BackendError, CacheError, ConfigError, PackingError
from anymamba.nn import Marker, RegisterConfig, Registers, ResidualConfig, StackCache, VirtualLayers
from laws import assert_same

S, M, E, C = Marker.start(), Marker.middle(), Marker.end(), Marker.custom


def letters(markers: list[Marker], pieces: list[int], length: int | None) -> list[str]:
    """Return what each piece hands on: u0, u1, ... and the letter of each marker; 0 is a prime."""
    level = Registers(markers, 1)
    offset, token, spoken = 0, 0, []
    for count in pieces:
        rows, offset = level.insert(torch.zeros(1, count, 1), offset, length, is_prime=count == 0)
        names = [f"u{token + i}" for i in range(count)]
        for shift, (place, row) in enumerate(rows.places):
            names.insert(place + shift, "SMEC"[("start", "middle", "end", "custom").index(
                markers[row].kind
            )])  # fmt: skip
        token += count
        spoken.append(" ".join(names))
    return spoken


@pytest.mark.parametrize(
    ("markers", "length", "expected"),
    [
        ([S, M, E], 4, [0, 3, 6]),
        ([C(1), C(3)], 5, [1, 4]),
        ([S, M, E, C(1)], 6, [0, 5, 9, 2]),
        ([E, C(3)], 3, [3, 4]),
        ([S, C(2)], None, [0, 3]),
    ],
)
def test_positions(markers, length, expected):
    """The table of places, for sequences with and without an announced end."""
    assert Registers(markers, 1).positions(length) == expected


@pytest.mark.parametrize(
    ("markers", "length", "pieces", "expected"),
    [
        ([S, M, E, C(1)], 4, [4], ["S u0 C u1 M u2 u3 E"]),
        ([S, M, E, C(1)], 4, [1] * 4, ["S u0", "C u1", "M u2", "u3 E"]),
        ([E, E, C(3)], 3, [1] * 4, ["u0", "u1", "u2 E E", "C u3"]),
        ([E, C(3)], 3, [5], ["u0 u1 u2 E C u3 u4"]),
        ([S, C(2), E], 3, [0, 1, 0, 1, 0, 1, 0], ["S", "u0", "", "u1", "C", "u2 E", ""]),
        ([S, C(2)], None, [0, 0, 2, 0, 3], ["S", "", "u0 u1", "C", "u2 u3 u4"]),
        ([C(9)], 4, [4], ["u0 u1 u2 u3"]),
        ([M], 1, [1], ["M u0"]),
        ([E], 2, [1, 0, 1, 0, 1], ["u0", "", "u1 E", "", "u2"]),
    ],
)
def test_rows_of_each_piece(markers, length, pieces, expected):
    """What each piece, step or prime hands on, with streams that run past their announced end."""
    assert letters(markers, pieces, length) == expected


@pytest.mark.parametrize("markers", [[S, M, E, C(1)], [C(2), S, S], [E, E, C(5)], [C(7), M]])
def test_any_splitting_gives_the_rows_of_the_whole(markers):
    """All ways to cut 5 tokens, with a prime before every piece or none."""
    (expected,) = letters(markers, [5], 5)
    for count in range(5):
        for cuts in combinations(range(1, 5), count):
            borders = [0, *cuts, 5]
            pieces = [b - a for a, b in pairwise(borders)]
            primed = [x for piece in pieces for x in (0, piece)]
            for way in (pieces, primed):
                assert " ".join(filter(None, letters(markers, way, 5))) == expected


def test_length_counts_only_rows_that_land():
    """An end above is where the sequence really ends, whatever has not landed below."""
    assert Registers([C(10), S, E, C(3)], 1).length_after(4) == 7
    assert Registers([S], 1).length_after(None) is None
    registers = RegisterConfig(stack=[C(10)], layers={1: [E]})
    stack = build(config(registers=registers))
    assert stack(inputs(2, 4)).shape[1] == 5
    y_bsd, cache = stack.prefill(inputs(2, 4), length=4)
    assert y_bsd.shape[1] == 5
    assert cache.cursor.offsets == (4, 0, 5)


LEVELS = {
    "stack": RegisterConfig(stack=[S, M, E, C(1)]),
    "layer": RegisterConfig(layers={1: [S, C(3), E]}),
    "all": RegisterConfig(stack=[C(2), S], layers={0: [M, E], 1: [S, E]}),
    "unlanded": RegisterConfig(stack=[C(20), S], layers={0: [E]}),
}
KINDS = {
    "add": {},
    "mlp": {"d_intermediate": 16},
    "gates": {"residual": GATES, "virtual": VirtualLayers(4)},
    "virtual": {"virtual": VirtualLayers(5, "stretched")},
    "skips": {"residual": ResidualConfig(skip_first=True, skip_last=True)},
    "horizon": {"virtual": VirtualLayers(4), "grad_horizon": 2},
    "gates_horizon": {"residual": GATES, "virtual": VirtualLayers(4), "grad_horizon": 1},
}


def last_of_each(stack, x_bsd, cache):
    """Step through; the outputs are one per token."""
    return stepwise(x_bsd.shape[1])(stack, x_bsd, cache)


def test_levels_stand_in_front_of_each_other():
    """A start of each of three levels: the upper ones first; one prime runs them all."""
    nested = RegisterConfig(stack=[S], layers={0: [S], 1: [S]})
    stack = build(config(registers=nested))
    tables = [stack.layer_registers["1"], stack.layer_registers["0"], stack.registers]
    with torch.no_grad():
        for layer in stack.layers:
            layer.mixer.out_proj.weight.zero_()
    x_bsd = inputs(1, 2)
    # Silent layers hand every row on, so the rows that come out are those that went in.
    expected = torch.cat([*(level.table for level in tables), x_bsd[0]])
    assert_same(expected.detach(), stack(x_bsd)[0].detach())
    y_bd, cache = stack.prime(1, length=2)
    assert_same(stack.registers.table.detach(), y_bd.detach())
    assert cache.cursor.offsets == (1, 2, 3)
    assert stack.prime(1, cache) == (None, cache)
    _, cache = stack.prefill(x_bsd, cache)
    assert cache.cursor.offsets == (3, 4, 5)


@pytest.mark.parametrize("kind", ["add", "gates", "horizon"])
def test_a_stream_may_run_past_its_announced_end(kind):
    """Seven tokens where four were announced: the same rows and states however they are cut."""
    levels = RegisterConfig(stack=[S, E, C(4)], layers={1: [M, E]})
    stack = build(config(registers=levels, **KINDS[kind]))
    x_bsd = inputs(2, 7)
    expected = outcome(stack, in_pieces(7, length=4), x_bsd)
    for way in (in_pieces(4, 3, length=4), in_pieces(2, 3, 2, length=4)):
        assert_agree(expected, outcome(stack, way, x_bsd))
    last = outcome(stack, stepwise(4), x_bsd)
    assert_same(expected.values["y"][:, -1], last.values["y"][:, -1])
    assert expected.counts == last.counts


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_equals_pieces(kind, levels):
    """Values, states, cursors and gradients are the same however the sequence is cut."""
    stack = build(config(registers=LEVELS[levels], **KINDS[kind]))
    x_bsd = inputs(2, 6)
    expected = outcome(stack, lambda s, x, c: s.prefill(x, c, length=6), x_bsd)
    assert_agree(expected, outcome(stack, in_pieces(4, 2, length=6), x_bsd))
    assert_same(expected.values["y"], stack(x_bsd).detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", ["add", "gates", "gates_horizon"])
def test_steps_see_what_the_whole_sees(kind, levels, family):
    """A step returns its last row: the token's output, or that of the end behind it."""
    stack = build(config(family, registers=LEVELS[levels], **KINDS[kind]))
    x_bsd = inputs(2, 6)
    y_bsd, whole = stack.prefill(x_bsd, length=6)
    rows = [stack.prefill(x_bsd[:, :n], length=6)[0].shape[1] - 1 for n in range(1, 7)]
    stepped_bsd, cache = last_of_each(stack, x_bsd, None)
    assert_same(y_bsd[:, rows].detach(), stepped_bsd.detach())
    assert cache.cursor == whole.cursor
    for name, tensor in whole.to_tensors().items():
        if tensor.is_floating_point() and not name.endswith("angle_bha"):
            assert_same(tensor.detach(), cache.to_tensors()[name].detach(), name=name)
    grads = [
        parameter_gradients(stack, (y * y_bsd.new_tensor([1.0, -2.0] * 4)).sum())
        for y in (y_bsd[:, rows], stepped_bsd)
    ]
    for name, grad in grads[0].items():
        assert_same(grad, grads[1][name], "grad", name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", LEVELS)
def test_prime_then_step_is_step(levels, kind):
    """A prime only brings forward what the next step would have run."""
    stack = build(config(registers=LEVELS[levels], **KINDS[kind]))
    x_bsd = inputs(2, 6)
    plain = primed = stack.empty_cache(2, length=6)
    ran = 0
    for x_bd in x_bsd.unbind(1):
        y_bd, plain = stack.step(x_bd, plain)
        shown, primed = stack.prime(2, primed)
        ran += shown is not None
        assert stack.prime(2, primed)[0] is None
        primed_bd, primed = stack.step(x_bd, primed)
        assert_same(y_bd.detach(), primed_bd.detach())
        assert plain.cursor == primed.cursor
    for name, tensor in plain.to_tensors().items():
        if tensor.is_floating_point():
            assert_same(tensor.detach(), primed.to_tensors()[name].detach(), name=name)
    assert ran > 0 or levels == "unlanded"
    assert stack.prime(2, primed)[0] is None


def test_a_register_enters_every_stream():
    """Under gates the layer above sees the row itself, and later gates find it in all streams."""
    stack = build(config(registers=RegisterConfig(layers={1: [S]}), residual=GATES))
    x_bsd = inputs(2, 3)
    first, second = stack.layers
    h_bsd, streams = stack.gates["0"](first.mixer(first.norm(x_bsd)), x_bsd.unsqueeze(2))
    row_bsd = stack.layer_registers["1"].table.expand(2, 1, WIDTH)
    h_bsd = torch.cat([row_bsd, h_bsd], 1)
    streams = torch.cat([torch.stack([row_bsd, row_bsd], 2), streams], 1)
    expected, _ = stack.gates["1"](second.mixer(second.norm(h_bsd)), streams)
    assert_same(expected.detach(), stack(x_bsd).detach())


def test_prime_shows_the_last_register():
    """Before any token is known, the output is that of the start register, as in the whole."""
    stack = build(config(registers=RegisterConfig(stack=[S, S], layers={1: [S]})))
    y_bd, cache = stack.prime(2)
    whole = stack(inputs(2, 3))
    assert_same(whole[:, 2].detach(), y_bd.detach())
    assert cache.cursor.offsets == (2, 0, 3)
    assert cache.position_b.tolist() == [0, 0]


def test_prime_without_registers_runs_nothing():
    """The cache comes back as it was given, also if none was."""
    stack = build(config())
    assert stack.prime(2) == (None, None)
    cache = stack.empty_cache(2)
    assert stack.prime(2, cache)[1] is cache
    late = build(config(registers=RegisterConfig(stack=[C(3)])))
    assert late.prime(2) == (None, None)


def test_layers_the_prime_does_not_reach_keep_their_state():
    """A register of layer 1 runs layer 1 and what is above it; layer 0 waits for a token."""
    stack = build(config(real=3, registers=RegisterConfig(layers={1: [S]})))
    before = stack.empty_cache(2)
    _, after = stack.prime(2, before)
    moved = [
        not torch.equal(a.ssm_bhpr, b.ssm_bhpr)
        for a, b in zip(before.layers, after.layers, strict=True)
    ]
    assert moved == [False, True, True]


@pytest.mark.parametrize("marker", [M, E])
def test_middle_and_end_need_the_length(marker):
    """Without an announced length the message says where to give it."""
    stack = build(config(registers=RegisterConfig(stack=[marker])))
    with pytest.raises(ConfigError, match="needs the length of the whole sequence"):
        stack.prefill(inputs(2, 3))
    with pytest.raises(ConfigError, match="needs the length of the whole sequence"):
        stack.step(inputs(2, 1)[:, 0], stack.empty_cache(2))
    with pytest.raises(BackendError, match="no middle and no end"):
        stack.step_infinite(inputs(2, 1)[:, 0])


def test_fixed_point_has_forgotten_early_registers():
    """Start and custom registers do not change the limit."""
    with_rows = build(config(registers=RegisterConfig(stack=[S, C(3)])))
    without = build(config())
    without.load_state_dict(with_rows.state_dict(), strict=False)
    x_bd = inputs(2, 1)[:, 0]
    assert torch.equal(with_rows.step_infinite(x_bd), without.step_infinite(x_bd))


def test_what_registers_cannot_do_is_refused():
    """Packing, steps in place, foreign caches and a length nobody needs."""
    stack, plain = build(config(registers=RegisterConfig(stack=[S]))), build(config())
    x_bsd = inputs(1, 4)
    with pytest.raises(PackingError, match="not offered with them"):
        stack(x_bsd, cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(PackingError, match="not offered with them"):
        stack(x_bsd, seq_idx=torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(BackendError, match="the cursor of registers is a number"):
        stack.step_(x_bsd[:, 0], stack.empty_cache(1))
    with pytest.raises(CacheError, match="must be a StackCache; got ModelCache"):
        stack.prefill(x_bsd, plain.empty_cache(1))
    with pytest.raises(CacheError, match="must be a ModelCache; got StackCache"):
        plain.prefill(x_bsd, stack.empty_cache(1))
    with pytest.raises(ConfigError, match="this stack has none"):
        plain.empty_cache(1, length=4)
    with pytest.raises(ConfigError, match="the given cache knows it"):
        stack.prefill(x_bsd, stack.empty_cache(1), length=4)
    with pytest.raises(ConfigError, match="length must be positive; got 0"):
        stack.empty_cache(1, length=0)


def test_a_table_whose_rows_do_not_land_has_a_gradient_of_zero():
    """Replicas with sequences of other lengths then agree on the parameters that were used."""
    stack = build(config(registers=RegisterConfig(stack=[C(50)], layers={1: [C(60)]})))
    grads = parameter_gradients(stack, stack(inputs(2, 4)).sum())
    for name in ("registers.table", "layer_registers.1.table"):
        assert grads[name] is not None
        assert not bool(grads[name].any())


def test_state_with_a_cursor_is_a_value():
    """It forks, picks rows, joins rows that came equally far, and survives being taken apart."""
    stack = build(config(registers=LEVELS["all"]))
    x_bsd = inputs(3, 6)
    _, cache = stack.prefill(x_bsd[:, :3], length=6)
    expected = stack.prefill(x_bsd[:, 3:], cache)[0].detach()
    types = [type(layer) for layer in cache.layers]
    again = StackCache.from_tensors(cache.to_tensors(), types)
    assert again.cursor == cache.cursor
    assert_same(expected, stack.prefill(x_bsd[:, 3:], again)[0].detach())
    joined = StackCache.join([cache.rows([2]), cache.clone().rows([0, 1])])
    got = stack.prefill(x_bsd[[2, 0, 1], 3:], joined)[0].detach()
    assert_same(expected[[2, 0, 1]], got)
    with pytest.raises(CacheError, match="come equally far"):
        StackCache.join([cache, stack.empty_cache(3, length=6)])
    with pytest.raises(CacheError, match="'cursor' is missing"):
        StackCache.from_tensors({"position_b": cache.position_b}, [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Marker("begin"), "must be one of start, middle, end, custom"),
        (lambda: Marker("custom"), "custom markers have an index"),
        (lambda: Marker("start", 3), "others have none"),
        (lambda: C(-1), "must not be negative"),
        (RegisterConfig, "there must be a register"),
        (lambda: RegisterConfig(stack=["start"]), "every entry must be a Marker; got str"),
        (lambda: config(registers=RegisterConfig(layers={2: [S]})), r"must lie in 0..1; got 2"),
    ],
)
def test_mistakes_are_refused(make, message):
    """Kinds, indices and places are checked when the config is made."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_tables_are_drawn_small():
    """Rows start with deviation 0.02, in the dtype that was asked."""
    torch.manual_seed(0)
    table = Registers([S] * 400, WIDTH, dtype=torch.float64).table
    assert table.dtype == torch.float64
    assert float(table.detach().std()) == pytest.approx(0.02, rel=0.05)
