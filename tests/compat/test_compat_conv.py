"""Laws of the functions that stand in for `causal_conv1d`."""

import pytest
import torch
import torch.nn.functional as F

from anymamba.compat import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from compat_inputs import (
    LABELS,
    PIECES,
    conv_inputs,
)
from laws import assert_same, assert_ways_agree, randn


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_equals_torch(width, length, activation):
    """Outputs, final states and the gradient of every input, for lengths below the width too."""

    def by_torch(x, weight, bias, initial):
        row = torch.cat([initial, x], 2)
        y = F.conv1d(row, weight[:, None], bias, groups=6)
        return (F.silu(y) if activation else y), row[:, :, row.shape[2] - width + 1 :]

    def ours(x, weight, bias, initial):
        return causal_conv1d_fn(x, weight, bias, None, initial, True, activation=activation)

    assert_ways_agree(by_torch, ours, conv_inputs(length, width))


def test_convolution_restarts_at_labels_and_is_silent_on_padding():
    """Each sequence is filtered alone; a negative label gives zero, whatever the bias is."""
    labels = LABELS.clone()
    labels[1, 8] = -1

    def separate(x, weight, bias):
        y = torch.zeros_like(x)
        for row, start, stop in PIECES[:-1]:
            y[row, :, start:stop] = causal_conv1d_fn(
                x[row : row + 1, :, start:stop], weight, bias, activation="silu"
            )[0]
        return [y]

    packed = lambda x, w, bias: [causal_conv1d_fn(x, w, bias, labels, activation="silu")]  # noqa: E731
    assert_ways_agree(separate, packed, conv_inputs(9, 4)[:3])


def test_convolution_keeps_the_memory_order_of_its_input():
    """Channels-last input gives channels-last output; anything else is contiguous."""
    x, weight, *_ = conv_inputs(9, 4)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    y, y_last = causal_conv1d_fn(x, weight), causal_conv1d_fn(last, weight)
    assert torch.equal(y, y_last)
    assert (y.stride(), y_last.stride()) == (x.stride(), last.stride())


def test_final_states_are_written_where_asked():
    """The given tensor is filled and returned; without the flag it is left alone."""
    x, weight, bias, initial = conv_inputs(2, 4)
    out = torch.full_like(initial, 7.0)
    causal_conv1d_fn(x, weight, bias, initial_states=initial, final_states_out=out)
    assert bool((out == 7).all())
    _, final = causal_conv1d_fn(x, weight, bias, None, initial, True, out)
    assert final is out
    assert torch.equal(out, torch.cat([initial, x], 2)[:, :, -3:])


@pytest.mark.parametrize("columns", [3, 4, 7])
@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("pieces", [[1] * 9, [3, 1, 5], [9]])
def test_convolution_updates_equal_the_whole(pieces, circular, columns):
    """Token by token or in pieces, shifting or circular, for states longer than needed."""
    x, weight, bias, initial = conv_inputs(9, 4)
    expected = causal_conv1d_fn(x, weight, bias, None, initial, activation="silu")
    state = F.pad(initial, (columns - 3, 0))
    seen = torch.tensor([columns, columns + 2], dtype=torch.int32)
    if circular:
        # Row 1 has seen two tokens more, so its columns are turned by two.
        state[1] = state[1].roll(2, -1)
    outputs = []
    for piece in x.split(pieces, 2):
        given = piece[:, :, 0] if piece.shape[2] == 1 else piece
        lengths = seen if circular else None
        y = causal_conv1d_update(given, state, weight, bias, "silu", lengths)
        assert y.shape == given.shape
        outputs.append(y.unflatten(1, (6, 1)) if y.dim() == 2 else y)
        seen = seen + piece.shape[2]
    assert_same(expected, torch.cat(outputs, 2))
    history = torch.cat([F.pad(initial, (columns - 3, 0)), x], 2)[:, :, -columns:]
    if circular:
        turned = [history[row].roll(int(seen[row]) % columns, -1) for row in (0, 1)]
        history = torch.stack(turned)
    assert torch.equal(history, state)


@pytest.mark.parametrize("indices", [[3, -1, 0], [-1, 2, -7], [-1, -1, -1], [0, 1, 2]])
def test_convolution_update_touches_only_its_rows(indices):
    """Rows of a pool are chosen by index; padding gives zero and changes no state."""
    x, weight, bias, _ = conv_inputs(2, 4, batch=3)
    pool = randn(5, 6, 4, seed=9)
    expected, y = pool.clone(), torch.zeros_like(x)
    for row, place in enumerate(indices):
        if place >= 0:
            one = expected[place : place + 1]
            y[row] = causal_conv1d_update(x[row : row + 1], one, weight, bias, "silu")[0]
    index = torch.tensor(indices, dtype=torch.int32)
    actual = causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=index)
    assert torch.equal(expected, pool)
    assert_same(y, actual)


def test_convolution_states_of_packed_sequences():
    """The last inputs of each sequence, zeros before its first, also for an empty one."""
    x = randn(9, 6, seed=1)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 2, 2, 9]), 4)
    expected = torch.stack([F.pad(x[:2].T, (2, 0)), torch.zeros(6, 4).double(), x[5:].T])
    assert torch.equal(expected, states)
