"""Laws of the one-token update that stands in for `mamba_ssm`'s."""

import pytest
import torch

from anymamba.compat import (
    causal_conv1d_update,
    selective_scan_fn,
    selective_state_update,
)
from anymamba.errors import (
    BackendError,
)
from compat_inputs import (
    chunk_scan,
    scan_inputs,
    ssd_inputs,
)
from laws import assert_same, rand, randn


def test_unrolled_updates_equal_the_scan():
    """Mamba-1 layout: outputs and state after every token, starting from a state."""
    u, delta, a, b, c, skip, z, bias = scan_inputs(6, "plain")
    state = torch.zeros(2, 6, 3, dtype=torch.float64)
    expected, last = selective_scan_fn(u, delta, a, b, c, skip, z, bias, True, True)
    for t in range(6):
        y = selective_state_update(
            *(state, u[:, :, t], delta[:, :, t], a, b[:, :, t], c[:, :, t]),
            *(skip, z[:, :, t], bias, True),
        )
        assert_same(expected[:, :, t], y)
    assert_same(last, state)


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_unrolled_head_updates_equal_the_scan(dtype, written_out):
    """Mamba-2 layout: broadcast or written-out decays give the scan's numbers."""
    x, dt, a, b, c, skip, z, bias, initial = (t.to(dtype) for t in ssd_inputs(2, 6))
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    state = initial.to(compute).clone()
    expected, last = chunk_scan(x, dt, a, b, c, skip, z, bias, initial)
    wide = [
        a[:, None, None].expand(4, 3, 5),
        skip[:, None].expand(4, 3),
        bias[:, None].expand(4, 3),
    ]
    steps = dt[..., None].expand(2, 6, 4, 3)
    if written_out:
        wide, steps = [t.contiguous() for t in wide], steps.contiguous()
    for t in range(6):
        y = selective_state_update(
            *(state, x[:, t], steps[:, t], wide[0], b[:, t], c[:, t], wide[1], z[:, t], wide[2]),
            dt_softplus=True,
        )
        assert y.dtype == dtype
        assert_same(expected[:, t], y)
    assert_same(last, state)


@pytest.mark.parametrize("indices", [[3, -1, 0], [-1, 2, -7], [-1, -1, -1], [0, 1, 2]])
def test_state_update_touches_only_its_rows(indices):
    """Rows of a pool are chosen by index; padding gives zero and changes no state."""
    pool = randn(5, 6, 3, seed=1)
    x, dt, b, c = (randn(3, n, seed=n + i) for i, n in enumerate([6, 6, 3, 3]))
    a, expected, y = -rand(6, 3, seed=5), pool.clone(), torch.zeros_like(x)
    for row, place in enumerate(indices):
        if place >= 0:
            cut = slice(row, row + 1)
            y[row] = selective_state_update(
                expected[place : place + 1], x[cut], dt[cut], a, b[cut], c[cut]
            )[0]
    index = torch.tensor(indices, dtype=torch.int32)
    actual = selective_state_update(pool, x, dt, a, b, c, state_batch_indices=index)
    assert torch.equal(expected, pool)
    assert_same(y, actual)


def test_updates_in_place_refuse_a_backward():
    """Values flow with gradients on, the state stays outside the graph, a backward raises."""
    state, one = torch.ones(1, 2, 1), torch.ones(1, 1)
    x = torch.ones(1, 2, requires_grad=True)
    y = selective_state_update(state, x, x, -torch.ones(2, 1), one, one)
    window = torch.ones(1, 2, 3)
    filtered = causal_conv1d_update(x, window, torch.ones(2, 4))
    assert not state.requires_grad
    assert not window.requires_grad
    for result in (y, filtered):
        with pytest.raises(BackendError, match="no backward"):
            result.sum().backward()
    with torch.no_grad():
        assert not selective_state_update(state, x, x, -torch.ones(2, 1), one, one).requires_grad
