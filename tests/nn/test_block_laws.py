"""The laws of the blocks: every way of running one gives the same values, caches and gradients."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from blocks import (
    BY_NAME,
    CASES,
    FEW,
    Case,
    assert_agree,
    build,
    fields,
    in_pieces,
    join,
    outcome,
    random_cache,
    stepwise,
    tokens,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.nn import Mamba, Mamba2, Mamba3
from anymamba.ops import SsdPath, ssd
from kernels import EVERY_KIND, running
from laws import assert_same

LENGTH = 9
EVERY = pytest.mark.parametrize("case", CASES, ids=str)
SOME = pytest.mark.parametrize("case", FEW, ids=str)


@EVERY
def test_pieces_and_steps_equal_whole_from_the_empty_cache(case: Case):
    """A learnable initial state is trained alike by every verb, and entered once."""
    block = build(case)
    u_bsd = tokens(block, 2, LENGTH)
    expected = outcome(block, whole(), u_bsd)
    for way in (in_pieces(2, 6, 1), stepwise):
        assert_agree(expected, outcome(block, way, u_bsd))
    forward = outcome(block, lambda block, u, _: (block(u), None), u_bsd)
    assert_agree(outcome(block, lambda *args: (stepwise(*args)[0], None), u_bsd), forward)


@pytest.mark.parametrize("name", ["mamba2-init_state", "mamba3-quaternion-double-init_state"])
def test_the_learnable_initial_state_is_the_empty_cache(name: str):
    """Every row starts from it, and it can be trained."""
    block = build(BY_NAME[name])
    cache = block.empty_cache(3)
    for state_hpr in cache.ssm_bhpr:
        assert torch.equal(state_hpr, block.init_states)
    assert cache.ssm_bhpr.requires_grad
    others = [x for name, x in cache.to_tensors().items() if name in ("conv_bvk", "v_state_bhp")]
    assert not any(bool(x.any()) for x in others)
    assert len(others) == 1


@EVERY
def test_pieces_and_steps_equal_whole_from_a_random_cache(case: Case):
    """Values, every field of the final cache, and the gradients of everything that went in."""
    block = build(case)
    u_bsd, cache = tokens(block, 2, LENGTH), random_cache(block, 2)
    expected = outcome(block, whole(), u_bsd, cache)
    for way in (in_pieces(1, 3, 5), stepwise):
        assert_agree(expected, outcome(block, way, u_bsd, cache))
    # A law about zeros would prove nothing. What no token of the call ever reads is named.
    unread = {"init_states"}
    if case.kwargs.get("d_conv") == 1:
        unread |= {"initial conv_bik", "initial conv_bvk"}
    assert {name for name, grad in expected.grads.items() if not bool(grad.any())} <= unread


@EVERY
def test_step_in_place_equals_step(case: Case):
    """The given memory takes the new state; the pure step leaves its cache alone."""
    block = build(case)
    cache = random_cache(block, 2)
    mine, before = cache.clone(), cache.clone()
    memory = [tensor.data_ptr() for tensor in mine.to_tensors().values()]
    for u_bd in tokens(block, 2, 3).unbind(1):
        y_bd, cache = block.step(u_bd, cache)
        assert_same(y_bd.detach(), block.step_(u_bd, mine))
        for name, tensor in fields(cache).items():
            assert_same(tensor.detach(), fields(mine)[name], name=name)
    assert memory == [tensor.data_ptr() for tensor in mine.to_tensors().values()]
    kept = before.clone()
    block.step(tokens(block, 2, 1)[:, 0], before)
    for name, tensor in kept.to_tensors().items():
        assert torch.equal(tensor, before.to_tensors()[name]), name


def _separate(lengths: list[int]):
    """Return the way that runs packed sequences one by one; an empty one keeps its state."""
    borders = [sum(lengths[:place]) for place in range(len(lengths) + 1)]

    def way(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = block.empty_cache(len(lengths)) if cache is None else cache
        ys, ends = [], []
        for place, (start, stop) in enumerate(pairwise(borders)):
            row = cache.rows([place])
            if start < stop:
                y, row = block.prefill(u_bsd[:, start:stop], row)
                ys.append(y)
            ends.append(row)
        return torch.cat(ys, 1), join(ends)

    return way


@EVERY
def test_packed_equals_separate(case: Case):
    """Borders stop everything: scan, convolution, rotation, look-ahead; also of empty sequences."""
    block = build(case)
    lengths = [0, 5, 1, 0, 0, 4, 3, 0]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    u_bsd = tokens(block, 1, sum(lengths))
    for cache in (None, random_cache(block, len(lengths))):
        expected = outcome(block, _separate(lengths), u_bsd, cache)
        assert_agree(expected, outcome(block, whole(cu_seqlens=cu_seqlens), u_bsd, cache))
    reference = whole(cu_seqlens=cu_seqlens.int(), impl="reference")
    assert_agree(expected, outcome(block, reference, u_bsd, cache))


@EVERY
def test_segment_labels_equal_separate_segments(case: Case):
    """The cache seeds the first segment of a row; the returned one is the last segment's."""
    block = build(case)
    seq_idx = torch.tensor([[7, 7, 7, 2, 2, 2, 2, 7, 7], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 3]])
    lengths = [[3, 4, 2], [9], [1, 7, 1]]
    u_bsd = tokens(block, 3, LENGTH)

    def separate(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        ys, ends = [], []
        for place, pieces in enumerate(lengths):
            state = None if cache is None else cache.rows([place])
            row = []
            for piece in u_bsd[place : place + 1].split(pieces, 1):
                y, end = block.prefill(piece, state)
                row.append(y)
                state = None
            ys.append(torch.cat(row, 1))
            ends.append(end)
        return torch.cat(ys), join(ends)

    for cache in (None, random_cache(block, 3)):
        expected = outcome(block, separate, u_bsd, cache)
        assert_agree(expected, outcome(block, whole(seq_idx=seq_idx), u_bsd, cache))


SINGLE = [case for case in CASES if case.kwargs.get("pathway") == "single"]


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_pathways_agree_and_switch_anywhere(case: Case):
    """One pass and two passes are the same recurrence; a cache may change hands between calls."""
    block = build(case)
    u_bsd, cache = tokens(block, 2, LENGTH), random_cache(block, 2)

    def switching(*turns: str):
        def way(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
            ys = []
            for turn, piece in zip(turns, u_bsd.tensor_split(len(turns), 1), strict=True):
                cache = cache.to_double() if turn == "double" else cache.to_single()
                y, cache = block.prefill(piece, cache)
                assert turn in type(cache).__name__.lower()
                ys.append(y)
            y_bd, cache = block.step(u_bsd[:, -1], cache)
            return torch.cat([*ys, y_bd.unsqueeze(1)], 1), cache

        return way

    expected = outcome(block, switching("single"), u_bsd, cache)
    for turns in (["double"], ["single", "double"], ["double", "single"]):
        assert_agree(expected, outcome(block, switching(*turns), u_bsd, cache))


@EVERY
def test_paths_and_implementations_agree(case: Case):
    """The algorithm and its chunk length change no number; native agrees or is refused."""
    block = build(case)
    u_bsd, cache = tokens(block, 2, LENGTH), random_cache(block, 2)
    expected = outcome(block, whole(impl="reference"), u_bsd, cache)
    ways = [whole(), whole(impl="portable")]
    if case.kind is Mamba:
        with pytest.raises(BackendError, match="path"):
            block.prefill(u_bsd, cache, path=SsdPath())
    else:
        paths = (SsdPath.minimal(4), SsdPath.serial(2), SsdPath.serial_recalculated(6), SsdPath())
        ways += [whole(path=path) for path in paths]
        ways += [whole(path=SsdPath.minimal(), impl="portable")]
    for way in ways:
        assert_agree(expected, outcome(block, way, u_bsd, cache))
    try:
        native = outcome(block, whole(impl="native"), u_bsd, cache)
    except BackendError:
        return
    assert_agree(expected, native)


@EVERY
def test_batch_rows_are_independent(case: Case):
    """A row alone gives what it gives among others."""
    block = build(case)
    u_bsd, cache = tokens(block, 3, 5), random_cache(block, 3)

    def row_by_row(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        results = [block.prefill(u_bsd[i : i + 1], cache.rows([i])) for i in range(3)]
        return torch.cat([y for y, _ in results]), join([end for _, end in results])

    expected = outcome(block, row_by_row, u_bsd, cache)
    assert_agree(expected, outcome(block, whole(), u_bsd, cache))


@pytest.mark.parametrize("length", [1, 63, 64, 65])
@SOME
def test_odd_lengths_with_automatic_chunks(case: Case, length: int):
    """Around the border of a chunk: whole, pieces and the loop over time agree."""
    kwargs = case.kwargs | ({} if case.kind is Mamba else {"chunk_size": None})
    block = build(case._replace(kwargs=kwargs))
    u_bsd, cache = tokens(block, 1, length), random_cache(block, 1)
    expected = outcome(block, whole(impl="reference"), u_bsd, cache)
    pieces = [length] if length == 1 else [length // 2, length - length // 2]
    for way in (whole(), in_pieces(*pieces)):
        assert_agree(expected, outcome(block, way, u_bsd, cache))


TINY = [
    Case("mamba1", Mamba, {"d_model": 8, "d_state": 4}),
    Case("mamba2", Mamba2, {"d_model": 8, "d_state": 4, "headdim": 4}),
    Case("mamba3", Mamba3, {"d_model": 8, "d_state": 4, "headdim": 4}),
    Case(
        "mamba3-quaternion",
        Mamba3,
        {
            "d_model": 8,
            "d_state": 4,
            "headdim": 4,
            "rotation": "quaternion",
            "rope_fraction": 1.0,
            "is_mimo": True,
            "mimo_rank": 2,
        },
    ),
]


@pytest.mark.parametrize("case", TINY, ids=str)
def test_tiny_blocks_on_one_token(case: Case):
    """The smallest sizes are no special case."""
    block = build(case)
    u_bsd, cache = tokens(block, 1, 1), random_cache(block, 1)
    expected = outcome(block, whole(impl="reference"), u_bsd, cache)
    for way in (whole(), stepwise):
        assert_agree(expected, outcome(block, way, u_bsd, cache))


@pytest.mark.parametrize("case", TINY, ids=str)
def test_gradients_equal_finite_differences(case: Case):
    """The gradients of input and cache are those of the function itself."""
    block = build(case)
    u_bsd, cache = tokens(block, 1, 3), random_cache(block, 1)
    names, leaves = zip(*cache.to_tensors().items(), strict=True)

    def run(u_bsd: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        start = type(cache).from_tensors(dict(zip(names, tensors, strict=True)))
        y_bsd, end = block.prefill(u_bsd, start, **options)
        return y_bsd, *fields(end).values()

    options = {} if case.kind is Mamba else {"path": SsdPath.serial_recalculated(2)}
    leaves = [x.detach().requires_grad_() for x in (u_bsd, *leaves)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@SOME
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_float32_keeps_the_laws(case: Case, kind: str):
    """The tolerances of float32 suffice for all ways at once, on every implementation."""
    block = build(case, torch.float32)
    u_bsd, cache = tokens(block, 2, 20), random_cache(block, 2)
    assert {x.dtype for x in cache.to_tensors().values()} == {torch.float32}
    expected = outcome(block, whole(impl="reference"), u_bsd, cache)
    with running(kind):
        for way in (whole(), in_pieces(7, 1, 12), stepwise):
            assert_agree(expected, outcome(block, way, u_bsd, cache))


HALF = [*((torch.bfloat16, kind) for kind in EVERY_KIND), (torch.float16, "portable")]


@SOME
@pytest.mark.parametrize(("dtype", "kind"), HALF, ids=str)
def test_half_types_keep_float32_states_and_the_laws(case: Case, dtype: torch.dtype, kind: str):
    """Steps follow the whole within rounding; the scan's state and the rotation stay float32."""
    block = build(case, dtype)
    u_bsd = tokens(block, 2, 12)
    with torch.no_grad(), running(kind):
        y_bsd, cache = block.prefill(u_bsd)
        y_steps_bsd, cache_steps = stepwise(block, u_bsd, None)
    assert y_bsd.dtype == y_steps_bsd.dtype == dtype
    assert_same(y_bsd, y_steps_bsd, name="y")
    for name, tensor in fields(cache).items():
        wide = name.startswith(("ssm", "rotation"))
        assert tensor.dtype == (torch.float32 if wide else dtype), name
        gap = (tensor.float() - fields(cache_steps)[name].float()).abs().max()
        assert gap <= 2e-2 * tensor.float().abs().max(), name


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
@SOME
def test_any_cut_into_pieces_equals_whole(case: Case, data: st.DataObject):
    """Pieces of any lengths, on any path, with steps between them."""
    block = build(case)
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    u_bsd, cache = tokens(block, 1, sum(lengths)), random_cache(block, 1)
    paths = [None]
    if case.kind is not Mamba:
        paths += [SsdPath.minimal(3), SsdPath.serial(2), SsdPath.serial_recalculated(1)]
    chosen = [data.draw(st.sampled_from(paths)) for _ in lengths]

    def way(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        ys = []
        for piece, path in zip(u_bsd.split(lengths, 1), chosen, strict=True):
            if piece.shape[1] == 1:
                y_bd, cache = block.step(piece[:, 0], cache)
                ys.append(y_bd.unsqueeze(1))
            else:
                y, cache = block.prefill(piece, cache, path=path)
                ys.append(y)
        return torch.cat(ys, 1), cache

    expected = outcome(block, whole(impl="reference"), u_bsd, cache)
    assert_agree(expected, outcome(block, way, u_bsd, cache))


def _rotation_rows(block: Any) -> slice:
    return slice(sum(block.split_sizes[:-1]), None)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("pathway", ["single", "double"])
def test_one_axis_quaternion_equals_complex(fraction: float, pathway: str):
    """A block turning about x by phi turns its two interleaved pairs by -phi / 2."""
    kwargs = {**BY_NAME["mamba3-complex-single-ngroups2"].kwargs, "rope_fraction": fraction}
    kwargs |= {"pathway": pathway}
    quaternion = build(
        Case("", Mamba3, {**kwargs, "rotation": "quaternion", "rotation_range": 1.6})
    )
    half_turn = build(Case("", Mamba3, {**kwargs, "rotation": "complex", "rotation_range": 0.8}))
    blocks, heads = quaternion.rotation.blocks, quaternion.nheads
    with torch.no_grad():
        weight, rows = quaternion.in_proj.weight, _rotation_rows(quaternion)
        turn_jd = weight[rows].unflatten(0, (heads, blocks, 3))[0, :, 0].clone()
        weight[rows].zero_()
        weight[rows].unflatten(0, (heads, blocks, 3))[:, :, 0] = turn_jd
        half_turn.load_state_dict(
            quaternion.state_dict()
            | {
                "in_proj.weight": torch.cat(
                    [weight[: rows.start], -turn_jd.repeat_interleave(2, 0)]
                )
            }
        )
    cache_c = random_cache(half_turn, 2)
    half_bhj = -cache_c.rotation.angle_bha[..., ::2]
    angle_bha = -half_bhj.repeat_interleave(2, -1)
    cache_c = cache_c._replace(rotation=cache_c.rotation._replace(angle_bha=angle_bha))
    zero = torch.zeros_like(half_bhj)
    q_bhj4 = torch.stack([half_bhj.cos(), half_bhj.sin(), zero, zero], -1)
    state = random_cache(quaternion, 2).rotation._replace(quaternion_bhj4=q_bhj4)
    cache_q = cache_c._replace(rotation=state)

    u_bsd = tokens(quaternion, 2, LENGTH)
    loss_y = lambda block, u, cache: (block.prefill(u, cache)[0], None)  # noqa: E731
    expected = outcome(half_turn, loss_y, u_bsd, cache_c)
    actual = outcome(quaternion, loss_y, u_bsd, cache_q)
    assert_same(expected.values["y"], actual.values["y"])
    for name in expected.grads.keys() - {"in_proj.weight", "initial rotation.angle_bha"}:
        assert_same(expected.grads[name], actual.grads[name], "grad", name)
    grad_c, grad_q = expected.grads["in_proj.weight"], actual.grads["in_proj.weight"]
    assert_same(grad_c[: rows.start], grad_q[: rows.start], "grad")
    grad_turn_jd = grad_q[rows].unflatten(0, (heads, blocks, 3))[:, :, 0].sum(0)
    assert_same(-grad_c[rows].unflatten(0, (blocks, 2)).sum(1), grad_turn_jd, "grad")

    (_, end_c), (_, end_q) = (
        block.prefill(u_bsd, cache)
        for block, cache in ((half_turn, cache_c), (quaternion, cache_q))
    )
    for name in ("ssm_bhpr", "k_state_bmhr", "v_state_bhp"):
        assert_same(getattr(end_c, name).detach(), getattr(end_q, name).detach(), name=name)
    angle, q = end_c.rotation.angle_bha[..., ::2].detach(), end_q.rotation.quaternion_bhj4.detach()
    assert_same(torch.stack([angle.cos(), -angle.sin()], -1), q[..., :2])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_rank_one_pairs_halves_where_siso_pairs_neighbours(fraction: float):
    """`is_mimo` with one rank of weight one is the plain block, its state in another order."""
    kwargs = {**BY_NAME["mamba3-complex-single-siso"].kwargs, "rope_fraction": fraction}
    siso = build(Case("", Mamba3, kwargs))
    mimo = build(Case("", Mamba3, {**kwargs, "is_mimo": True, "mimo_rank": 1}))
    size = siso.d_state
    order = torch.arange(size).view(-1, 2).T.flatten()
    weights = dict(siso.state_dict())
    in_rows = torch.arange(weights["in_proj.weight"].shape[0])
    keys = 2 * siso.d_inner
    for start in (keys, keys + size):
        in_rows[start : start + size] = start + order
    weights["in_proj.weight"] = weights["in_proj.weight"][in_rows]
    for name in ("B_norm.weight", "C_norm.weight", "B_bias", "C_bias"):
        weights[name] = weights[name][..., order]
    ones = {name: torch.ones_like(getattr(mimo, name)) for name in ("mimo_x", "mimo_z", "mimo_o")}
    mimo.load_state_dict(weights | ones)
    u_bsd, cache = tokens(siso, 2, LENGTH), random_cache(siso, 2)
    moved = cache._replace(
        ssm_bhpr=cache.ssm_bhpr[..., order], k_state_bmhr=cache.k_state_bmhr[..., order]
    )
    expected, end = siso.prefill(u_bsd, cache)
    actual, end_mimo = mimo.prefill(u_bsd, moved)
    assert_same(expected.detach(), actual.detach())
    assert_same(end.ssm_bhpr[..., order].detach(), end_mimo.ssm_bhpr.detach())


@pytest.mark.parametrize("rotation", ["complex", "quaternion"])
def test_without_a_rotated_part_the_rotation_changes_nothing(rotation: str):
    """With fraction 0 the rotation's channels are projected and accumulated, but never used."""
    block = build(BY_NAME[f"mamba3-{rotation}-single-rope0"])
    u_bsd, cache = tokens(block, 2, LENGTH), random_cache(block, 2)
    expected = block.prefill(u_bsd, cache)[0].detach()
    with torch.no_grad():
        block.in_proj.weight[_rotation_rows(block)] *= -3
    assert_same(expected, block.prefill(u_bsd, cache)[0].detach())


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("ngroups", [1, 2])
def test_full_weight_on_the_token_without_rotation_is_the_mamba2_update(pathway: str, ngroups: int):
    """With lambda = 1 and nothing rotated, H = exp(dt A) H + dt x B^T: the scan of Mamba-2."""
    base = BY_NAME["mamba3-complex-single-bias"].kwargs
    kwargs = {**base, "rope_fraction": 0.0, "pathway": pathway, "ngroups": ngroups}
    block = build(Case("", Mamba3, kwargs))
    names = ("z", "x", "b", "c", "dt", "a", "lam", "turn")
    starts = [sum(block.split_sizes[:place]) for place in range(9)]
    rows = {n: slice(*span) for n, span in zip(names, pairwise(starts), strict=True)}
    raw_a_h = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64)
    with torch.no_grad():
        for name, value in (("a", raw_a_h), ("lam", 60.0)):
            block.in_proj.weight[rows[name]] = 0
            block.in_proj.bias[rows[name]] = value

    def mamba2(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        part = dict(zip(names, block.in_proj(u_bsd).split(block.split_sizes, -1), strict=True))
        heads = (block.nheads, block.headdim)

        def prepared(raw: Tensor, weight_r: Tensor, bias_hmr: Tensor) -> Tensor:
            x_bsgr = raw.unflatten(-1, (ngroups, -1))
            scale = (x_bsgr.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            x_bshr = (x_bsgr * scale * weight_r).repeat_interleave(block.nheads // ngroups, -2)
            return x_bshr + bias_hmr[:, 0]

        y_bshp, _ = ssd(
            part["x"].unflatten(-1, heads),
            torch.nn.functional.softplus(part["dt"] + block.dt_bias),
            -(1 + raw_a_h),
            prepared(part["b"], block.B_norm.weight, block.B_bias),
            prepared(part["c"], block.C_norm.weight, block.C_bias),
            block.D,
            cache.ssm_bhpr,
        )
        return block.out_proj(y_bshp.flatten(-2) * torch.nn.functional.silu(part["z"])), None

    u_bsd, cache = tokens(block, 2, LENGTH), random_cache(block, 2)
    expected = outcome(block, mamba2, u_bsd, cache)
    actual = outcome(block, lambda *args: (block.prefill(*args[1:])[0], None), u_bsd, cache)
    # The constant decay and weight of this test have gradients of their own in the block only.
    for outcomes in (expected, actual):
        for name in ("in_proj.weight", "in_proj.bias"):
            for row in ("a", "lam"):
                outcomes.grads[name][rows[row]] = 0
    assert_agree(expected, actual)


def test_mimo_values_are_not_copied_once_more():
    """The scan takes them as they were computed: no copy of (ranks, tokens, width) numbers."""
    block = Mamba3(64, d_state=16, headdim=16, is_mimo=True, mimo_rank=4)
    u_bsd = tokens(block, 1, 50)
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        block(u_bsd)
    copies = [event for event in profile.events() if event.name == "aten::copy_"]
    assert [1, 50, 4, 8, 16] not in [event.input_shapes[0] for event in copies]
