"""Laws of the norms, and the golden values of the elementwise functions beside them."""

import pytest
import torch
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError
from anymamba.ops.norm import add_layer_norm, add_rms_norm, blocked, gated_rms_norm, rms_norm
from anymamba.ops.norm.reference import (
    gated_rms_norm_reference,
    layer_norm_reference,
    rms_norm_reference,
)
from anymamba.ops.numerics import heavy_tail
from golden import check_golden, golden_case
from laws import TOLERANCE, assert_same, assert_ways_agree, error_of, randn

NORMS = "ops/norms_activations"
WIDTH = 12


@pytest.fixture(params=["plain", "blocks"])
def blocks(request, monkeypatch):
    """Run a law on the plain formula, and on blocks of two rows that leave a short last one."""
    if request.param == "blocks":
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 2 * WIDTH)


def make(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return x, z and a weight."""
    return [
        randn(*shape, seed=1, dtype=dtype),
        randn(*shape, seed=2, dtype=dtype),
        randn(shape[-1], seed=3, dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.usefixtures("blocks")
def test_gated_norm_equals_official(before, group, dtype):
    """Values and gradients of the official gated norm, in both orders, with and without groups."""
    case = golden_case(NORMS, f"rmsnorm_gated_before{before}_group{group}")
    inputs = case.cast(dtype)
    y = gated_rms_norm(**inputs, group_size=group or None, norm_before_gate=bool(before))
    check_golden(case, inputs, {"y": y})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.usefixtures("blocks")
def test_add_norm_equals_official(kind, dtype):
    """Values and gradients of the official residual add and norm."""
    case = golden_case(NORMS, f"add_{kind}norm")
    inputs = case.cast(dtype)
    way = add_rms_norm if kind == "rms" else add_layer_norm
    y, residual = way(**inputs)
    check_golden(case, inputs, {"y": y, "residual_out": residual})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_heavy_tail_equals_official(dtype):
    """Values and gradients of the activation of A."""
    case = golden_case(NORMS, "heavy_tail")
    inputs = case.cast(dtype)
    check_golden(case, inputs, {"y": heavy_tail(inputs["x"])})


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("group_size", [None, 1, 3, WIDTH])
@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (5, WIDTH), (2, 3, 5, WIDTH)])
def test_norm_equals_loop_over_groups(shape, group_size):
    """Any number of leading axes; groups never see each other."""
    x, _, weight = make(*shape)
    assert_ways_agree(
        lambda x, w: [rms_norm_reference(x, w, group_size=group_size)],
        lambda x, w: [rms_norm(x, w, group_size=group_size)],
        [x, weight],
    )


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group_size", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gated_norm_equals_reference(dtype, group_size, before):
    """Outputs and all gradients, in every dtype."""
    options = {"group_size": group_size, "norm_before_gate": before}
    inputs = make(2, 5, WIDTH, dtype=dtype)
    assert gated_rms_norm(*inputs, **options).dtype == dtype
    assert_ways_agree(
        lambda *t: [gated_rms_norm_reference(*t, **options)],
        lambda *t: [gated_rms_norm(*t, **options)],
        inputs,
    )


@pytest.mark.usefixtures("blocks")
def test_eps_is_inside_the_root():
    """`x / sqrt(mean(x^2) + eps)`: a large eps decides the result."""
    x = torch.full((3, WIDTH), 3.0)
    assert_same(torch.full((3, WIDTH), 0.6), rms_norm(x, torch.ones(WIDTH), eps=16.0))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_a_zero_slice_is_finite(dtype):
    """Eps inside the root keeps an all-zero row harmless in every norm and order."""
    x, z, weight = (t.requires_grad_() for t in make(5, WIDTH, dtype=dtype))
    mask = torch.ones(5, 1, dtype=dtype)
    mask[2] = 0
    outputs = [
        rms_norm(x * mask, weight),
        gated_rms_norm(x * mask, z * mask, weight, norm_before_gate=True),
        gated_rms_norm(x * mask, z, weight, norm_before_gate=False, group_size=3),
        add_rms_norm(x * mask, None, weight).y,
        add_layer_norm(x * mask, None, weight, None).y,
    ]
    for y in outputs:
        assert (y[2] == 0).all()
        for grad in torch.autograd.grad(y.sum(), [x, z, weight], materialize_grads=True):
            assert grad.isfinite().all()


@pytest.mark.usefixtures("blocks")
def test_float16_statistics_do_not_overflow():
    """Squares of numbers above 256 do not fit float16; the norm does."""
    x = torch.full((3, WIDTH), 4096.0, dtype=torch.float16).requires_grad_()
    y = rms_norm(x, torch.ones(WIDTH, dtype=torch.float16))
    assert torch.equal(y, torch.ones_like(y))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("impl", ["portable", "auto", "reference"])
@pytest.mark.parametrize("order", [None, True, False])
def test_gradients_of_large_numbers_are_those_of_float64(order, impl):
    """At 1e18 squares still fit float32, and the cube of the scale is not needed."""
    large = 1e18

    def gradient(dtype):
        x, z, weight = (t.to(dtype) for t in make(5, WIDTH, dtype=torch.float32))
        x = (large * x).requires_grad_()
        if order is None:
            y = rms_norm(x, weight, impl=impl)
        else:
            y = gated_rms_norm(x, z, weight, norm_before_gate=order, impl=impl)
        return torch.autograd.grad(large * y.square().sum(), x)[0]

    assert_same(gradient(torch.float64), gradient(torch.float32), "grad")


def test_bfloat16_statistics_are_float32():
    """Beside a large offset the variance of a bfloat16 sum would be rounding; ours is not."""
    branch = randn(7, 64, seed=1, dtype=torch.bfloat16)
    stream = (256 + randn(7, 64, seed=2)).to(torch.bfloat16)
    weight, bias = (randn(64, seed=seed, dtype=torch.bfloat16) for seed in (3, 4))
    total = branch.double() + stream.double()
    for expected, (y, residual) in (
        (
            layer_norm_reference(total, weight, bias),
            add_layer_norm(branch, stream, weight, bias),
        ),
        (rms_norm_reference(total, weight), add_rms_norm(branch, stream, weight)),
    ):
        assert_same(expected, y)
        assert torch.equal(total.to(torch.bfloat16), residual)
    # The law has teeth: the stored sum is too coarse to compute the norm from.
    coarse = layer_norm_reference(total.to(torch.bfloat16).double(), weight, bias)
    expected = layer_norm_reference(total, weight, bias)
    assert error_of(expected, coarse) > 2 * TOLERANCE[torch.bfloat16, "value"]


@pytest.mark.parametrize("way", [add_rms_norm, lambda *a, **o: add_layer_norm(*a, None, **o)])
def test_the_stream_is_stored_as_asked(way):
    """float32 on demand or if it came so, else the activations' dtype; y is always theirs."""
    x, stream, weight = make(5, WIDTH, dtype=torch.bfloat16)
    narrow = way(x, stream, weight)
    wide = way(x, stream, weight, residual_in_fp32=True)
    kept = way(x, stream.float(), weight)
    assert (narrow.y.dtype, narrow.residual.dtype) == (torch.bfloat16, torch.bfloat16)
    assert wide.y.dtype == kept.y.dtype == torch.bfloat16
    assert torch.equal(wide.residual, x.float() + stream.float())
    assert torch.equal(kept.residual, wide.residual)
    assert torch.equal(narrow.y, wide.y)
    assert torch.equal(way(x, None, weight, residual_in_fp32=True).residual, x.float())
    assert way(x, None, weight, residual_in_fp32=True).residual.dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        stay = way(x.to(dtype), stream.to(dtype), weight, residual_in_fp32=True)
        assert stay.y.dtype == stay.residual.dtype == dtype


@pytest.mark.usefixtures("blocks")
def test_no_residual_opens_the_stream():
    """Without a residual the sum is x itself."""
    x, _, weight = make(5, WIDTH)
    y, residual = add_rms_norm(x, None, weight)
    assert torch.equal(residual, x)
    assert_same(rms_norm_reference(x, weight), y)
    y, residual = add_layer_norm(x, None, weight, weight)
    assert torch.equal(residual, x)
    assert_same(layer_norm_reference(x, weight, weight), y)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("scale", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_may_have_another_dtype(dtype, scale):
    """The result has the dtype of x, the weight's gradient that of the weight."""
    x, z, _ = make(5, WIDTH, dtype=dtype)
    weight = randn(WIDTH, seed=3, dtype=torch.bfloat16).to(scale).requires_grad_()
    expected = rms_norm_reference(x.double(), weight.double())
    for want, y in (
        (expected, rms_norm(x, weight)),
        (expected * 0, gated_rms_norm(x, 0 * z, weight, norm_before_gate=True)),
        (expected, add_rms_norm(x, None, weight).y),
        (layer_norm_reference(x.double(), weight, None), add_layer_norm(x, None, weight, None).y),
    ):
        assert y.dtype == dtype
        assert_same(want.detach(), y.detach())
        assert torch.autograd.grad(y.float().sum(), weight)[0].dtype == scale


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("before", [True, False])
def test_gradients_equal_finite_differences(before):
    """First and second derivatives of every input."""
    x, z, weight = (t.requires_grad_() for t in make(3, 4))

    def gated(*tensors):
        return gated_rms_norm(*tensors, group_size=2, norm_before_gate=before)

    assert torch.autograd.gradcheck(gated, [x, z, weight])
    assert torch.autograd.gradgradcheck(gated, [x, z, weight])
    assert torch.autograd.gradcheck(rms_norm, [x, weight])
    assert torch.autograd.gradgradcheck(rms_norm, [x, weight])
    assert torch.autograd.gradcheck(add_layer_norm, [x, z, weight, weight])
    assert torch.autograd.gradgradcheck(add_rms_norm, [x, z, weight])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("before", [True, False])
def test_vmap_equals_loop(before):
    """Mapping over activations and weights at once, values and per-example gradients."""
    inputs = [randn(4, 5, WIDTH, seed=1), randn(4, 5, WIDTH, seed=2), randn(4, WIDTH, seed=3)]

    def gated(*tensors):
        return [gated_rms_norm(*tensors, group_size=3, norm_before_gate=before)]

    def plain(x, _, weight):
        return [rms_norm(x, weight)]

    def gradients(way):
        return torch.func.grad(lambda *t: way(*t)[0].square().sum(), argnums=(0, 1, 2))

    for function in (gated, plain, gradients(gated), gradients(plain)):
        loop = [function(*(t[row] for t in inputs)) for row in range(4)]
        mapped = torch.vmap(function)(*inputs)
        for place, got in enumerate(mapped):
            assert_same(torch.stack([results[place] for results in loop]), got)


@pytest.mark.usefixtures("blocks")
def test_views_with_strides_are_accepted():
    """A slice of a wider projection equals its copy."""
    wide = randn(2, 5, 30, seed=5)
    x, z = wide[:, :, :WIDTH], wide[:, :, WIDTH : 2 * WIDTH]
    _, _, weight = make(2, 5, WIDTH)
    expected = gated_rms_norm(x.clone(), z.clone(), weight, norm_before_gate=False)
    assert_same(expected, gated_rms_norm(x, z, weight, norm_before_gate=False))


def test_large_calls_keep_the_inputs_only(monkeypatch):
    """Above the threshold nothing but x, z and the weight waits for the backward."""
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 30)
    x, z, weight = (t.requires_grad_() for t in make(5, WIDTH))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_rms_norm(x, z, weight, norm_before_gate=False)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, z, weight)}


def test_operators_obey_their_schemas():
    """Bodies, fakes and schemas agree on shapes, dtypes and strides."""
    x, z, weight = make(5, WIDTH, dtype=torch.float32)
    for real, fake in (
        (blocked._norm_forward(x, weight, 1e-5, 3), blocked._fake(x)),
        (blocked._gated_forward(x, z, weight, 1e-5, 3, True), blocked._fake(x)),
    ):
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )
    ops = torch.ops.anymamba
    torch.library.opcheck(ops.rms_norm_bwd.default, (x, x, weight, 1e-5, 3, "portable"))
    for before in (True, False):
        arguments = (z, x, z, weight, 1e-5, 3, before, "portable")
        torch.library.opcheck(ops.gated_rms_norm_bwd.default, arguments)


def every_norm(x: Tensor, z: Tensor, weight: Tensor) -> list[Tensor]:
    return [
        rms_norm(x, weight, group_size=3),
        gated_rms_norm(x, z, weight, norm_before_gate=True),
        gated_rms_norm(x, z, weight, norm_before_gate=False),
        *add_rms_norm(x, z, weight),
        *add_layer_norm(x, z, weight, weight),
    ]


def test_twenty_lengths_compile_to_three_graphs():
    """The compiler sees one graph for any length, and the values are the eager ones."""
    graphs = []

    def backend(module, _example_inputs):
        graphs.append(module)
        return module

    torch._dynamo.reset()
    traced = torch.compile(every_norm, backend=backend, fullgraph=True)
    for length in [9, *range(1, 21)]:
        inputs = make(2, length, WIDTH)
        for want, got in zip(every_norm(*inputs), traced(*inputs), strict=True):
            assert_same(want, got)
    assert len(graphs) <= 3


def test_compiled_gradients_equal_eager():
    """The traced backward gives the eager gradients."""
    traced = torch.compile(every_norm, backend="aot_eager", fullgraph=True)
    assert_ways_agree(every_norm, traced, make(2, 5, WIDTH))


@pytest.mark.usefixtures("blocks")
def test_meta_tensors_give_shapes():
    """Shapes and dtypes can be asked for without memory."""
    inputs = [t.to("meta") for t in make(2, 5, WIDTH, dtype=torch.bfloat16)]
    for y in every_norm(*inputs):
        assert (y.shape, y.dtype, y.device.type) == ((2, 5, WIDTH), torch.bfloat16, "meta")


@pytest.mark.parametrize("eps", [0.0, -1e-5, 1e-60, float("nan")])
def test_rejects_an_eps_that_does_not_protect(eps):
    x, z, weight = make(5, WIDTH, dtype=torch.float32)
    with pytest.raises(ConfigError, match="rms_norm: eps must be positive"):
        rms_norm(x, weight, eps=eps)
    with pytest.raises(ConfigError, match="eps"):
        gated_rms_norm(x, z, weight, eps=eps, norm_before_gate=True)
    with pytest.raises(ConfigError, match="eps"):
        add_rms_norm(x, z, weight, eps=eps)
    with pytest.raises(ConfigError, match="eps"):
        add_layer_norm(x, z, weight, weight, eps=eps)


@pytest.mark.parametrize("group_size", [0, -3, 5, 24])
def test_rejects_a_group_size_that_does_not_divide(group_size):
    x, z, weight = make(5, WIDTH)
    with pytest.raises(ConfigError, match="group_size must divide"):
        rms_norm(x, weight, group_size=group_size)
    with pytest.raises(ConfigError, match="group_size must divide"):
        gated_rms_norm(x, z, weight, group_size=group_size, norm_before_gate=False)


def test_rejects_shapes_that_disagree():
    x, z, weight = make(5, WIDTH)
    with pytest.raises(ShapeError, match="weight must have one entry"):
        rms_norm(x, weight[:3])
    with pytest.raises(ShapeError, match="z must have the shape of x"):
        gated_rms_norm(x, z[:1], weight, norm_before_gate=True)
    with pytest.raises(ShapeError, match="residual must have the shape of x"):
        add_rms_norm(x, z[0], weight)
    with pytest.raises(ShapeError, match="bias must have one entry"):
        add_layer_norm(x, z, weight, weight[:3])
    with pytest.raises(ShapeError, match="last axis to normalise"):
        rms_norm(torch.tensor(1.0), weight)


def test_rejects_dtypes_that_disagree():
    x, z, weight = make(5, WIDTH, dtype=torch.float32)
    with pytest.raises(DtypeError, match="z must have the dtype of x"):
        gated_rms_norm(x, z.double(), weight, norm_before_gate=True)
    with pytest.raises(DtypeError, match="residual must be"):
        add_rms_norm(x, z.double(), weight)
    with pytest.raises(DtypeError, match="weight must be floating point"):
        rms_norm(x, weight.int())
    with pytest.raises(DtypeError, match="weight must be a tensor"):
        rms_norm(x, None)
