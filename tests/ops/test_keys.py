"""Laws of keys and queries on every implementation: by angle and by quaternion."""

import pytest
import torch
from keys_cases import BORDERS, KINDS, keys, make

from anymamba.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    PackingError,
    ShapeError,
)
from anymamba.ops.keys import keys_by_angle, keys_by_quaternion
from anymamba.ops.keys.schema import KEYS_BY_ANGLE, KEYS_BY_QUATERNION
from kernels import EVERY_KIND, NATIVE, dtype_of, is_native, running
from laws import assert_same, assert_ways_agree, randn

KEYS = pytest.mark.parametrize("kind", KINDS)
IMPLS = pytest.mark.parametrize("impl", EVERY_KIND)


def called(impl: str) -> str:
    """Return the argument that asks for a kind of implementation."""
    return "native" if is_native(impl) else impl


@IMPLS
@KEYS
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_fast_forms_equal_reference(length, kind, impl):
    """Values, last rotations and every gradient equal those of the token-by-token definition."""
    tensors = make(kind, batch=2, length=length, dtype=dtype_of(impl))
    with running(impl):
        assert_ways_agree(keys(kind, "reference"), keys(kind, called(impl)), tensors)


@IMPLS
@KEYS
@pytest.mark.parametrize(
    "sizes",
    [
        {"rank": 4, "groups": 2, "heads": 6, "size": 24, "channels": 5},
        {"size": 4, "channels": 1, "heads": 1},
        {"size": 64, "channels": 16},
        {"size": 36, "channels": 9, "heads": 3},
        {"size": 136, "channels": 17, "heads": 2},
    ],
)
def test_sizes_need_not_fit_vectors(sizes, kind, impl):
    """Ranks, groups, whole and partial rotation, and odd numbers of turning units."""
    tensors = make(kind, **sizes, dtype=dtype_of(impl))
    with running(impl):
        assert_ways_agree(keys(kind, "reference"), keys(kind, called(impl)), tensors)


@IMPLS
@KEYS
def test_every_pair_may_turn(kind, impl):
    """A rotation that covers the whole state leaves no entry behind."""
    tensors = make(kind, size=24, channels=6 if kind == "quaternion" else 12, dtype=dtype_of(impl))
    with running(impl):
        assert_ways_agree(keys(kind, "reference"), keys(kind, called(impl)), tensors)


@IMPLS
@KEYS
@pytest.mark.parametrize("size", [22, 5])
def test_nothing_may_turn(size, kind, impl):
    """Without turning units the rotation is still accumulated and receives its gradient."""
    tensors = make(kind, size=size, channels=1, dtype=dtype_of(impl))
    with running(impl):
        assert_ways_agree(
            keys(kind, "reference", turns=False), keys(kind, called(impl), turns=False), tensors
        )


@IMPLS
@KEYS
def test_packed_equals_each_sequence_alone(kind, impl):
    """Every sequence starts from its own rotation; empty ones keep theirs."""
    borders = torch.tensor(BORDERS)
    tensors = make(kind, length=BORDERS[-1], rows=len(BORDERS) - 1, dtype=dtype_of(impl))
    with running(impl):
        assert_ways_agree(
            keys(kind, "reference", cu_seqlens=borders),
            keys(kind, called(impl), cu_seqlens=borders),
            tensors,
        )


@IMPLS
@KEYS
def test_pieces_equal_the_whole(kind, impl):
    """Two pieces, the second from the last rotation of the first, equal one call."""
    tensors = make(kind, batch=2, length=77, dtype=dtype_of(impl))
    run = keys_by_quaternion if kind == "quaternion" else keys_by_angle
    options = {} if kind == "quaternion" else {"pairing": kind}

    def whole(*given):
        return run(*given, impl=called(impl), **options)[:2]

    def pieces(b, c, b_weight, c_weight, b_bias, c_bias, turn, dt, state):
        parts = []
        for piece in (slice(0, 41), slice(41, None)):
            *keys_and_queries, state = run(
                *(b[:, piece], c[:, piece], b_weight, c_weight, b_bias, c_bias),
                *(turn[:, piece], dt[:, piece], state),
                impl=called(impl),
                **options,
            )
            parts.append(keys_and_queries)
        return [torch.cat(both, 1) for both in zip(*parts, strict=True)]

    with running(impl):
        assert_ways_agree(whole, pieces, tensors)


@KEYS
def test_gradients_pass_gradcheck(kind):
    """The portable form, as the operator's body, has the derivative of its values."""
    tensors = make(kind, length=3, size=8, channels=1, heads=2)
    operator = KEYS_BY_QUATERNION if kind == "quaternion" else KEYS_BY_ANGLE
    constants = (None, 1e-5, 1e-5, 1.5 if kind == "quaternion" else kind, True)

    def run(*leaves):
        b, c, b_weight, c_weight, *middle, turn, dt, initial = leaves
        turn = turn if kind == "quaternion" else turn.unsqueeze(2)
        given = (b, c, b_weight[None], c_weight[None], *middle, turn, dt, initial)
        return operator(*given, *constants, kernel="portable")

    leaves = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(run, leaves)


@KEYS
@pytest.mark.parametrize("kernel", ["portable", "auto"])
def test_operator_passes_opcheck(kind, kernel):
    """Schema, fake and registration agree with what the operator does."""
    operator = KEYS_BY_QUATERNION if kind == "quaternion" else KEYS_BY_ANGLE
    tensors = make(kind, length=35, dtype=torch.float32)
    if kernel == "auto" and not NATIVE:
        pytest.skip("no compiled kernels")
    b, c, b_weight, c_weight, *middle, turn, dt, initial = tensors
    turn = turn if kind == "quaternion" else turn.unsqueeze(2)
    constants = (None, 1e-5, 1e-5, 1.5 if kind == "quaternion" else kind, True, kernel)
    given = (b, c, b_weight[None], c_weight[None], *middle, turn, dt, initial, *constants)
    torch.library.opcheck(operator.fwd_op, given, test_utils=("test_schema", "test_faketensor"))


@KEYS
def test_second_derivatives_equal_the_portable_ones(kind):
    """The kernel chosen by "auto" leaves second derivatives to the portable form."""
    tensors = make(kind, length=5, dtype=torch.float32)
    results = []
    for impl in ("portable", "auto"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        # Weighed by a head: plain squares would not feel a rotation.
        outputs = keys(kind, impl)(*leaves)
        heads = [randn(*y.shape, seed=9, dtype=y.dtype) for y in outputs]
        loss = sum((y * head).square().sum() for y, head in zip(outputs, heads, strict=True))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        total = sum(grad.square().sum() for grad in first)
        results.append(torch.autograd.grad(total, leaves))
    for want, got in zip(*results, strict=True):
        assert_same(want, got, "grad")


@KEYS
def test_a_mapped_axis_equals_a_loop(kind):
    """Mapped tokens and mapped weights give what single calls give."""
    one, other = make(kind, dtype=torch.float32), make(kind, dtype=torch.float32)
    other = [randn(*x.shape, seed=20 + k, dtype=torch.float32) for k, x in enumerate(other)]
    other[7] = other[7].abs()
    run = keys(kind, "auto")
    mapped = torch.func.vmap(run)(*(torch.stack(both) for both in zip(one, other, strict=True)))
    for want, got in zip(zip(run(*one), run(*other), strict=True), mapped, strict=True):
        assert_same(torch.stack(want), got)


@KEYS
def test_one_graph_serves_the_operator(kind):
    """The compiled function has no break and equals the eager one, with gradients."""
    tensors = make(kind, dtype=torch.float32)
    run = keys(kind, "auto")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_ways_agree(run, compiled, tensors)


@KEYS
def test_rejects_more_turning_units_than_fit(kind):
    """The turning part must fit the state."""
    tensors = make(kind, size=8, channels=5)
    with pytest.raises(ShapeError, match="state must hold the turning part"):
        keys(kind, "auto")(*tensors)


@KEYS
def test_rejects_what_does_not_fit(kind):
    """Borders, groups, eps, dtypes, devices and names are checked at the door."""
    tensors = make(kind, length=4)
    run = keys(kind, "auto", cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(PackingError, match="end at the sequence length 4"):
        run(*tensors)
    with pytest.raises(ShapeError, match="one row per packed sequence"):
        keys(kind, "auto", cu_seqlens=torch.tensor([0, 2, 4]))(*tensors)
    with pytest.raises(ConfigError, match="groups must divide heads"):
        keys(kind, "auto")(*make(kind, groups=2, heads=3))
    with pytest.raises(ConfigError, match="eps must be positive"):
        keys(kind, "auto", eps=(1e-5, 0.0))(*tensors)
    with pytest.raises(ConfigError, match="impl must be one of"):
        keys(kind, "fast")(*tensors)
    with pytest.raises(DtypeError, match="c must have the dtype of b"):
        keys(kind, "auto")(tensors[0], tensors[1].float(), *tensors[2:])
    for place, name in ((2, "b_weight"), (3, "c_weight"), (4, "b_bias")):
        elsewhere = [x.to("meta") if at == place else x for at, x in enumerate(tensors)]
        with pytest.raises(DeviceError, match=f"{name} must be on the device of b"):
            keys(kind, "auto")(*elsewhere)
    with pytest.raises(BackendError, match="impl='native' cannot serve this call"):
        keys(kind, "native")(*tensors)


def test_rejects_an_unknown_pairing():
    """Only two ways to pair entries exist."""
    with pytest.raises(ConfigError, match="pairing must be one of"):
        keys_by_angle(*make("interleaved"), pairing="diagonal")
