"""The laws of a scan, as numbers: how far two ways of computing the same thing lie apart."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from anymamba.cli.scans import Scan
from anymamba.ops import SsdPath

__all__ = ["LAWS", "distance", "errors_of"]

Tensors = list[Tensor]


def errors_of(scan: Scan) -> dict[str, float | None]:
    """Return the largest relative error of each law against the loop over time."""
    want = _flat(scan.run(scan.tokens, scan.state, impl="reference"))
    return {name: law(scan, want) for name, law in LAWS.items()}


def distance(scan: Scan, **how: Any) -> float:
    """Return how far a way of running the whole scan lies from the loop over time."""
    want = _flat(scan.run(scan.tokens, scan.state, impl="reference"))
    return _distance(want, _flat(scan.run(scan.tokens, scan.state, **how)))


def _flat(result: tuple[Tensor, Tensors]) -> Tensors:
    return [result[0], *result[1]]


def _distance(want: Tensors, got: Tensors) -> float:
    return max(
        float((w - g).detach().abs().max() / w.detach().abs().max().clamp(min=1e-6))
        for w, g in zip(want, got, strict=True)
    )


def _pieces(scan: Scan, want: Tensors) -> float:
    """A sequence in three pieces, the state handed on."""
    length = scan.tokens[0].shape[1]
    return _distance(want, _in_pieces(scan, sorted({0, 1, length // 3, length})))


def _steps(scan: Scan, want: Tensors) -> float:
    """One token at a time, by the step functions."""
    state, ys = scan.state, []
    for place in range(scan.tokens[0].shape[1]):
        y, state = scan.step([x[:, place] for x in scan.tokens], state)
        ys.append(y)
    return _distance(want, [torch.stack(ys, 1), *state])


def _in_pieces(scan: Scan, cuts: list[int]) -> Tensors:
    state, ys = scan.state, []
    for start, stop in pairwise(cuts):
        y, state = scan.run([x[:, start:stop] for x in scan.tokens], state)
        ys.append(y)
    return [torch.cat(ys, 1), *state]


def _packed(scan: Scan, want: Tensors) -> float:
    """Three sequences in one row, one of them empty, against each by itself."""
    length = scan.tokens[0].shape[1]
    cuts = [0, length // 3, length // 3, length]
    states = [[x * scale for x in scan.state] for scale in (1.0, 0.5, 0.25)]
    y, state = scan.run(
        scan.tokens,
        [torch.cat(rows) for rows in zip(*states, strict=True)],
        cu_seqlens=torch.tensor(cuts),
    )
    alone = [
        _flat(scan.run([x[:, start:stop] for x in scan.tokens], states[row]))
        for row, (start, stop) in ((0, (0, cuts[1])), (2, (cuts[1], length)))
    ]
    got = [y[:, : cuts[1]], *(x[:1] for x in state)], [y[:, cuts[1] :], *(x[2:] for x in state)]
    return max(_distance(w, g) for w, g in zip(alone, got, strict=True))


def _path(kind: str) -> Callable[[Scan, Tensors], float | None]:
    def law(scan: Scan, want: Tensors) -> float | None:
        if not scan.has_paths:
            return None
        return _distance(want, _flat(scan.run(scan.tokens, scan.state, path=SsdPath(kind))))

    return law


def _gradients(scan: Scan, want: Tensors) -> float:
    """Gradients of all tokens and states, by the recomputing backward."""
    found = []
    for impl in ("reference", "auto"):
        tokens = [x.clone().requires_grad_() for x in scan.tokens]
        state = [x.clone().requires_grad_() for x in scan.state]
        outputs = _flat(scan.run(tokens, state, impl=impl))
        loss = torch.stack([y.sin().sum() for y in outputs]).sum()
        found.append(list(torch.autograd.grad(loss, [*tokens, *state])))
    return _distance(*found)


LAWS: dict[str, Callable[[Scan, Tensors], float | None]] = {
    "minimal": _path("minimal"),
    "serial": _path("serial"),
    "recalc.": _path("serial_recalculated"),
    "pieces": _pieces,
    "steps": _steps,
    "packed": _packed,
    "grads": _gradients,
}
