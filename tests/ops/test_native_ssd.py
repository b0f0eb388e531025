"""Laws of the CPU kernel of the SSD core: threads, layouts, odd sizes, segments, workspace."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anymamba.ops import ssd_core
from anymamba.ops.ssd.native import backward, forward, refusal
from kernels import NATIVE, running
from laws import assert_same, assert_ways_agree, error_of, rand, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="this installation has no compiled kernels")
KINDS = pytest.mark.parametrize("kind", NATIVE)


def make(b=1, s=50, m=1, h=2, g=1, p=16, r=16, *, rows=None, decay=1.0) -> list[Tensor]:
    """Return the core's tensors in float32; `rows` states, one per batch row unless packed."""
    f32 = {"dtype": torch.float32}
    return [
        randn(b, s, m, h, p, seed=1, **f32),
        -decay * rand(b, s, h, seed=2, **f32),
        randn(b, s, m, g, r, seed=3, **f32),
        randn(b, s, m, g, r, seed=4, **f32),
        randn(rows or b, h, p, r, seed=5, **f32),
        randn(b, s, h, seed=6, **f32),
        randn(b, s, h, seed=7, **f32),
    ]


def heads_of(*outputs: Tensor) -> list[Tensor]:
    """Return fixed gradients of the outputs, which bfloat16 can hold."""
    return [
        randn(*y.shape, seed=9 + place).bfloat16().to(y.dtype) for place, y in enumerate(outputs)
    ]


def run(tensors: list[Tensor], cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """Return the outputs of the kernel and its gradients for fixed heads."""
    constants = (64, cu_seqlens)
    outputs = forward(*tensors, *constants)
    return [*outputs, *backward(*heads_of(*outputs), *tensors, *constants)]


def by(impl: str, cu_seqlens: Tensor | None = None):
    return lambda *x: ssd_core(*x, impl=impl, cu_seqlens=cu_seqlens)


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@KINDS
@pytest.mark.parametrize(
    ("h", "g", "p"), [(6, 6, 8), (6, 6, 20), (12, 1, 16), (6, 2, 16), (1, 1, 70)], ids=str
)
def test_outputs_do_not_depend_on_threads(kind, h, g, p, threads):
    """Outputs and final states are the same bits on any number of threads."""
    tensors = make(s=100, h=h, g=g, p=p)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        with running(kind):
            results.append(forward(*tensors, 64, None))
    for expected, actual in pairwise(results):
        assert torch.equal(expected[0], actual[0])
        assert torch.equal(expected[1], actual[1])


@KINDS
@pytest.mark.parametrize(
    ("g", "m", "r", "p"),
    [
        (1, 1, 16, 16),
        (1, 3, 32, 16),
        (1, 1, 9, 16),
        (3, 1, 16, 16),
        (12, 1, 16, 8),
        (12, 1, 16, 20),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradients_are_the_same_in_every_run(kind, g, m, r, p, count, threads):
    """On a given number of threads gradients are the same bits, and right, in every run."""
    threads(count)
    tensors = make(s=300 // m, m=m, h=12, g=g, p=p, r=r)
    with running(kind):
        first, second = run(tensors), run(tensors)
        for expected, actual in zip(first, second, strict=True):
            assert torch.equal(expected, actual)
        assert_ways_agree(by("portable"), by("native"), tensors)


@KINDS
@pytest.mark.parametrize("given", [5, 6, 7])
@pytest.mark.parametrize(
    ("b", "s", "m", "h", "g", "p", "r"),
    [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 33, 1, 2, 1, 20, 24),
        (1, 65, 4, 3, 1, 5, 7),
        (1, 9, 3, 4, 4, 17, 33),
        (1, 3, 70, 2, 1, 8, 8),
        (3, 40, 1, 10, 2, 40, 9),
        # Heads with a B and C of their own: narrow ones, whose states are walked token by token,
        # in one stretch and in several, and the first that are too wide or too large for that.
        (2, 63, 1, 3, 3, 8, 64),
        (1, 64, 1, 2, 2, 5, 70),
        (2, 65, 1, 2, 2, 1, 3),
        (1, 300, 1, 2, 2, 3, 17),
        (1, 140, 1, 2, 2, 8, 128),
        (2, 33, 1, 2, 2, 16, 64),
        (1, 65, 1, 2, 2, 17, 16),
        (1, 65, 1, 2, 2, 8, 130),
    ],
)
def test_odd_sizes_equal_reference(kind, given, b, s, m, h, g, p, r):
    """Widths, states and ranks that fill no vector, panel or chunk change nothing."""
    with running(kind):
        assert_ways_agree(by("reference"), by("native"), make(b, s, m, h, g, p, r)[:given])


@KINDS
@pytest.mark.parametrize(("g", "p"), [(1, 16), (2, 8), (2, 20)])
def test_a_long_memory_equals_reference(kind, g, p):
    """With weak decay the first state reaches the last token, and the last gradient the first."""
    tensors = make(s=300, h=2, g=g, p=p, decay=0.01)
    with running(kind):
        assert_ways_agree(by("reference"), by("native"), tensors)


@KINDS
@pytest.mark.parametrize(("g", "p"), [(1, 16), (8, 16), (8, 8), (8, 20)])
def test_packs_that_cross_segments_equal_reference(kind, g, p, threads):
    """Borders anywhere, empty sequences too, in a row so long that states are recomputed."""
    threads(2)
    lengths = [0, 1, 130, 0, 64, 301, 2, 0]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tensors = make(s=sum(lengths), h=8, g=g, p=p, rows=len(lengths))
    with running(kind):
        assert_ways_agree(by("reference", cu_seqlens), by("native", cu_seqlens), tensors)


@KINDS
@pytest.mark.parametrize(("m", "g", "p"), [(2, 2, 20), (1, 4, 20), (1, 4, 8)])
def test_views_equal_copies(kind, m, g, p):
    """Transposed, sliced and expanded tensors give the bits of their contiguous copies."""
    v, da, b, c, initial, scale, own = make(2, 40, m, 4, g, p, 24)
    wide = torch.zeros(2, 40, m, 4, 50)
    wide[..., 13 : 13 + p] = v
    views = [
        wide[..., 13 : 13 + p],
        da.mT.contiguous().mT,
        b.transpose(1, 3).contiguous().transpose(1, 3),
        c.mT.contiguous().mT,
        initial.transpose(1, 3).contiguous().transpose(1, 3),
        scale[:1, :1, :1].expand_as(scale),
        own.transpose(0, 2).contiguous().transpose(0, 2),
    ]
    constants = (64, None)
    with running(kind):
        expected, actual = run([x.contiguous() for x in views]), run(views)
        y, final = heads_of(*actual[:2])
        heads = y.expand(3, *y.shape)[1], final.mT.contiguous().mT
        turned = [*actual[:2], *backward(*heads, *views, *constants)]
        views[4] = initial[:, :, :1, :1].expand_as(initial)
        whole, expanded = run([x.contiguous() for x in views]), run(views)
    for want, got in zip([*expected * 2, *whole], [*actual, *turned, *expanded], strict=True):
        assert torch.equal(want, got)


@KINDS
@pytest.mark.parametrize(("g", "p"), [(1, 16), (4, 20), (4, 8)])
def test_bfloat16_is_rounded_once(kind, g, p):
    """Beside bfloat16 storage all sums are float32: results are those of float32, rounded."""
    half = [x if x.dim() == 3 else x.bfloat16() for x in make(s=90, h=4, g=g, p=p)]
    with running(kind):
        expected, actual = run([x.float() for x in half]), run(half)
    assert [x.dtype for x in actual[:3]] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want.to(got.dtype), got)


@KINDS
@pytest.mark.parametrize("g", [1, 2])
def test_weak_decay_survives_strong_decay(kind, g):
    """Behind a stretch of strong decay, neighbours still see the exact decay between them."""
    tensors = make(s=300, h=2, g=g, p=8)
    tensors[1][:, :100], tensors[1][:, 100:] = -60.0, -0.01
    exact = ssd_core(*(x.double() for x in tensors), impl="reference")
    with running(kind):
        y, final = forward(*tensors, 64, None)
    assert error_of(exact.y_bsmhp, y) < 6e-7
    assert error_of(exact.final_bhpr, final) < 6e-7


@KINDS
@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("da", [-1e-3, -3e-4])
def test_a_constant_decay_does_not_drift(kind, g, da):
    """A decay that is the same for all tokens is not wrong by the same amount in all of them."""
    tensors = make(s=2048, h=2, g=g, p=8)
    tensors[1].fill_(da)
    exact = [x.double().requires_grad_() for x in tensors]
    outputs = ssd_core(*exact, impl="portable")
    want = [
        *outputs,
        *torch.autograd.grad(outputs, exact, [x.double() for x in heads_of(*outputs)]),
    ]
    with running(kind):
        got = run(tensors)
    # SSE2 rounds every product before it is added, and loses what is left of a decay in gradients.
    limit = 5e-5 if kind.endswith("baseline") else 5e-6
    for expected, actual in zip(want, got, strict=True):
        assert error_of(expected, actual) < limit


@KINDS
@pytest.mark.parametrize("g", [1, 2])
def test_infinite_decay_parts_a_sequence(kind, g):
    """A log-decay of minus infinity wipes the state: both sides are as if alone, without a NaN."""
    tensors = make(s=70, h=2, g=g, p=8)
    tensors[1][:, 40] = -torch.inf
    initial = tensors[4]
    before = [x if x is initial else x[:, :40] for x in tensors]
    after = [torch.zeros_like(x) if x is initial else x[:, 40:] for x in tensors]
    with running(kind):
        y, final, *grads = run(tensors)
        left, right = forward(*before, 64, None), forward(*after, 64, None)
        head = heads_of(y)[0][:, :40]
        left_grads = backward(head, torch.zeros_like(final), *before, 64, None)
    assert_same(torch.cat([left[0], right[0]], 1), y)
    assert_same(right[1], final)
    for place, (want, got) in enumerate(zip(left_grads, grads, strict=True)):
        assert_same(want, got if place == 4 else got[:, :40], "grad")
        assert got.isfinite().all()


@KINDS
@pytest.mark.parametrize("g", [1, 2])
def test_packed_neighbours_never_meet(kind, g):
    """NaN in one packed sequence stays there, in outputs, states and gradients."""
    cu_seqlens = torch.tensor([0, 5, 30, 44])
    tensors = make(s=44, h=2, g=g, p=8, rows=3)
    tensors[0][:, 7] = torch.nan
    with running(kind):
        y, final, *grads = run(tensors, cu_seqlens=cu_seqlens)
    assert y[:, :5].isfinite().all()
    assert y[:, 30:].isfinite().all()
    assert final[[0, 2]].isfinite().all()
    assert grads.pop(4)[[0, 2]].isfinite().all()
    for grad in grads:
        assert grad[:, :5].isfinite().all()
        assert grad[:, 30:].isfinite().all()


def test_half_precision_without_a_kernel_is_refused():
    """float16 and float64 are refused by name."""
    tensors = make()
    assert refusal(*tensors) is None
    for place, dtype in ((0, torch.float16), (3, torch.float64)):
        given = [x.to(dtype) if place == at else x for at, x in enumerate(tensors)]
        assert str(dtype) in str(refusal(*given))


class _CollectFills(TorchDispatchMode):
    """Collects what is made of a given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.made = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.shape:
            self.made.append(result)
        return result


def test_omitted_weights_take_no_memory():
    """A weight that is not given is one number, expanded."""
    v, da, b, c, *_ = make(s=40, h=6)
    for strict in (False, True):
        with _CollectFills(da.shape) as collect:
            ssd_core(v, da, b, c, strict=strict, impl="native")
        assert collect.made
        assert all(x.untyped_storage().nbytes() == 4 for x in collect.made)


class _WorkspaceError(Exception):
    """Carries the size of a workspace out of the call that asked for it."""


class _StopAtWorkspace(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.uint8:
            raise _WorkspaceError(args[1][0])
        return func(*args, **kwargs)


def workspace_of(call, *args) -> int:
    """Return the bytes of workspace that a call wants, without running the kernel."""
    with _StopAtWorkspace(), pytest.raises(_WorkspaceError) as caught:
        call(*args)
    return caught.value.args[0]


@pytest.mark.parametrize("g", [1, 24])
@pytest.mark.parametrize(("count", "s"), [(1, 1024), (2, 2048), (16, 16384)])
def test_workspace_is_less_than_half_of_the_inputs(count, s, g, threads):
    """Forward and backward take at most half the bytes of their inputs, on any threads."""
    threads(count)
    v, bc = torch.zeros(64).expand(1, s, 1, 24, 64), torch.zeros(128).expand(1, s, 1, g, 128)
    da, initial = torch.zeros(24).expand(1, s, 24), torch.zeros(1, 24, 64, 128)
    tensors = (v, da, bc, bc, initial, da, da)
    inputs = 4 * sum(x.numel() for x in tensors)
    constants = (64, None)
    assert workspace_of(forward, *tensors, *constants) <= inputs / 2
    assert workspace_of(backward, v, initial, *tensors, *constants) <= inputs / 2


@pytest.mark.parametrize(
    ("count", "b", "s"), [(1, 8, 128), (2, 1, 2048), (16, 16, 128), (2, 1, 65536)]
)
def test_workspace_of_narrow_heads_is_less_than_half_of_the_inputs(count, b, s, threads):
    """So do heads whose states are kept for a stretch of tokens."""
    threads(count)
    v, bc = torch.zeros(8).expand(b, s, 1, 16, 8), torch.zeros(64).expand(b, s, 1, 16, 64)
    da, initial = torch.zeros(16).expand(b, s, 16), torch.zeros(b, 16, 8, 64)
    tensors = (v, da, bc, bc, initial, da, da)
    inputs = 4 * sum(x.numel() for x in tensors)
    assert workspace_of(forward, *tensors, 64, None) <= inputs / 2
    assert workspace_of(backward, v, initial, *tensors, 64, None) <= inputs / 2
