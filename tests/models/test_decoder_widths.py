"""Laws of the decoder's wide matrices: many blocks of columns, and last ones that are not whole.

The kernels take 256 columns of integers at a time, or 128 with one scale, in blocks of 32.
"""

import copy
import functools

import pytest
import torch

from anymamba.models import quantize_lm
from anymamba.nn import Mamba
from decoder_cases import (
    PAIRS,
    assert_near,
    assert_near_states,
    clearest,
    model,
    round_activations,
    round_inputs,
    round_windows,
    tokens,
    used_cache,
)
from kernels import DECODERS, running
from laws import TOLERANCE

pytestmark = pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
MODELS = {
    "mamba1 of 100 and 200": ("mamba1", {"d_model": 100}),
    "mamba1 of 384 and 768": ("mamba1", {"d_model": 384}),
    "mamba3 of 300, 600 and 100": ("mamba3", {"d_model": 300, "d_intermediate": 100}),
    "mamba3 of 198, 396 and 1000": ("mamba3", {"d_model": 198, "d_intermediate": 1000}),
}
INTEGERS = ("int8", "int4")
CANDIDATES = 128


@functools.cache
def case(name, form):
    """Return a model, the model of float32 with its numbers, and states with a past."""
    family, sizes = MODELS[name]
    sizes = {"n_layer": 1, "noise": 0.02, **sizes}
    if form in INTEGERS:
        lm = wide = quantize_lm(model(family, **sizes), form)
    else:
        lm, wide = model(family, getattr(torch, form), **sizes), model(family, **sizes)
        wide.load_state_dict(lm.state_dict())
    return lm, wide, used_cache(lm, 8).rows([row % 8 for row in range(CANDIDATES)])


def round_halves(wide, dtype, kind):
    """Return the model with what the decoder rounds to a half type, and the error that is left.

    An entry on the other side of a half is an eps off, half of which is that of storing it.
    """
    meets = dtype == torch.bfloat16 and kind in PAIRS
    if not meets and not isinstance(wide.backbone.layers[0].mixer, Mamba):
        return wide, TOLERANCE[torch.float32, "value"]
    wide = copy.deepcopy(wide)
    round_windows(wide, dtype)
    if meets:
        round_inputs(wide, dtype)
    return wide, torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", *INTEGERS])
@pytest.mark.parametrize("name", MODELS)
def test_columns_of_any_number_equal_modules(name, form, kind, monkeypatch):
    """However many columns meet however many rows, logits and state are those of the modules."""
    lm, wide, start = case(name, form)
    ids_b, margins, left = tokens(CANDIDATES), [], TOLERANCE[torch.float32, "value"]
    if form in INTEGERS:
        # One token of one layer has no room for the 1e-3 of 15 bits: 8e-5 at most in twenty seeds.
        left = min(2e-4, round_activations(monkeypatch, form, kind, margins))
    elif form != "float32":
        wide, left = round_halves(wide, getattr(torch, form), kind)
    with torch.no_grad():
        logits_bw, want = wide.step(ids_b, start.to(torch.float32), impl="portable")
    best = clearest(margins, 9) if margins else list(range(9))
    for rows in (1, 2, 5, 8, 9):
        chosen = best[:rows]
        got = start.rows(chosen).clone()
        with running(kind):
            actual = lm.step_(ids_b[chosen], got, impl="native")
        assert_near(logits_bw[chosen], actual, left)
        assert_near_states(want.rows(chosen), got, left)
