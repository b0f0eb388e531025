"""Laws of the CPU kernel of the selective scan: threads, memory, odd sizes, extreme decays."""

import threading

import pytest
import torch
from torch import Tensor

from anymamba.ops.selective_scan import selective_scan
from anymamba.ops.selective_scan.native import backward, forward
from kernels import NATIVE, running
from laws import assert_ways_agree, rand, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", NATIVE)
NO_PACK = (None, None, None)
NAMES = ("u", "dt", "a", "b", "c", "initial", "skip", "z")


def make(
    length: int, channels: int, states: int, *, batch: int = 1, groups: int = 1, rows: int = 0
) -> list[Tensor]:
    """Return the operator's eight tensors in float32."""
    f32 = {"dtype": torch.float32}
    return [
        randn(batch, length, channels, seed=1, **f32),
        rand(batch, length, channels, seed=2, low=0.01, high=0.5, **f32),
        -rand(channels, states, seed=3, low=0.1, high=4.0, **f32),
        randn(batch, length, groups, states, seed=4, **f32),
        randn(batch, length, groups, states, seed=5, **f32),
        randn(rows or batch, channels, states, seed=6, **f32),
        randn(channels, seed=7, **f32),
        randn(batch, length, channels, seed=8, **f32),
    ]


def constants(tensors: list[Tensor], cu_seqlens: Tensor | None = None) -> tuple[object, ...]:
    flags = tuple(x.dim() == 2 for x in tensors[3:5])
    return (*flags, None, cu_seqlens, *NO_PACK[1:])


def run(tensors: list[Tensor], cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """Return the outputs of the kernel and its gradients for fixed heads."""
    rest = constants(tensors, cu_seqlens)
    outputs = forward(*tensors, *rest)
    heads = [randn(*y.shape, seed=9, dtype=torch.float32).to(y.dtype) for y in outputs]
    return [*outputs, *backward(*heads, *tensors, *rest)]


def scan(impl: str, cu_seqlens: Tensor | None = None):
    def way(u, dt, a, b, c, initial, skip, z):
        return selective_scan(
            u, dt, a, b, c, skip, initial, z_bsi=z, impl=impl, cu_seqlens=cu_seqlens
        )

    return way


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@KINDS
@pytest.mark.parametrize(
    ("length", "channels", "groups"), [(300, 150, 1), (300, 150, 3), (40, 1700, 1)]
)
def test_results_do_not_depend_on_threads(kind, length, channels, groups, threads):
    """Outputs, states and gradients are the same bits on 1, 2 and 5 threads, run after run.

    1700 channels are more than the widest block of a task: several blocks on one thread, too.
    """
    tensors = make(length, channels, 5, batch=2, groups=groups)
    results = []
    for count in (1, 2, 5, 2):
        threads(count)
        with running(kind):
            results.append(run(tensors))
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            assert torch.equal(expected, actual)


@KINDS
def test_python_threads_do_not_meet(kind, threads):
    """Calls from several Python threads at once give what each gives alone."""
    threads(1)
    tensors = make(200, 40, 16)
    results = {}

    def work(place: int) -> None:
        results[place] = run(tensors)

    with running(kind):
        expected = run(tensors)
        workers = [threading.Thread(target=work, args=(place,)) for place in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for actual in results.values():
        for want, got in zip(expected, actual, strict=True):
            assert torch.equal(want, got)


@KINDS
@pytest.mark.parametrize(
    ("length", "channels", "states", "batch", "groups"),
    [
        (1, 1, 1, 1, 1),
        (1, 20, 24, 2, 1),
        (33, 20, 24, 1, 4),
        (64, 17, 33, 2, 17),
        (31, 7, 3, 3, 1),
        (700, 9, 6, 1, 3),
        (40, 300, 16, 1, 1),
    ],
)
def test_odd_sizes_equal_reference(length, channels, states, batch, groups, kind):
    """Sizes that fill no vector, no block and no span, and those that fill many."""
    tensors = make(length, channels, states, batch=batch, groups=groups)
    with running(kind):
        assert_ways_agree(scan("reference"), scan("native"), tensors)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_equal_their_copies(kind, dtype):
    """Slices of wide projections, expanded rows and transposed views give the bits of a copy."""
    wide = randn(2, 70, 2 * 24 + 2 * 5 + 3, seed=1, dtype=dtype)
    u, z = wide[..., 3:27], wide[..., 27:51]
    b, c = (x.unsqueeze(2) for x in (wide[..., 51:56], wide[..., 56:61]))
    dt = rand(1, 1, 24, seed=2, low=0.01, high=0.5, dtype=torch.float32).expand(2, 70, 24)
    a = -rand(5, 24, seed=3, low=0.1, high=4.0, dtype=torch.float32).mT
    initial = randn(24, 5, 2, seed=4, dtype=torch.float32).permute(2, 0, 1)
    skip = randn(24, 2, seed=5, dtype=torch.float32)[:, 1]
    views = [u, dt, a, b, c, initial, skip, z]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    with running(kind):
        for name, expected, actual in zip(
            ("y", "final", *NAMES), run(copies), run(views), strict=True
        ):
            assert torch.equal(expected, actual), name


@KINDS
@pytest.mark.parametrize("packed", [False, True])
def test_every_element_is_written(kind, packed):
    """Poisoned memory (conftest fills it with NaN) is written all over, empty sequences too."""
    borders = torch.tensor([0, 0, 1, 34, 34, 300, 300]) if packed else None
    tensors = make(300, 21, 6, rows=6 if packed else 0)
    assert torch.empty(3).isnan().all()
    with running(kind):
        for result in run(tensors, borders):
            assert result.isfinite().all()


@KINDS
def test_gradients_have_the_dtypes_of_their_arguments(kind):
    """Float32 decays beside bfloat16 activations: gradients in kind, outputs rounded once."""
    tensors = make(50, 12, 4)
    mixed = [x.bfloat16() if k in (0, 3, 4, 7) else x for k, x in enumerate(tensors)]
    with running(kind):
        halves, wide = run(mixed), run([x.float() for x in mixed])
    assert [x.dtype for x in halves[2:]] == [x.dtype for x in mixed]
    assert halves[0].dtype == torch.bfloat16
    assert halves[1].dtype == torch.float32
    assert torch.equal(halves[0], wide[0].bfloat16())
    assert torch.equal(halves[1], wide[1])


@KINDS
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0, 3000.0])
def test_any_decay_equals_reference(scale, kind):
    """Decays from one to zero, through the subnormal numbers, keep the reference's results."""
    tensors = make(65, 9, 6)
    tensors[1] = tensors[1] * scale
    with running(kind):
        assert_ways_agree(scan("reference"), scan("native"), tensors)


@KINDS
def test_growth_overflows_as_in_the_portable_code(kind):
    """Rates above zero grow to infinity and NaN exactly where plain torch says so."""
    tensors = make(40, 11, 3)
    tensors[2] = -50 * tensors[2]
    with running(kind):
        actual = scan("native")(*tensors)
    expected = scan("portable")(*tensors)
    assert not expected.y_bsi.isfinite().all()
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want.isfinite(), got.isfinite())
        assert torch.equal(want.isnan(), got.isnan())


@KINDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_channel_stays_alone(place, bad, kind):
    """NaN or infinity in u or dt of one channel reaches no other, though they share a vector.

    Five states: four are advanced together, and one alone.
    """
    tensors = make(70, 9, 5)
    with running(kind):
        clean = run(tensors)
        tensors[place][0, 40, 5] = bad
        dirty = run(tensors)
    others = [k for k in range(9) if k != 5]
    assert not dirty[0][0, 40:, 5].isfinite().any()
    assert torch.equal(clean[0][:, :40, 5], dirty[0][:, :40, 5])
    for name, want, got in zip(("y", "final", *NAMES), clean, dirty, strict=True):
        if name in ("b", "c"):  # sums over channels
            continue
        axis = {1: 0, 2: 0, 3: 1 if name in ("final", "initial") else 2}[want.dim()]
        index = torch.tensor(others)
        assert torch.equal(want.index_select(axis, index), got.index_select(axis, index)), name


@KINDS
def test_workspace_is_small(kind):
    """The backward holds less than half the bytes of its inputs beside inputs and outputs."""
    from torch.profiler import ProfilerActivity, profile

    tensors = make(2048, 256, 16)
    rest = constants(tensors)
    heads = [randn(*x.shape, seed=9, dtype=torch.float32) for x in (tensors[0], tensors[5])]
    with running(kind), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        grads = backward(*heads, *tensors, *rest)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak - sum(x.nbytes for x in grads) < 0.5 * sum(x.nbytes for x in tensors)
