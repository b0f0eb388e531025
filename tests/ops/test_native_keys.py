"""Laws of the CPU kernel of keys and queries: threads, memory, half types, isolation, precision."""

import math

import pytest
import torch
from keys_cases import BORDERS, KINDS, keys, make
from torch import Tensor

from anymamba.ops.keys import keys_by_angle, keys_by_quaternion
from anymamba.ops.keys.native import BY_ANGLE, BY_QUATERNION
from kernels import NATIVE, running
from laws import assert_same, error_of, rand, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
ON_EVERY_SET = pytest.mark.parametrize("native", NATIVE)
KEYS = pytest.mark.parametrize("kind", KINDS)
NAMES = ("b", "c", "final")
GRADS = ("b", "c", "b_weight", "c_weight", "b_bias", "c_bias", "turn", "dt", "initial")


def run(kind: str, tensors: list[Tensor], cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """Return the outputs of the kernel and its gradients for fixed heads."""
    kernel = BY_QUATERNION if kind == "quaternion" else BY_ANGLE
    constants = (cu_seqlens, 1e-5, 1e-5, 1.5 if kind == "quaternion" else kind, True)
    b, c, b_weight, c_weight, *middle, turn, dt, initial = tensors
    groups = b.shape[3]
    turn = turn if kind == "quaternion" else turn.unsqueeze(2).expand(-1, -1, groups, -1)
    weights = (b_weight.expand(groups, -1), c_weight.expand(groups, -1))
    given = (b, c, *weights, *middle, turn, dt, initial)
    outputs = kernel.forward(*given, *constants)
    heads = [randn(*y.shape, seed=9, dtype=torch.float32).to(y.dtype) for y in outputs]
    return [*outputs, *kernel.backward(*heads, *given, *constants)]


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@ON_EVERY_SET
@KEYS
def test_results_do_not_depend_on_threads(kind, native, threads):
    """Outputs, last rotations and gradients are the same bits on 1, 2 and 5 threads."""
    tensors = make(kind, batch=2, length=150, heads=5, rank=2, dtype=torch.float32)
    results = []
    for count in (1, 2, 5, 2):
        threads(count)
        with running(native):
            results.append(run(kind, tensors))
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            assert torch.equal(expected, actual)


@ON_EVERY_SET
@KEYS
@pytest.mark.parametrize("packed", [False, True])
def test_every_element_is_written(packed, kind, native):
    """Poisoned memory (conftest fills it with NaN) is written all over, empty sequences too."""
    borders = torch.tensor(BORDERS) if packed else None
    tensors = make(
        kind,
        length=BORDERS[-1],
        rank=2,
        groups=2,
        size=22 if kind != "quaternion" else 20,
        rows=len(BORDERS) - 1 if packed else 1,
        dtype=torch.float32,
    )
    assert torch.empty(3).isnan().all()
    with running(native):
        for name, result in zip((*NAMES, *GRADS), run(kind, tensors, borders), strict=True):
            assert result.isfinite().all(), name


@ON_EVERY_SET
@KEYS
@pytest.mark.parametrize("sizes", [{"length": 0}, {"batch": 0}])
def test_no_tokens_give_parameters_no_gradient(sizes, kind, native):
    """Weights and biases receive zeros where no token, or no row, is there to send anything."""
    tensors = make(kind, rank=2, **sizes, dtype=torch.float32)
    with running(native):
        results = run(kind, tensors)
    for name, grad in zip(GRADS[2:6], results[5:9], strict=True):
        assert not grad.any(), name


@ON_EVERY_SET
@KEYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_equal_their_copies(dtype, kind, native):
    """Slices of a wide projection and transposed parameters give the bits of a copy."""
    tensors = make(kind, length=40, rank=2, size=16, channels=3, dtype=torch.float32)
    wide = randn(1, 40, 100, seed=1, dtype=dtype)
    tensors[0] = wide[..., 5:37].unflatten(-1, (2, 1, 16))
    tensors[1] = wide[..., 37:69].unflatten(-1, (2, 1, 16))
    tensors[4] = randn(16, 2, 2, seed=5, dtype=torch.float32).permute(2, 1, 0)
    tensors[7] = rand(2, 40, seed=8, dtype=torch.float32).T[None]
    if kind == "quaternion":
        tensors[6] = wide[..., 69:87].unflatten(-1, (2, 3, 3))
    copies = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    with running(native):
        for expected, actual in zip(run(kind, copies), run(kind, tensors), strict=True):
            assert torch.equal(expected, actual)


@ON_EVERY_SET
@KEYS
@pytest.mark.parametrize("sizes", [{"size": 24}, {"size": 72, "channels": 18}], ids=str)
def test_half_results_are_rounded_once(sizes, kind, native):
    """Bfloat16 results are the float32 ones of the same numbers, rounded."""
    tensors = make(kind, rank=2, **sizes, dtype=torch.float32)
    narrow = (0, 1, 6) if kind == "quaternion" else (0, 1)
    mixed = [x.bfloat16() if place in narrow else x for place, x in enumerate(tensors)]
    with running(native):
        halves = run(kind, mixed)
        singles = run(kind, [x.float() for x in mixed])
    for name, half, single in zip(NAMES, halves[:3], singles[:3], strict=True):
        assert torch.equal(half, single.to(half.dtype)), name
    for half, single in zip(halves[3:], singles[3:], strict=True):
        assert_same(single, half.bfloat16(), "grad")


@ON_EVERY_SET
@KEYS
def test_half_types_equal_float64(kind, native):
    """Bfloat16 tokens beside float32 parameters come close to float64 on the same numbers."""
    tensors = make(kind, batch=2, length=70, rank=2, dtype=torch.float32)
    narrow = (0, 1, 6) if kind == "quaternion" else (0, 1)
    mixed = [x.bfloat16() if place in narrow else x for place, x in enumerate(tensors)]
    results = []
    for given, impl in (([x.double() for x in mixed], "portable"), (mixed, "native")):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        with running(native):
            outputs = keys(kind, impl)(*leaves)
            heads = [randn(*y.shape, seed=9).to(y.dtype) for y in outputs]
            results.append([*outputs, *torch.autograd.grad(outputs, leaves, heads)])
    for want, got in zip(*results, strict=True):
        assert_same(want, got.bfloat16(), "grad")


@ON_EVERY_SET
@KEYS
def test_packed_sequences_never_meet(kind, native):
    """NaN in one sequence and its rotation changes no bit of the others."""
    borders = torch.tensor(BORDERS)
    tensors = make(kind, length=BORDERS[-1], rows=len(BORDERS) - 1, dtype=torch.float32)
    with running(native):
        clean = run(kind, tensors, borders)
        for place in (0, 1, 6, 7):
            tensors[place][:, 4:32] = torch.nan
        tensors[8][4] = torch.nan
        dirty = run(kind, tensors, borders)
    by_token, by_sequence = (0, 1, 3, 4, 9, 10), (2, 11)
    for place in (*by_token, *by_sequence):
        want, got = clean[place], dirty[place]
        for x in (want, got):
            (x[:, 4:32] if place in by_token else x[4]).zero_()
        assert torch.equal(want, got), place


@ON_EVERY_SET
@KEYS
@pytest.mark.parametrize("place", [0, 6, 7, 8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_travels_as_in_portable_code(value, place, kind, native):
    """NaN and infinity reach the keys, queries and rotations that they reach in plain torch."""
    tensors = make(kind, length=40, dtype=torch.float32)
    tensors[place].select(1, 0 if place == 8 else 5).select(-1, 0).fill_(value)
    with running(native):
        want, got = (keys(kind, impl)(*tensors) for impl in ("portable", "native"))
    for expected, actual in zip(want, got, strict=True):
        assert torch.equal(expected.isfinite(), actual.isfinite())


@ON_EVERY_SET
@pytest.mark.parametrize("dt", [50.0, 1e5, 1e12, 1e30])
def test_wild_step_sizes_stay_turns(dt, native):
    """However large the angle, a rotation keeps lengths."""
    tensors = make("interleaved", length=40, size=8, channels=4, dtype=torch.float32)
    tensors[7].fill_(dt)
    with running(native):
        b, _, final = keys_by_angle(*tensors, impl="native")
    still = keys_by_angle(*tensors, impl="portable", turns=False).b_bsmhr
    assert final.abs().max() <= math.pi + 1e-6
    assert error_of(still.norm(dim=-1), b.norm(dim=-1)) < 1e-5


@ON_EVERY_SET
@pytest.mark.slow
@pytest.mark.parametrize("step", ["random", "constant", "large"])
def test_a_million_angles_do_not_drift(step, native):
    """The last angle and the keys after a million tokens are those of the same steps in float64."""
    length = 1_000_000
    rate = torch.full((1, length, 1), math.pi if step == "large" else 1.234567)
    dt = rand(1, length, 1, seed=1, dtype=torch.float32)
    dt = torch.full_like(dt, 0.3333333) if step == "constant" else dt
    increment = (dt * rate).double()
    angle = increment.cumsum(1).flatten()
    raw = torch.ones(1, length, 1, 1, 2)
    weight, bias, zero = torch.ones(2), torch.zeros(1, 1, 2), torch.zeros(1, 1, 1)
    with running(native):
        b, _, final = keys_by_angle(
            raw, raw, weight, weight, bias, bias, rate, dt, zero, impl="native"
        )
    gap = torch.remainder(final.double().flatten() - angle[-1] + math.pi, 2 * math.pi) - math.pi
    assert gap.abs() < 8e-6
    expected = torch.stack([angle.cos() - angle.sin(), angle.sin() + angle.cos()], -1)
    assert error_of(expected, b.view(-1, 2)) < 8e-6


@ON_EVERY_SET
def test_long_products_of_quaternions_stay_units(native):
    """Unit length is kept over many tiles, and the product is that of float64."""
    tensors = make("quaternion", length=3000, size=8, channels=2)
    singles = [x.float() for x in tensors]
    with running(native):
        final = keys_by_quaternion(*singles, impl="native").final
    want = keys_by_quaternion(*(x.double() for x in singles), impl="portable").final
    assert error_of(torch.ones(1), final.norm(dim=-1).max()[None]) < 1e-6
    assert error_of(want, final) < 2e-5
