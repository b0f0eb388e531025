"""The equality matrix: every way of running a model against the loop over time.

Language models run on token ids, models on continuous inputs (`LatentModel`) on random numbers.

    forward     the whole at once                    minimal, serial, serial_recalculated
    pieces      prefill, the state handed on                     the three SSD algorithms
    steps       one token at a time                  portable, native     implementations
    packed      ragged sequences in one row, one of them empty (cu_seqlens)
    seq_idx     the same, by segment labels

The judge is `impl="reference"` in the same dtype; half types are judged by float32, because their
own loop over time rounds as much as the ways it would judge: it is one more row.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import BackendError, ConfigError
from anymamba.models.latent import LatentModel
from anymamba.models.lm import MambaLM
from anymamba.models.verify_inputs import Judged, check_subject, depth_of, has_ssd, inputs_for
from anymamba.models.verify_report import VerifyReport, VerifyRow
from anymamba.nn import ModelCache
from anymamba.ops import SsdPath
from anymamba.settings import override

__all__ = ["verify"]

# Errors are relative to the largest expected value. These are for one layer; rounding errors of
# layers are independent, so n of them add up like a random walk, to sqrt(n) times as much.
TOLERANCE = {
    "float64": 1e-10,  # rounding 1e-16, two orders of summation
    "float32": 5e-5,  # rounding 6e-8, amplified by sums over a chunk and by accumulated angles
    "float16": 2e-3,  # weights and activations rounded by 5e-4
    "bfloat16": 2e-2,  # weights and activations rounded by 4e-3
}
HALF_TYPES = ("float16", "bfloat16")

# Logits row by row, and the state where a way has one to compare.
Run = tuple[Sequence[Tensor], ModelCache | None]
Model = MambaLM | LatentModel
Way = Callable[[Model, Tensor], Run]


@torch.no_grad()
def verify(
    lm: Model,
    ids: Tensor | None = None,
    *,
    length: int = 65,
    batch: int = 2,
    dtypes: Sequence[str] = ("float32",),
    tolerance: float | None = None,
) -> VerifyReport:
    """Run a model in every way there is and compare logits and final states.

    Args:
        lm: the model, a `MambaLM` or a `LatentModel`; it is not changed. A copy is cast where a
            dtype is not its own. A readout does not matter: every place is compared.
        ids: token ids (batch, sequence), or inputs (batch, sequence, d_input) of a `LatentModel`;
            random ones when omitted.
        length: tokens per row, if `ids` is omitted; 65 crosses the border of a chunk.
        batch: rows, if `ids` is omitted.
        dtypes: of "float32", "float64", "bfloat16", "float16". Logits of half types are compared
            with those of float32, so that their error includes the rounding of the weights; their
            states are not compared.
        tolerance: largest error accepted, for every dtype; by default sqrt(n_layer) times float64
            1e-10, float32 5e-5, float16 2e-3, bfloat16 2e-2. In half types the limit rises to twice
            the error of the loop over time itself (the row "reference"), at most tenfold.

    Raises:
        ConfigError: a dtype is unknown, none is given, or a size is not positive; or there is only
            one way to run the model: it reads from both ends, or inserts registers, whose rows a
            step does not return.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> verify(lm, length=5).ok
        True
    """
    _check(dtypes, length, batch)
    lm = check_subject(lm)
    ids_bs = inputs_for(lm, ids, batch, length)
    models: dict[str, Model] = {}

    def model_in(dtype: str) -> Model:
        if dtype not in models:
            models[dtype] = _cast(lm, getattr(torch, dtype))
        return models[dtype]

    judged: dict[str, Judged] = {}
    rows: list[VerifyRow] = []
    for dtype in dict.fromkeys(dtypes):
        judge = "float64" if dtype == "float64" else "float32"
        if judge not in judged:
            model = model_in(judge)
            with override(native="off"):
                truth = model.prefill(_as_input(model, ids_bs), impl="reference")
            judged[judge] = Judged(*truth)
        limit = TOLERANCE[dtype] * sqrt(depth_of(lm)) if tolerance is None else tolerance
        run = model_in(dtype), _as_input(model_in(dtype), ids_bs), judged[judge]
        if dtype in HALF_TYPES:
            rows.append(_row("reference", dtype, limit, partial(_whole, impl="reference"), *run))
            if tolerance is None:
                rows[-1], limit = _calibrated(rows[-1])
        rows += [_row(name, dtype, limit, way, *run) for name, way in _ways(lm)]
    return VerifyReport(tuple(rows), *ids_bs.shape[:2])


def _as_input(model: Model, ids_bs: Tensor) -> Tensor:
    """Return the input in the dtype of a model that takes numbers."""
    return ids_bs if isinstance(model, MambaLM) else ids_bs.to(model.in_proj.weight.dtype)


def _calibrated(row: VerifyRow) -> tuple[VerifyRow, float]:
    """Return the reference's own row and the limit of the other ways, from what rounding does.

    How far rounding moves the logits depends on the weights, up to tenfold between healthy models.
    The other ways round as often as the loop over time: they may err twice as much as it does.
    """
    assert row.error is not None
    highest = 10 * row.tolerance
    # Comparisons with NaN are false, so a reference without a number raises no limit.
    limit = 2 * row.error if row.tolerance < 2 * row.error else row.tolerance
    return row._replace(tolerance=highest), min(limit, highest)


def _check(dtypes: Sequence[str], length: int, batch: int) -> None:
    if isinstance(dtypes, str) or not dtypes or set(dtypes) - set(TOLERANCE):
        raise ConfigError(
            f"verify: dtypes must be a sequence of names out of {', '.join(TOLERANCE)}; "
            f"got {dtypes!r}."
        )
    if length < 1 or batch < 1:
        raise ConfigError(f"verify: length and batch must be positive; got {length} and {batch}.")


def _cast(lm: Model, dtype: torch.dtype) -> Model:
    """Return the model in a dtype, sensitive parameters as wide as the constructor makes them."""
    wanted = type(lm)(lm.config, device="meta", dtype=dtype).state_dict(keep_vars=True)  # pyright: ignore[reportArgumentType]
    if all(x.dtype == wanted[name].dtype for name, x in lm.named_parameters() if name in wanted):
        return lm
    lm = copy.deepcopy(lm)
    for name, parameter in lm.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted[name].dtype if name in wanted else dtype)
    return lm


def _ways(lm: Model) -> Iterator[tuple[str, Way]]:
    yield "forward", lambda lm, ids_bs: (lm(ids_bs).unbind(0), None)
    yield "pieces", _pieces
    yield "steps", _steps
    yield "packed", _packed
    yield "seq_idx", _labelled
    if has_ssd(lm):  # the selective scan has one algorithm
        for path in (SsdPath.minimal(), SsdPath.serial(), SsdPath.serial_recalculated()):
            yield path.kind, partial(_whole, path=path)
    for impl in ("portable", "native"):
        yield impl, partial(_whole, impl=impl)


def _whole(lm: Model, ids_bs: Tensor, impl: str = "auto", **how: Any) -> Run:
    # What is judged by or judged as portable code meets no kernel, not even beside the scan.
    kernels = override(native="off") if impl in ("reference", "portable") else nullcontext()
    with kernels:
        logits_bsw, cache = lm.prefill(ids_bs, impl=impl, **how)
    return logits_bsw.unbind(0), cache


def _pieces(lm: Model, ids_bs: Tensor) -> Run:
    length = ids_bs.shape[1]
    # One token, then odd lengths: no border of a piece is a border of a chunk.
    cuts = sorted({0, 1, max(1, length // 3), max(1, length // 2 - 1), length})
    logits, cache = [], None
    for start, stop in pairwise(cuts):
        piece_bsw, cache = lm.prefill(ids_bs[:, start:stop], cache)
        logits.append(piece_bsw)
    return torch.cat(logits, 1).unbind(0), cache


def _steps(lm: Model, ids_bs: Tensor) -> Run:
    cache, logits = lm.empty_cache(ids_bs.shape[0]), []
    for ids_b in ids_bs.unbind(1):
        logits_bw, cache = lm.step(ids_b, cache)
        logits.append(logits_bw)
    return torch.stack(logits, 1).unbind(0), cache


def _packed(lm: Model, ids_bs: Tensor) -> Run:
    rows = _ragged(ids_bs)
    lengths = [len(row) for row in rows]
    # An empty sequence behind the first one: its neighbours must not notice.
    borders = [0, lengths[0], *accumulate(lengths)]
    cu_seqlens = torch.tensor(borders, device=ids_bs.device)
    logits_1sw = lm(torch.cat(rows)[None], cu_seqlens=cu_seqlens)
    return logits_1sw[0].split(lengths), None


def _labelled(lm: Model, ids_bs: Tensor) -> Run:
    rows = _ragged(ids_bs)
    labels = torch.cat(
        [torch.full((len(row),), place, device=row.device) for place, row in enumerate(rows)]
    )
    logits_1sw = lm(torch.cat(rows)[None], seq_idx=labels[None])
    return logits_1sw[0].split([len(row) for row in rows]), None


def _ragged(ids_bs: Tensor) -> list[Tensor]:
    """Cut row n short by n tokens; what is left is judged by the same places of the whole row."""
    length = ids_bs.shape[1]
    return [row[: max(1, length - place)] for place, row in enumerate(ids_bs)]


def _row(
    name: str, dtype: str, limit: float, way: Way, lm: Model, ids_bs: Tensor, judge: Judged
) -> VerifyRow:
    try:
        logits, cache = way(lm, ids_bs)
    except BackendError as error:
        return VerifyRow(name, dtype, None, None, None, limit, _reason(error))
    expected_bsw = judge.logits
    error, place = 0.0, None
    scale = max(_largest(expected_bsw), 1e-6)
    for expected_sw, got_sw in zip(expected_bsw, logits, strict=True):
        expected_sw = expected_sw[: len(got_sw)]
        error = _worse(error, _largest(got_sw.to(expected_sw.dtype) - expected_sw) / scale)
        if isinstance(lm, MambaLM):
            place = _first(place, _diverges_at(expected_sw, got_sw, lm.config.vocab_size))
    state_error = None
    if cache is not None and dtype not in HALF_TYPES:
        state_error = _state_error(judge.cache, cache)
    return VerifyRow(name, dtype, error, state_error, place, limit)


def _reason(error: BackendError) -> str:
    """Return what was wrong, without the place and the advice."""
    return str(error).partition(": ")[2].partition(". ")[0]


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _worse(one: float, other: float) -> float:
    """Return the larger one; NaN wins, which `max` does not promise."""
    return other if other != other or other > one else one


def _first(one: int | None, other: int | None) -> int | None:
    return min((place for place in (one, other) if place is not None), default=None)


def _diverges_at(expected_sw: Tensor, got_sw: Tensor, vocab_size: int) -> int | None:
    """Return the first position whose most likely token differs."""
    tokens = (x[:, :vocab_size].argmax(-1) for x in (expected_sw, got_sw))
    differs_s = torch.ne(*tokens)
    return int(differs_s.int().argmax()) if bool(differs_s.any()) else None


def _state_error(expected: ModelCache, got: ModelCache) -> float:
    """Return the largest error of any field of any layer; angles count on the circle."""
    error, wanted = 0.0, expected.to_tensors()
    for name, x in got.to_tensors().items():
        y = wanted[name]
        if name.endswith("angle_bha"):
            x, y = (torch.cat([z.cos(), z.sin()]) for z in (x, y))
        if x.numel():
            gap = _largest(x.to(torch.promote_types(x.dtype, y.dtype)) - y)
            error = _worse(error, gap / max(_largest(y), 1e-6))
    return error
