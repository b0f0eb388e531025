"""Laws of the linear layer: float32 sums in every dtype, gradients, autocast, little memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba.bench import peak_bytes
from anymamba.nn import project
from anymamba.ops import linear

LACKING = {torch.bfloat16: False, torch.float16: False}


@pytest.fixture(params=[False, True], ids=["as this CPU is", "without half products"])
def lacking(request, monkeypatch):
    """Run as on a CPU without matrix products of half types, and as it is."""
    if request.param:
        monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
        # Several panels even for a small weight.
        monkeypatch.setattr("anymamba.ops.half_linear._PANEL_BYTES", 4 * 48 * 7)


def operands(dtype, rows=6, inner=48, out=33):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, rows, inner), (out, inner), (out,))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def wide(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_product_is_exact_up_to_one_rounding(dtype, rows):
    """Values and all gradients, against float64."""
    leaves = operands(dtype, rows)
    exact = wide(leaves)
    expected = F.linear(*exact)
    actual = linear(*leaves)
    assert actual.dtype == dtype
    head = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    wanted = torch.autograd.grad(expected, exact, head.to(dtype).double())
    found = torch.autograd.grad(actual, leaves, head.to(dtype))
    unit = max(torch.finfo(dtype).eps, 1e-6)
    if dtype in (torch.bfloat16, torch.float16):
        # A second rounding, of the product before the bias, would show in many entries.
        assert (actual == expected.to(dtype)).float().mean() > 0.99
    for want, got in zip((expected.detach(), *wanted), (actual.detach(), *found), strict=True):
        assert got.dtype == dtype
        assert float((want - got).abs().max()) <= unit * float(want.abs().max())


def test_second_derivatives_exist(monkeypatch):
    """The backward is made of the same layer."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    leaves = operands(torch.bfloat16)
    exact = wide(leaves)
    results = []
    for function, inputs in ((F.linear, exact), (linear, leaves)):
        loss = function(*inputs).square().sum()
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs[0])[0])
    want, got = results
    assert float((want - got).abs().max()) <= 0.05 * float(want.abs().max())


def test_autocast_decides_the_dtype(monkeypatch):
    """What nn.Linear would round, this rounds; float32 leaves get float32 gradients."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    leaves = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(*leaves)
    rounded = [t.bfloat16().double() for t in leaves]
    want = F.linear(*rounded).detach()
    assert y.dtype == torch.bfloat16
    assert float((want - y.detach()).abs().max()) <= 0.02 * float(want.abs().max())
    grads = torch.autograd.grad(y.float().sum(), leaves)
    assert [g.dtype for g in grads] == [torch.float32] * 3


@pytest.mark.usefixtures("lacking")
def test_few_rows_are_cast_once():
    """Where torch multiplies, only torch casts: a second copy of a large weight costs the call."""
    _, weight, _ = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        casts = []
        for function in (F.linear, linear):
            with torch.profiler.profile() as profile:
                function(torch.ones(1, 48), weight)
            casts.append([e.count for e in profile.key_averages() if e.key == "aten::_to_copy"])
            torch.clear_autocast_cache()
    assert casts == [[2], [2]]


def test_the_result_may_be_changed_in_place(monkeypatch):
    """As that of torch's linear layer may."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    x, weight, bias = operands(torch.bfloat16)
    expected = linear(x, weight, bias) + 1
    torch.testing.assert_close(linear(x, weight, bias).add_(1), expected)


@pytest.mark.parametrize(("inner", "out"), [(0, 3), (3, 0)])
def test_an_empty_weight_is_multiplied(inner, out, monkeypatch):
    """Nothing to add up gives zeros, and no output an empty tensor."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    x, weight = torch.ones(5, inner).bfloat16(), torch.ones(out, inner).bfloat16()
    assert torch.equal(linear(x, weight), torch.zeros(5, out).bfloat16())


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_a_gradient_needs_is_kept(frozen, monkeypatch):
    """Inputs of a frozen weight are not held until the backward, nor is a weight without use."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    x, weight, _ = leaves = operands(torch.bfloat16)
    leaves[frozen].requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linear(x, weight).sum().backward()
    assert kept == [leaves[frozen].shape]
    assert leaves[1 - frozen].grad is not None


def test_transforms_and_the_compiler_see_a_formula(monkeypatch):
    """vmap and a traced graph give the same numbers."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    x, weight, bias = (t.detach() for t in operands(torch.bfloat16))
    want = linear(x, weight, bias)
    got = torch.func.vmap(linear, (0, None, None))(x, weight, bias)
    torch.testing.assert_close(got, want)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, bias), want)


def test_a_large_weight_is_never_widened_as_a_whole(monkeypatch):
    """The peak is the result, one panel and its products."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    monkeypatch.setattr("anymamba.ops.half_linear._PANEL_BYTES", 2**18)
    x, weight = torch.ones(8, 512).bfloat16(), torch.ones(8192, 512).bfloat16()
    assert peak_bytes(lambda: linear(x, weight)) < weight.nbytes / 4


def test_a_hooked_or_replaced_projection_is_called_as_a_module():
    """Only a plain nn.Linear is replaced by the function."""
    layer, x = nn.Linear(3, 2), torch.ones(5, 3)
    torch.testing.assert_close(project(layer, x), layer(x))
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    torch.testing.assert_close(project(layer, x), layer(x))
    assert project(nn.Identity(), x) is x


def test_float32_weights_are_not_rounded(monkeypatch):
    """Under autocast only activations have the half type: no weight or bias, nor its gradient."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    x, weight, bias = leaves = operands(torch.float32)
    exact = wide([x.bfloat16(), weight, bias])
    expected = F.linear(*exact)
    head = torch.linspace(-1, 1, expected.numel()).view(expected.shape).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear(*leaves)
    assert (actual == expected.bfloat16()).float().mean() > 0.99
    found = torch.autograd.grad(actual, [weight, bias], head)
    wanted = torch.autograd.grad(expected, exact[1:], head.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((theirs - ours).abs().max()) <= 1e-6 * float(theirs.abs().max())


def test_autocast_copies_no_weight(monkeypatch):
    """What waits for the backward is the parameter itself."""
    monkeypatch.setattr("anymamba.ops.half_linear._HAS_PRODUCT", LACKING)
    x, weight, bias = operands(torch.float32)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias)
    assert [t.data_ptr() for t in kept if t.shape == weight.shape] == [weight.data_ptr()]
