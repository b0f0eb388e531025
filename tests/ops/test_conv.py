"""Laws of the causal convolution."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, PackingError, ShapeError
from anymamba.ops.conv import blocked, causal_conv1d, causal_conv1d_step
from anymamba.ops.conv.reference import causal_conv1d_reference
from laws import assert_same, assert_ways_agree, randn

# Dynamo instantiates an autograd.Function while it traces one.
TRACING = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
BORDERS = [0, 0, 1, 4, 4, 40, 42, 65, 65]


@pytest.fixture(params=["plain", "short blocks", "long blocks"])
def blocks(request, monkeypatch):
    """Run a law on the plain formula, on blocks shorter than the filter and on longer ones."""
    if request.param != "plain":
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 0)
        monkeypatch.setattr(blocked, "MIN_ROWS", 2 if request.param == "short blocks" else 17)


def make(
    batch: int, length: int, width: int, channels: int = 6, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return x, weight, bias and a window that is not zero."""
    return [
        randn(batch, length, channels, seed=1, dtype=dtype),
        randn(channels, width, seed=2, dtype=dtype, scale=0.5),
        randn(channels, seed=3, dtype=dtype),
        randn(batch, channels, width, seed=4, dtype=dtype),
    ]


def reference(activation):
    return lambda x, w, bias, window: causal_conv1d_reference(
        x, w, bias, window, activation=activation
    )


def fast(activation, **options):
    return lambda *tensors: causal_conv1d(*tensors, activation=activation, **options)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_equals_reference(width, length, activation):
    """Outputs, window and every gradient are those of the loop, also for s < k."""
    assert_ways_agree(reference(activation), fast(activation), make(2, length, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("blocks")
def test_equals_reference_in_other_dtypes(dtype):
    """Half types sum in float32 and round once, so they stay beside the float64 loop."""
    inputs = make(2, 65, 4, dtype=dtype)
    x, weight, bias, window = inputs
    expected = causal_conv1d_reference(*(t.double() for t in inputs), activation="silu")
    actual = causal_conv1d(x, weight, bias, window, activation="silu")
    assert actual.y_bsv.dtype == actual.window_bvk.dtype == dtype
    assert_same(expected[0], actual.y_bsv)
    assert torch.equal(expected[1].to(dtype), actual.window_bvk)
    assert_ways_agree(reference("silu"), fast("silu"), inputs)


@pytest.mark.usefixtures("blocks")
def test_half_types_accumulate_in_float32():
    """A large term that cancels leaves the small one, which a bfloat16 sum would have lost."""
    x = torch.tensor([256.0, 1.0, -256.0], dtype=torch.bfloat16).view(1, 3, 1)
    weight = torch.ones(1, 3, dtype=torch.bfloat16)
    assert causal_conv1d(x, weight, torch.full((1,), 0.5)).y_bsv[0, 2, 0] == 1.5


@pytest.mark.usefixtures("blocks")
def test_bias_and_window_default_to_zero():
    """Leaving bias and window out is passing zeros."""
    x, weight, bias, window = make(2, 7, 4)
    expected = causal_conv1d_reference(x, weight, 0 * bias, 0 * window)
    for want, got in zip(expected, causal_conv1d(x, weight), strict=True):
        assert_same(want, got)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("cut", [1, 2, 31, 64])
def test_split_equals_whole(cut):
    """Two pieces joined by the window equal one piece, gradients included."""

    def pieces(x, weight, bias, window):
        left, middle = causal_conv1d(x[:, :cut], weight, bias, window, activation="silu")
        right, last = causal_conv1d(x[:, cut:], weight, bias, middle, activation="silu")
        return torch.cat([left, right], dim=1), last

    assert_ways_agree(fast("silu"), pieces, make(2, 65, 4))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_step_unrolled_equals_whole(width, with_bias):
    """Single steps equal the sequence, gradients included, with and without a bias."""

    def steps(x, weight, bias, window):
        outputs = []
        for x_bv in x.unbind(1):
            y_bv, window = causal_conv1d_step(
                x_bv, weight, bias if with_bias else None, window, activation="silu"
            )
            outputs.append(y_bv)
        return torch.stack(outputs, 1), window

    def whole(x, weight, bias, window):
        return causal_conv1d(x, weight, bias if with_bias else None, window, activation="silu")

    assert_ways_agree(whole, steps, make(2, 7, width))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("width", [1, 4])
def test_packed_equals_separate(width):
    """Each packed sequence equals a call of its own; an empty one keeps its window."""
    x, weight, bias, _ = make(1, 65, width)
    windows = randn(len(BORDERS) - 1, 6, width, seed=9)

    def separate(x, weight, bias, windows):
        outputs, last = [], []
        for row, (start, stop) in enumerate(pairwise(BORDERS)):
            if start == stop:
                last.append(windows[row : row + 1])
                continue
            y, window = causal_conv1d_reference(
                x[:, start:stop], weight, bias, windows[row : row + 1], activation="silu"
            )
            outputs.append(y)
            last.append(window)
        return torch.cat(outputs, dim=1), torch.cat(last)

    cu_seqlens = torch.tensor(BORDERS, dtype=torch.int32)
    packed = fast("silu", cu_seqlens=cu_seqlens)
    assert_ways_agree(separate, packed, [x, weight, bias, windows])
    fresh = causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens)
    assert_same(causal_conv1d(x, weight, bias, 0 * windows, cu_seqlens=cu_seqlens)[0], fresh[0])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("activation", [None, "silu"])
def test_packed_sequences_are_isolated(activation):
    """NaN in one sequence reaches no other one: not the output, window, or gradients."""
    x, weight, bias, _ = make(1, 65, 4)
    windows = randn(len(BORDERS) - 1, 6, 4, seed=9)
    x[:, 4:40] = torch.nan
    windows[4] = torch.nan
    x.requires_grad_()
    windows.requires_grad_()
    cu_seqlens = torch.tensor(BORDERS)
    y, last = causal_conv1d(x, weight, bias, windows, activation=activation, cu_seqlens=cu_seqlens)
    others_s = [t for t in range(65) if not 4 <= t < 40]
    others_q = [row for row in range(8) if row != 4]
    assert y[:, others_s].isfinite().all()
    assert last[others_q].isfinite().all()
    loss = y[:, others_s].square().sum() + last[others_q].square().sum()
    grad_x, grad_windows = torch.autograd.grad(loss, [x, windows])
    assert grad_x[:, others_s].isfinite().all()
    assert grad_windows[others_q].isfinite().all()


@pytest.mark.usefixtures("blocks")
def test_the_future_does_not_matter():
    """Changing a token changes no earlier output."""
    x, weight, bias, window = make(2, 65, 4)
    before = causal_conv1d(x, weight, bias, window).y_bsv
    x[:, 40] += 1
    after = causal_conv1d(x, weight, bias, window).y_bsv
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:44], after[:, 40:44])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_equal_finite_differences(activation):
    """First and second derivatives of every input, the window included."""
    inputs = [t.requires_grad_() for t in make(1, 5, 3, channels=2)]
    assert torch.autograd.gradcheck(fast(activation), inputs)
    assert torch.autograd.gradgradcheck(fast(activation), inputs)


@pytest.mark.usefixtures("blocks")
def test_packed_gradients_equal_finite_differences():
    """First and second derivatives across borders."""
    inputs = [t.requires_grad_() for t in make(1, 5, 3, channels=2)[:3]]
    windows = randn(3, 2, 3, seed=7).requires_grad_()
    packed = fast("silu", cu_seqlens=torch.tensor([0, 2, 2, 5]))
    assert torch.autograd.gradcheck(packed, [*inputs, windows])
    assert torch.autograd.gradgradcheck(packed, [*inputs, windows])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 2, 2, 9])])
def test_vmap_equals_loop(cu_seqlens):
    """Mapping over every input at once, values and per-example gradients."""
    rows = 1 if cu_seqlens is None else 3
    inputs = [
        randn(5, 1, 9, 6, seed=1),
        randn(5, 6, 4, seed=2),
        randn(5, 6, seed=3),
        randn(5, rows, 6, 4, seed=4),
    ]
    way = fast("silu", cu_seqlens=cu_seqlens)

    def loss(*tensors):
        return sum(output.square().sum() for output in way(*tensors))

    gradients = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    for function in (way, gradients):
        loop = [function(*(t[row] for t in inputs)) for row in range(5)]
        mapped = torch.vmap(function)(*inputs)
        for place, got in enumerate(mapped):
            assert_same(torch.stack([results[place] for results in loop]), got)


@pytest.mark.usefixtures("blocks")
def test_views_with_strides_are_accepted():
    """A slice of a wider projection equals its copy."""
    wide = randn(2, 65, 20, seed=5)
    _, weight, bias, window = make(2, 65, 4)
    view = wide[:, :, 3:9]
    expected = causal_conv1d(view.clone(), weight, bias, window)
    for want, got in zip(expected, causal_conv1d(view, weight, bias, window), strict=True):
        assert torch.equal(want, got)


def test_large_calls_take_the_blocks(monkeypatch):
    """Above the threshold the hand-written form runs, and it keeps the inputs only."""
    x, weight, bias, window = (t.requires_grad_() for t in make(1, 70, 4))
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 400)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        causal_conv1d(x, weight, bias, window, activation="silu")
    large = [t for t in saved if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]


def test_operator_obeys_its_schema():
    """Bodies, fakes and schemas agree, whether the sequence is longer than the window or not."""
    for length in (2, 9):
        for borders in (None, torch.tensor([0, 1, length])):
            batch = 2 if borders is None else 1
            x, weight, bias, _ = make(batch, length, 4, dtype=torch.float32)
            window = randn(2, 6, 4, seed=4, dtype=torch.float32)
            arguments = (x, window, weight, bias, borders, True, "portable")
            torch.library.opcheck(torch.ops.anymamba.causal_conv1d_fwd.default, arguments)
            torch.library.opcheck(
                torch.ops.anymamba.causal_conv1d_bwd.default, (x, window, *arguments)
            )


def compiled(function):
    graphs = []

    def backend(module, _example_inputs):
        graphs.append(module)
        return module

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True), graphs


@TRACING
@pytest.mark.parametrize("packed", [False, True])
def test_twenty_lengths_compile_to_three_graphs(packed):
    """The compiler sees one graph for any length, and the values are the eager ones."""
    _, weight, bias, window = make(1, 1, 4)

    def run(x, borders):
        return causal_conv1d(
            x, weight, bias, window, activation="silu", cu_seqlens=borders if packed else None
        )

    traced, graphs = compiled(run)
    for length in [9, *range(1, 21)]:
        x = randn(1, length, 6, seed=length)
        borders = torch.tensor([0, length])
        for want, got in zip(run(x, borders), traced(x, borders), strict=True):
            assert_same(want, got)
    assert len(graphs) <= 3


@TRACING
def test_compiled_gradients_equal_eager():
    """The traced backward gives the eager gradients."""
    traced = torch.compile(fast("silu"), backend="aot_eager", fullgraph=True)
    assert_ways_agree(fast("silu"), traced, make(2, 9, 4))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("borders", [None, [0, 3, 3, 9]])
def test_meta_tensors_give_shapes(borders):
    """Shapes and dtypes can be asked for without memory, packed or not."""
    x, weight, bias, window = (t.to("meta") for t in make(1, 9, 4, dtype=torch.bfloat16))
    cu_seqlens = None if borders is None else torch.tensor(borders, device="meta")
    if borders is not None:
        window = window.expand(3, 6, 4)
    y, last = causal_conv1d(x, weight, bias, window, activation="silu", cu_seqlens=cu_seqlens)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")
    assert (last.shape, last.dtype) == (window.shape, window.dtype)


def test_the_window_keeps_its_dtype():
    """A float32 window beside bfloat16 tokens stays float32 in every form."""
    x, weight, bias, window = make(1, 3, 4, dtype=torch.bfloat16)
    wide = window.float()
    cu_seqlens = torch.tensor([0, 3])
    for expected, actual in (
        (
            causal_conv1d(x, weight, bias, window),
            causal_conv1d(x, weight, bias, wide),
        ),
        (
            causal_conv1d(x, weight, bias, window),
            causal_conv1d(x, weight, bias, wide, cu_seqlens=cu_seqlens),
        ),
        (
            causal_conv1d_step(x[:, 0], weight, bias, window),
            causal_conv1d_step(x[:, 0], weight, bias, wide),
        ),
    ):
        assert (actual[0].dtype, actual[1].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(expected[0], actual[0])
        assert torch.equal(expected[1].float(), actual[1])


def test_the_window_is_not_a_view_of_the_tokens():
    """Keeping a window does not keep a whole sequence alive."""
    x, weight, bias, window = make(1, 65, 4)
    last = causal_conv1d(x, weight, bias, window).window_bvk
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_rejects_an_unknown_activation():
    x, weight, bias, window = make(1, 3, 4)
    with pytest.raises(ConfigError, match="activation must be None or 'silu'; got 'relu'"):
        causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ConfigError, match="activation"):
        causal_conv1d_step(x[:, 0], weight, bias, window, activation="relu")


def test_rejects_sizes_that_disagree():
    x, weight, bias, window = make(2, 3, 4)
    with pytest.raises(ShapeError, match="convolution channels"):
        causal_conv1d(x, weight[:5])
    with pytest.raises(ShapeError, match="convolution width"):
        causal_conv1d(x, weight, bias, window[:, :, 1:])
    with pytest.raises(ShapeError, match="one row per batch"):
        causal_conv1d(x, weight, bias, window[:1])
    with pytest.raises(ShapeError, match="sequence length"):
        causal_conv1d(x[:, :0], weight)


def test_rejects_dtypes_that_disagree():
    x, weight, bias, window = make(2, 3, 4, dtype=torch.float32)
    with pytest.raises(DtypeError, match="window must be"):
        causal_conv1d(x, weight, bias, window.double())
    with pytest.raises(DtypeError, match="weight must be"):
        causal_conv1d(x, weight.bfloat16(), bias, window)


def test_rejects_borders_that_do_not_fit():
    x, weight, bias, window = make(2, 3, 4)
    with pytest.raises(PackingError, match="batch must be 1"):
        causal_conv1d(x, weight, bias, window, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match="one row per sequence"):
        causal_conv1d(x[:1], weight, bias, window[:1], cu_seqlens=torch.tensor([0, 1, 3]))
