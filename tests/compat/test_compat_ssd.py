"""Laws of the Mamba-2 functions that stand in for `mamba_ssm`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat import (
    causal_conv1d_fn,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    ssd_minimal_discrete,
)
from anymamba.ops import gated_rms_norm, ssd, ssd_core
from compat_inputs import (
    LABELS,
    PIECES,
    chunk_scan,
    chunk_scan_by_hand,
    split_inputs,
    ssd_inputs,
)
from laws import assert_same, assert_ways_agree


@pytest.mark.parametrize("per_width", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_chunk_scan_equals_plain_loop(length, per_width):
    """Outputs, final states and the gradient of every input, initial states included."""
    assert_ways_agree(chunk_scan_by_hand, chunk_scan, ssd_inputs(2, length, per_width))


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.9), [0.0, 0.5]])
def test_step_sizes_stay_inside_the_limit(limit):
    """Raw step sizes are clamped too, also by the default lower limit of zero."""
    x, dt, a, b, c, *_ = ssd_inputs(2, 9)
    expected = ssd(x, dt.clamp(*limit), a, b, c, impl="reference").y_bshp
    assert_same(expected, mamba_chunk_scan_combined(x, dt, a, b, c, 8, dt_limit=limit))


def test_labelled_sequences_do_not_see_each_other():
    """seq_idx equals separate calls; initial states seed the first sequence of each row, and the
    final states are those of the last one."""

    def separate(x, dt, a, b, c, skip, z, bias, initial):
        y, final = {}, {}
        for row, start, stop in PIECES:
            cut = [t[row : row + 1, start:stop] for t in (x, dt, b, c, z)]
            seed = initial[row : row + 1] if start == 0 else torch.zeros_like(initial[:1])
            y[row, start], final[row] = chunk_scan_by_hand(
                *(cut[0], cut[1], a, cut[2], cut[3], skip, cut[4], bias, seed)
            )
        rows = [torch.cat([y[p[:2]] for p in PIECES if p[0] == row], 1) for row in (0, 1)]
        return torch.cat(rows), torch.cat([final[0], final[1]])

    packed = lambda *t: chunk_scan(*t, seq_idx=LABELS)  # noqa: E731
    assert_ways_agree(separate, packed, ssd_inputs(2, 9))


@pytest.mark.parametrize(
    ("last", "labels"),
    [
        (9, None),
        (8, None),
        (9, [0, 0, 0, 1, 1, 2, 2, 2, 2]),
        (8, [0, 0, 0, 1, 1, 2, 2, 2, 2]),
        (8, [0, 0, 0, 1, 1, 2, 2, 2, -1]),
    ],
)
def test_varlen_states_close_their_sequences(last, labels):
    """Each sequence's state, empty ones and padding behind the last border included; the states
    carry gradients, which upstream refuses."""
    borders = [0, 0, 3, 5, last, last]
    if labels is not None:
        labels = torch.tensor([labels], dtype=torch.int32)

    def separate(x, dt, a, b, c, skip, z, bias, initial):
        y, states = [], []
        for start, stop in zip(borders, [*borders[1:], 9], strict=True):
            cut = [t[:, start:stop] for t in (x, dt, b, c, z)]
            seed = initial if start == 0 and stop > 0 else torch.zeros_like(initial)
            state = seed
            if stop > start:
                out, state = chunk_scan_by_hand(
                    *(cut[0], cut[1], a, cut[2], cut[3], skip, cut[4], bias, seed)
                )
                y.append(out)
                final = state
            states.append(state)
        return torch.cat(y, 1), final, torch.cat(states[:-1])

    def packed(*tensors):
        return chunk_scan(
            *tensors,
            seq_idx=labels,
            cu_seqlens=torch.tensor(borders, dtype=torch.int32),
            return_varlen_states=True,
        )

    assert_ways_agree(separate, packed, ssd_inputs(1, 9))


def test_borders_alone_change_nothing():
    """As upstream, cu_seqlens are read only when per-sequence states are asked for."""
    inputs = ssd_inputs(1, 9)
    expected = chunk_scan(*inputs)
    actual = chunk_scan(*inputs, cu_seqlens=torch.tensor([0, 4, 9]))
    assert all(torch.equal(want, got) for want, got in zip(expected, actual, strict=True))


def test_state_dtype_is_that_of_varlen_states():
    """The option names a dtype of results; the computation keeps its own."""
    x, dt, a, b, c, *_ = (t.bfloat16() for t in ssd_inputs(1, 9))
    options = {"cu_seqlens": torch.tensor([0, 9]), "return_varlen_states": True}
    for state_dtype in (None, torch.float16):
        y, final, varlen = mamba_chunk_scan_combined(
            *(x, dt, a, b, c, 4), **options, return_final_states=True, state_dtype=state_dtype
        )
        assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
        assert varlen.dtype == (state_dtype or torch.float32)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_minimal_scan_equals_plain_loop(block):
    """Any block length and any length; initial states with and without the chunk axis."""
    x, dt, _, b, c, *_, initial = ssd_inputs(2, 9)
    b, c = (t.repeat_interleave(2, 2) for t in (b, c))

    def judge(x, da, b, c, initial):
        y, final = ssd_core(
            *(x[:, :, None], -da.square(), b[:, :, None], c[:, :, None], initial[:, 0]),
            impl="reference",
        )
        return y[:, :, 0], final

    assert_ways_agree(
        judge,
        lambda x, da, b, c, initial: ssd_minimal_discrete(x, -da.square(), b, c, block, initial),
        [x, dt, b, c, initial[:, None]],
    )
    same = [
        ssd_minimal_discrete(x, -(dt**2), b, c, block, s)[0] for s in (initial, initial[:, None])
    ]
    assert torch.equal(*same)


def split_by_hand(inputs: dict[str, Tensor], mlp: int, before: bool, labels) -> list[Tensor]:
    """Compose a Mamba-2 block from its parts."""
    z0, x0, z, xbc, dt = inputs["zxbcdt"].split([mlp, mlp, 12, 32, 4], -1)
    xbc = causal_conv1d_fn(
        *(xbc.transpose(1, 2), inputs["conv1d_weight"], inputs["conv1d_bias"], labels),
        activation="silu",
    ).transpose(1, 2)
    x, b, c = xbc.split([12, 10, 10], -1)
    norm = "rmsnorm_weight" in inputs
    y, final = mamba_chunk_scan_combined(
        *(x.unflatten(-1, (4, 3)), dt, inputs["A"]),
        *(b.unflatten(-1, (2, 5)), c.unflatten(-1, (2, 5)), 8, inputs["D"]),
        None if norm else z.unflatten(-1, (4, 3)),
        inputs["dt_bias"],
        inputs["initial_states"],
        labels,
        dt_softplus=True,
        dt_limit=(0.2, 0.8),
        return_final_states=True,
    )
    y = y.flatten(2)
    if norm:
        y = gated_rms_norm(
            *(y, z, inputs["rmsnorm_weight"]), eps=1e-6, group_size=6, norm_before_gate=before
        )
    y = torch.cat([F.silu(z0) * x0, y], -1)
    return [F.linear(y, inputs["outproj_weight"], inputs["outproj_bias"]), final]


@pytest.mark.parametrize(
    ("mlp", "norm", "before", "labels"),
    [
        (0, False, True, None),
        (3, False, True, LABELS),
        (3, True, True, None),
        (0, True, False, LABELS),
    ],
)
def test_split_conv_scan_equals_its_parts(mlp, norm, before, labels):
    """Split, convolution, scan, norm or gate, MLP part and projection; every gradient."""
    inputs = split_inputs(mlp, norm)

    def fused(*tensors):
        return mamba_split_conv1d_scan_combined(
            **dict(zip(inputs, tensors, strict=True)),
            chunk_size=8,
            seq_idx=labels,
            dt_limit=(0.2, 0.8),
            return_final_states=True,
            headdim=3,
            ngroups=2,
            norm_before_gate=before,
        )

    assert_ways_agree(
        lambda *t: split_by_hand(dict(zip(inputs, t, strict=True)), mlp, before, labels),
        fused,
        list(inputs.values()),
    )


def test_split_conv_scan_knows_headdim_from_a_wide_skip():
    """D with two axes says the head width; without projection the inner width comes out."""
    inputs = split_inputs(0, True)
    del inputs["outproj_weight"], inputs["outproj_bias"]
    narrow = mamba_split_conv1d_scan_combined(**inputs, chunk_size=8, headdim=3, ngroups=2)
    inputs["D"] = inputs["D"][:, None].expand(4, 3)
    wide = mamba_split_conv1d_scan_combined(**inputs, chunk_size=8, ngroups=2)
    assert narrow.shape == (2, 9, 12)
    assert_same(narrow, wide)
