"""Laws of a block's tail and of the gated product, on the portable code and on every kernel."""

import pytest
import torch
from tail_cases import CASES, make, ranks_of, tail
from torch import Tensor

from anymamba.errors import BackendError, ConfigError, DtypeError, ShapeError
from anymamba.ops import gated_product, gated_tail
from anymamba.ops.tail import portable
from kernels import PRECISIONS
from laws import assert_same, assert_ways_agree, randn

EVERY_CASE = pytest.mark.parametrize("case", CASES)


@EVERY_CASE
@PRECISIONS
def test_tail_equals_reference(case, dtype):
    """Values and gradients of every tail of a block, skip per head."""
    inputs = make(case, 2, 9, 3, 4, dtype=dtype)
    assert_ways_agree(tail(case, "reference"), tail(case, "auto"), inputs)


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_their_dtype(case, dtype):
    """The output has the dtype of y; sums are wide, so the formula is met to a rounding."""
    inputs = make(case, 1, 9, 3, 4, dtype=dtype)
    expected = tail(case, "reference")(*(x.double() for x in inputs))[0].to(dtype)
    for impl in ("portable", "auto"):
        assert_same(expected, tail(case, impl)(*inputs)[0])


@PRECISIONS
def test_skip_may_be_per_channel(dtype):
    """A weight per channel: values and gradients."""
    y, x, z, _ = make("gate", 2, 5, 3, 4, dtype=dtype)

    def way(impl):
        return lambda *tensors: [gated_tail(*tensors, impl=impl)]

    inputs = [y, x, z, randn(3, 4, seed=8, dtype=dtype)]
    assert_ways_agree(way("reference"), way("auto"), inputs)


@EVERY_CASE
def test_any_leading_axes(case):
    """A single token is a row of a sequence."""
    y, x, z, *rest = make(case, 2, 5, 3, 4, dtype=torch.float64)
    (whole,) = tail(case, "portable")(y, x, z, *rest)
    (token,) = tail(case, "portable")(y[1, 2], x[1, 2], z[1, 2], *rest)
    assert_same(whole[1, 2], token)


@EVERY_CASE
def test_gradients_equal_finite_differences(case):
    """First and second derivatives of every input."""
    inputs = [x.requires_grad_() for x in make(case, 1, 2, 2, 2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(tail(case, "auto"), inputs)
    assert torch.autograd.gradgradcheck(tail(case, "auto"), inputs)


@EVERY_CASE
@PRECISIONS
def test_vmap_equals_loop(case, dtype):
    """Mapping over activations and parameters at once, values and per-example gradients."""
    inputs = [torch.stack([x, 2 * x, -x]) for x in make(case, 1, 3, 2, 4, dtype=dtype)]

    def gradients(*tensors):
        def loss(*t):
            return tail(case, "auto")(*t)[0].square().sum()

        return torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*tensors)

    for function in (tail(case, "auto"), gradients):
        loop = [function(*(t[row] for t in inputs)) for row in range(3)]
        for place, got in enumerate(torch.vmap(function)(*inputs)):
            assert_same(torch.stack([results[place] for results in loop]), got, "grad")


@EVERY_CASE
@PRECISIONS
def test_compiled_equals_eager(case, dtype):
    """The compiler sees a graph without breaks, and its gradients are the eager ones."""
    torch._dynamo.reset()
    traced = torch.compile(tail(case, "auto"), backend="aot_eager", fullgraph=True)
    assert_ways_agree(tail(case, "auto"), traced, make(case, 1, 5, 2, 4, dtype=dtype))


@EVERY_CASE
def test_meta_tensors_give_shapes(case):
    """Shapes and dtypes can be asked for without memory."""
    inputs = [x.to("meta") for x in make(case, 2, 5, 3, 4, dtype=torch.bfloat16)]
    (out,) = tail(case, "auto")(*inputs)
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, 12), torch.bfloat16, "meta")


def operator_arguments(case: str, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    """Return the tensors and the constants that the registered operators take."""
    y, x, z, _, *rest = make(case, 1, 5, 2, 4, dtype=dtype)
    one = torch.ones(1, dtype=dtype)
    ranked = ranks_of(case) > 1
    order = "none" if "norm" not in case else case.rpartition("_")[2]
    tensors = [
        y[0].flatten(-2),
        x[0].flatten(-2),
        z[0].flatten(-2),
        randn(8, seed=4, dtype=dtype),
        one if order == "none" else rest[-1],
        rest[0].flatten(-2) if ranked else one[None],
        rest[1].flatten(-2) if ranked else one[None],
    ]
    return tensors, (1e-5, 4, order, ranked)


@EVERY_CASE
def test_operators_obey_their_schemas(case):
    """Bodies, fakes and schemas of the registered operators agree."""
    tensors, constants = operator_arguments(case, torch.float32)
    ops, constants = torch.ops.anymamba, (*constants, "portable")
    torch.library.opcheck(ops.gated_tail_fwd.default, (*tensors, *constants))
    torch.library.opcheck(ops.gated_tail_bwd.default, (tensors[2], *tensors, *constants))


@EVERY_CASE
def test_portable_backward_equals_autograd(case):
    """The hand-written backward of any device gives the gradients of the formula."""
    tensors, constants = operator_arguments(case, torch.float64)
    leaves = [x.requires_grad_() for x in tensors]
    (out,) = portable.tail(*leaves, *constants)
    head = randn(*out.shape, seed=9)
    wanted = torch.autograd.grad(out, leaves, head, materialize_grads=True)
    for want, got in zip(wanted, portable.tail_backward(head, *tensors, *constants), strict=True):
        assert_same(want, got.detach(), "grad")


@PRECISIONS
def test_product_equals_reference(dtype):
    """Both halves of one projection: values and gradients."""

    def way(impl):
        return lambda both: [gated_product(*both.chunk(2, dim=-1), impl=impl)]

    both = randn(2, 5, 14, seed=1, dtype=dtype)
    assert_ways_agree(way("reference"), way("auto"), [both])
    assert_ways_agree(way("reference"), way("auto"), [both[0, 0]])
    for empty in (both[..., :0], both[:0], both[0, 0, :0]):
        assert_ways_agree(way("reference"), way("auto"), [empty])


def test_product_transforms_and_schemas():
    """Finite differences twice, vmap, compile, and the registered operators."""
    value, gate = (randn(3, 4, seed=seed).requires_grad_() for seed in (1, 2))
    assert torch.autograd.gradcheck(gated_product, [value, gate])
    assert torch.autograd.gradgradcheck(gated_product, [value, gate])
    assert_same(gated_product(value, gate), torch.vmap(gated_product)(value, gate))
    traced = torch.compile(gated_product, backend="aot_eager", fullgraph=True)
    assert_same(gated_product(value, gate), traced(value, gate))
    pair = value.detach().float(), gate.detach().float()
    torch.library.opcheck(torch.ops.anymamba.gated_product_fwd.default, (*pair, "portable"))
    arguments = (pair[0], *pair, "portable")
    torch.library.opcheck(torch.ops.anymamba.gated_product_bwd.default, arguments)
    wanted = torch.autograd.grad(gated_product(value, gate).sum(), [value, gate])
    given = portable.product_backward(torch.ones_like(value), value, gate)
    for want, got in zip(wanted, given, strict=True):
        assert_same(want, got.detach(), "grad")


def test_rejects_what_does_not_fit():
    """Each mistake is refused with a message that names the argument."""
    y, x, z, skip, spread, merge, weight = make("ranks_norm_after", 1, 5, 2, 4, torch.float64)
    ranks = {"spread_mhp": spread, "merge_mhp": merge}
    with pytest.raises(ShapeError, match="y must have the axes"):
        gated_tail(y[0, 0, 0], x, z, skip)
    with pytest.raises(ShapeError, match="x must have shape"):
        gated_tail(y, x[:, 1:], z, skip, **ranks)
    with pytest.raises(ShapeError, match="z must have shape"):
        gated_tail(y, x, z[..., 1:], skip, **ranks)
    with pytest.raises(ShapeError, match="skip must have shape"):
        gated_tail(y, x, z, weight, **ranks)
    with pytest.raises(ShapeError, match="spread and merge must come together"):
        gated_tail(y, x, z, skip, spread_mhp=spread)
    with pytest.raises(ShapeError, match="must be there for several ranks"):
        gated_tail(y, x, z, skip)
    with pytest.raises(ConfigError, match="group_size must divide"):
        gated_tail(y, x, z, skip, weight_i=weight, group_size=3, **ranks)
    with pytest.raises(ConfigError, match="eps must be positive"):
        gated_tail(y, x, z, skip, weight_i=weight, eps=0.0, **ranks)
    with pytest.raises(DtypeError, match="z must have the dtype of y"):
        gated_tail(y, x, z.float(), skip, **ranks)
    with pytest.raises(ConfigError, match="impl must be one of"):
        gated_product(z, z, impl="fast")
    with pytest.raises(BackendError, match="impl='native' cannot serve"):
        gated_product(z, z, impl="native")
    with pytest.raises(ShapeError, match="value and gate must have one shape"):
        gated_product(z, z[..., 1:])
