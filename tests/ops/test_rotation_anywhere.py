"""Rotations in half types, without memory, mapped and compiled; what they refuse."""

import math

import pytest
import torch
from rotation_cases import unit

from anymamba.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    PackingError,
    ShapeError,
)
from anymamba.ops.rotation import (
    angle_increment,
    cumulate_angles,
    cumulate_quaternions,
    quaternion_increment,
    quaternion_multiply,
    rotate_blocks,
    rotate_pairs,
)
from anymamba.ops.rotation.quaternion_scan import quaternion_scan
from anymamba.settings import override
from laws import assert_same, assert_ways_agree, rand, randn

tracing = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_in_float32(dtype):
    """Half-type activations give float32 angles and rotations, and results of their own dtype."""
    raw, dt = randn(2, 9, 1, 4, seed=1, dtype=dtype), rand(2, 9, 3, 1, seed=2, dtype=torch.float32)
    increment = angle_increment(raw, dt)
    assert increment.dtype == torch.float32
    assert_same(angle_increment(raw.float(), dt), increment)
    raw3 = randn(2, 9, 3, 2, 3, seed=3, dtype=dtype)
    assert quaternion_increment(raw3, dt[..., 0]).dtype == torch.float32
    assert (
        cumulate_angles(increment.to(dtype), torch.zeros(2, 3, 4)).final_bha.dtype is torch.float32
    )
    angle = randn(2, 9, 1, 4, seed=4, dtype=torch.float32)
    q = unit(2, 9, 1, 2, seed=5, dtype=torch.float32)
    ways = (
        (lambda x, t: rotate_pairs(x, t, "interleaved"), angle),
        (lambda x, t: rotate_pairs(x, t, "half_split"), angle),
        (rotate_blocks, q),
    )
    head = randn(2, 9, 3, 12, seed=7, dtype=dtype)
    for way, turn in ways:
        results = []
        for wide in (True, False):
            x = randn(2, 9, 3, 12, seed=6, dtype=dtype)
            leaves = [(x.float() if wide else x).requires_grad_(), turn.clone().requires_grad_()]
            out = way(*leaves)
            results.append((out, *torch.autograd.grad((out * head.to(out)).sum(), leaves)))
        assert results[1][0].dtype == dtype
        assert results[1][1].dtype == dtype
        assert results[1][2].dtype == torch.float32
        assert torch.equal(results[0][0].to(dtype), results[1][0])
        assert torch.equal(results[0][1].to(dtype), results[1][1])
        assert_same(results[0][2], results[1][2], "grad")


def test_autocast_does_not_narrow_the_scans():
    """Under bfloat16 autocast, float32 inputs are still computed in float32."""
    q, initial = unit(1, 20, 2, 2, seed=1, dtype=torch.float32), torch.ones(1, 2, 2, 4)
    angle, start = randn(1, 20, 2, 2, seed=3, dtype=torch.float32), torch.zeros(1, 2, 2)
    expected = *cumulate_quaternions(q, initial), *cumulate_angles(angle, start)
    with torch.autocast("cpu", torch.bfloat16):
        actual = *cumulate_quaternions(q, initial), *cumulate_angles(angle, start)
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("packed", [False, True])
def test_meta_tensors_give_shapes(packed):
    """Every function runs on tensors without data."""
    meta = {"device": "meta"}
    borders = torch.zeros(4, dtype=torch.int64, **meta) if packed else None
    rows = 3 if packed else 1
    x, q = torch.empty(1, 50, 2, 8, **meta), torch.empty(1, 50, 2, 2, 4, **meta)
    angle = torch.empty(1, 50, 2, 3, **meta)
    scan = cumulate_angles(angle, torch.empty(rows, 2, 3, **meta), cu_seqlens=borders)
    assert scan.angle_bsha.shape == (1, 50, 2, 3)
    assert scan.final_bha.shape == (rows, 2, 3)
    scan = cumulate_quaternions(q, torch.empty(rows, 2, 2, 4, **meta), cu_seqlens=borders)
    assert scan.quaternion_bshj4.shape == q.shape
    assert scan.final_bhj4.shape == (rows, 2, 2, 4)
    for turned in (rotate_pairs(x, angle, "half_split"), rotate_blocks(x, q)):
        assert turned.shape == x.shape
    assert quaternion_increment(torch.empty(5, 2, 2, 3, **meta), x[0, :5, :, 0]).shape[-1] == 4


@pytest.mark.parametrize("borders", [None, (0, 0, 4, 9)])
def test_vmap_equals_a_loop(borders):
    """Mapping a scan over an extra axis equals calling it for each entry, gradients too."""
    cu_seqlens = None if borders is None else torch.tensor(borders)
    rows = 1 if borders is None else len(borders) - 1
    q, initial = unit(3, 1, 9, 2, 1, seed=1), unit(rows, 2, 1, seed=2)

    def one(q, initial):
        return torch.cat(
            [x.flatten() for x in cumulate_quaternions(q, initial, cu_seqlens=cu_seqlens)]
        )

    def grad(q, initial):
        return torch.func.grad(lambda q: (one(q, initial) ** 3).sum())(q)

    for way in (one, grad):
        expected = torch.stack([way(x, initial) for x in q])
        assert_same(expected, torch.vmap(way, in_dims=(0, None))(q, initial))


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_vmap_of_a_rotation_equals_a_loop(mapped):
    """Mapping a rotation over any of its arguments equals a loop, gradients too."""
    ways = (
        (lambda x, t: rotate_pairs(x, t, "interleaved"), (2,)),
        (lambda x, t: rotate_pairs(x, t, "half_split"), (2,)),
        (rotate_blocks, (2, 4)),
    )
    for way, inner in ways:
        x = randn(3, 3, 5, 8, seed=1) if mapped[0] is not None else randn(3, 5, 8, seed=1)
        turn = randn(3, 5, *inner, seed=2) if mapped[1] is not None else randn(5, *inner, seed=2)

        def grads(x, turn, way=way):
            return torch.func.grad(lambda *a: (way(*a) ** 3).sum(), (0, 1))(x, turn)

        def both(x, turn, way=way):
            return way(x, turn), *grads(x, turn)

        pairs = [
            (
                x if mapped[0] is None else x.select(mapped[0], i),
                turn if mapped[1] is None else turn[i],
            )
            for i in range(3)
        ]
        expected = [torch.stack(parts) for parts in zip(*(both(*p) for p in pairs), strict=True)]
        for want, got in zip(expected, torch.vmap(both, in_dims=mapped)(x, turn), strict=True):
            assert_same(want, got)


@pytest.mark.parametrize("borders", [None, (0, 0, 4, 9)])
def test_operator_registration_is_sound(borders):
    """Schema, fake and body agree, for the forward and for the backward."""
    cu_seqlens = None if borders is None else torch.tensor(borders)
    rows = 2 if borders is None else len(borders) - 1
    inputs = unit(2 if borders is None else 1, 9, 2, 3, seed=1), unit(rows, 2, 3, seed=2)
    tests = ("test_schema", "test_faketensor")
    arguments = (*inputs, cu_seqlens, "portable")
    torch.library.opcheck(quaternion_scan.fwd_op, arguments, test_utils=tests)
    heads = [torch.ones_like(x) for x in inputs]
    torch.library.opcheck(quaternion_scan.bwd_op, (*heads, *arguments), test_utils=tests)


def counting_backend(graphs: list):
    """Return a compiler backend that notes each graph it is given."""
    eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph)
        return eager(graph, inputs)

    return backend


def complex_way(raw, dt, initial, x, cu_seqlens=None):
    """Run the whole complex rotation."""
    scan = cumulate_angles(angle_increment(raw, dt), initial, cu_seqlens=cu_seqlens)
    x = rotate_pairs(x, scan.angle_bsha, "interleaved")
    x = rotate_pairs(x, scan.angle_bsha, "half_split")
    return x, scan.final_bha.cos(), scan.final_bha.sin()


def quaternion_way(raw, dt, initial, x, cu_seqlens=None):
    """Run the whole quaternion rotation."""
    scan = cumulate_quaternions(quaternion_increment(raw, dt), initial, cu_seqlens=cu_seqlens)
    return rotate_blocks(x, scan.quaternion_bshj4), scan.final_bhj4


@tracing
@pytest.mark.parametrize("kind", ["complex", "quaternion"])
def test_compiles_once_for_many_lengths(kind):
    """torch.compile(fullgraph) makes one graph for the first length and one for all others."""
    torch._dynamo.reset()
    graphs = []
    way, wide, inner = (
        (complex_way, (1, 2), (3, 2))
        if kind == "complex"
        else (quaternion_way, (3, 2, 3), (3, 2, 4))
    )
    compiled = torch.compile(way, fullgraph=True, backend=counting_backend(graphs))
    for length in (9, 4, 32, 64, 65, 1100):
        dt = rand(2, length, 3, *[1] * (kind == "complex"), seed=2)
        raw, x = randn(2, length, *wide, seed=1), randn(2, length, 3, 12, seed=4)
        assert_ways_agree(way, compiled, (raw, dt, randn(2, *inner, seed=3), x))
    assert len(graphs) == 2
    torch._dynamo.reset()


@tracing
@pytest.mark.parametrize("kind", ["complex", "quaternion"])
def test_compiled_packed_equals_eager(kind):
    """A packed call compiles without a break and gives the eager results."""
    torch._dynamo.reset()
    way, wide, inner = (
        (complex_way, (1, 2), (3, 2))
        if kind == "complex"
        else (quaternion_way, (3, 2, 3), (3, 2, 4))
    )
    compiled = torch.compile(way, fullgraph=True, backend="aot_eager")
    borders = torch.tensor([0, 3, 3, 65])
    dt = rand(1, 65, 3, *[1] * (kind == "complex"), seed=2)
    inputs = randn(1, 65, *wide, seed=1), dt, randn(3, *inner, seed=3), randn(1, 65, 3, 12, seed=4)
    assert_ways_agree(lambda *x: way(*x, borders), lambda *x: compiled(*x, borders), inputs)
    with torch.no_grad():
        assert_same(way(*inputs, borders)[0], compiled(*inputs, borders)[0])
    torch._dynamo.reset()


def test_rejects_wrong_pairs():
    """Odd widths, too many angles, axes that do not broadcast and unknown pairings are refused."""
    x = torch.zeros(2, 5, 8)
    with pytest.raises(ShapeError, match="even size"):
        rotate_pairs(x[..., :7], x[..., :2], "interleaved")
    with pytest.raises(ShapeError, match="at most one entry per pair"):
        rotate_pairs(x, x[..., :5], "interleaved")
    with pytest.raises(ShapeError, match="must broadcast"):
        rotate_pairs(x, torch.zeros(3, 5, 2), "interleaved")
    with pytest.raises(ShapeError, match="must broadcast"):
        rotate_pairs(x, torch.zeros(1, 2, 5, 2), "interleaved")
    with pytest.raises(ConfigError, match="pairing"):
        rotate_pairs(x, x[..., :2], "neox")
    with pytest.raises(DtypeError, match="angle"):
        rotate_pairs(x, x[..., :2].double(), "interleaved")
    with pytest.raises(DeviceError, match="angle"):
        rotate_pairs(x, x[..., :2].to("meta"), "interleaved")
    with pytest.raises(DtypeError, match="tensors"):
        rotate_pairs(x, 0.5, "interleaved")


def test_rejects_wrong_quaternions():
    """Axes that are not 4 (or 3) and blocks that do not fit are refused."""
    x = torch.zeros(2, 5, 8)
    with pytest.raises(ShapeError, match="size 4"):
        rotate_blocks(x, torch.zeros(2, 5, 2, 3))
    with pytest.raises(ShapeError, match="need 12 entries"):
        rotate_blocks(x, torch.zeros(2, 5, 3, 4))
    with pytest.raises(ShapeError, match="must broadcast"):
        rotate_blocks(x, torch.zeros(3, 5, 2, 4))
    with pytest.raises(ShapeError, match="size 3"):
        quaternion_increment(torch.zeros(2, 2, 4), torch.zeros(2))
    with pytest.raises(ShapeError, match="must broadcast"):
        quaternion_multiply(torch.zeros(2, 4), torch.zeros(3, 4))
    with pytest.raises(DtypeError, match="must have the dtype"):
        quaternion_multiply(torch.zeros(2, 4), torch.zeros(2, 4).double())


def test_rejects_wrong_scans():
    """Sizes, borders, dtypes and implementations that cannot be are refused with the reason."""
    q, initial = torch.ones(1, 9, 2, 2, 4), torch.ones(1, 2, 2, 4)
    angle, start = torch.ones(1, 9, 2, 2), torch.ones(1, 2, 2)
    borders = torch.tensor([0, 4, 9])
    with pytest.raises(ShapeError, match="heads"):
        cumulate_quaternions(q, initial[:, :1])
    with pytest.raises(ShapeError, match="batch"):
        cumulate_angles(angle, start.expand(2, 2, 2))
    for scan, tokens, first in (
        (cumulate_quaternions, q, initial),
        (cumulate_angles, angle, start),
    ):
        with pytest.raises(ShapeError, match="one row per packed sequence"):
            scan(tokens, first, cu_seqlens=borders)
        two = first.expand(2, *first.shape[1:])
        with pytest.raises(PackingError, match="must end at"):
            scan(tokens, two, cu_seqlens=borders - torch.tensor([0, 0, 1]))
        with pytest.raises(PackingError, match="batch must be 1"):
            scan(tokens.expand(2, *tokens.shape[1:]), two, cu_seqlens=borders)
        with pytest.raises(DtypeError, match="initial"):
            scan(tokens, first.half())
        with override(deny_nan=True), pytest.raises(NonFiniteError, match="increment"):
            scan(tokens * math.nan, first)
    with pytest.raises(BackendError, match="no native kernel exists"):
        cumulate_quaternions(q, initial, impl="native")
    with pytest.raises(ConfigError, match="impl"):
        cumulate_quaternions(q, initial, impl="fast")
