"""What the selective scan refuses, and what it says."""

import pytest
import torch
from selective_scan_cases import fast, make

from anymamba import settings as switches
from anymamba.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    PackingError,
    ShapeError,
)
from anymamba.ops.selective_scan import selective_scan, selective_scan_step


def replaced(place: int, value: object, **sizes) -> list:
    arguments: list = make(5, **sizes)
    arguments[place] = value
    return arguments


MISTAKES = {
    "u rank": (replaced(0, torch.ones(2, 5)), ShapeError, "u_bsi"),
    "u no tensor": (replaced(0, 1.0), DtypeError, "u_bsi"),
    "u integer": (replaced(0, torch.ones(2, 5, 6, dtype=torch.int64)), DtypeError, "u_bsi"),
    "dt length": (replaced(1, torch.ones(2, 4, 6).double()), ShapeError, "dt_bsi"),
    "dt dtype": (replaced(1, torch.ones(2, 5, 6).half()), DtypeError, "dt_bsi"),
    "a channels": (replaced(2, torch.ones(5, 4).double()), ShapeError, "a_ir"),
    "b rank": (replaced(3, torch.ones(4).double()), ShapeError, "b must have"),
    "b no tensor": (replaced(3, None), DtypeError, "b must be"),
    "b states": (replaced(3, torch.ones(2, 5, 3).double()), ShapeError, "b must have state size"),
    "b length": (replaced(3, torch.ones(2, 6, 4).double()), ShapeError, "b must have sequence"),
    "b groups": (replaced(3, torch.ones(2, 5, 4, 4).double()), ConfigError, "groups of b"),
    "b empty": (replaced(3, torch.ones(2, 5, 0, 4).double()), ShapeError, "b_bsgr"),
    "b dtype": (replaced(3, torch.ones(2, 5, 4)), DtypeError, "b must have the dtype"),
    "b device": (replaced(3, torch.ones(2, 5, 4, device="meta").double()), DeviceError, "b must"),
    "c constant channels": (
        replaced(4, torch.ones(5, 4).double()),
        ShapeError,
        "c must have inner",
    ),
    "c groups": (replaced(4, torch.ones(2, 5, 5, 4).double()), ConfigError, "groups of c"),
    "skip": (replaced(5, torch.ones(5).double()), ShapeError, "skip_i"),
    "initial rank": (replaced(6, torch.ones(6, 4).double()), ShapeError, "initial_bir"),
    "initial rows": (replaced(6, torch.ones(3, 6, 4).double()), ShapeError, "initial_bir"),
    "initial dtype": (replaced(6, torch.ones(2, 6, 4)), DtypeError, "initial_bir"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_bad_arguments_by_name(mistake):
    """A bad argument raises our error, which names it."""
    arguments, error, words = MISTAKES[mistake]
    with pytest.raises(error, match=words) as caught:
        fast(*arguments)
    assert str(caught.value).startswith("selective_scan: ")


def test_rejects_empty_sequences_outside_packing():
    """Zero tokens is a mistake."""
    with pytest.raises(ShapeError, match="empty"):
        fast(*make(5)[:1], torch.ones(2, 0, 6).double(), *make(5)[2:])


def test_rejects_unknown_and_missing_implementations():
    """An unknown impl is a configuration error; the native one is refused with the reason."""
    with pytest.raises(ConfigError, match="impl"):
        selective_scan(*make(3), impl="fast")
    with pytest.raises(BackendError, match="impl='native'"):
        selective_scan(*make(3), impl="native")


def test_rejects_bad_packing():
    """Borders that do not describe the row, a batch, or states of another count are refused."""
    arguments = make(5, batch=1, rows=2)
    with pytest.raises(PackingError, match="end at the sequence length"):
        fast(*arguments, cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(PackingError, match="batch must be 1"):
        fast(*make(5), cu_seqlens=torch.tensor([0, 2, 5]))
    with pytest.raises(ShapeError, match="one row per packed sequence"):
        fast(*arguments, cu_seqlens=torch.tensor([0, 2, 3, 5]))
    with pytest.raises(DtypeError, match="cu_seqlens"):
        fast(*arguments, cu_seqlens=[0, 2, 5])


STEP_MISTAKES = {
    "u": (0, torch.ones(2).double(), ShapeError, "u_bi"),
    "state": (6, torch.ones(3, 6, 4).double(), ShapeError, "state_bir"),
    "b shape": (3, torch.ones(5, 4).double(), ShapeError, "b must have shape"),
    "c no tensor": (4, 2.0, DtypeError, "c must be a tensor"),
    "c groups": (4, torch.ones(2, 5, 4).double(), ConfigError, "groups of c"),
    "dt dtype": (1, torch.ones(2, 6).half(), DtypeError, "dt_bi"),
}


@pytest.mark.parametrize("mistake", STEP_MISTAKES)
def test_step_rejects_bad_arguments_by_name(mistake):
    """A bad argument of a step raises our error, which names it."""
    place, value, error, words = STEP_MISTAKES[mistake]
    arguments = [x[:, 0] if k in (0, 1, 3, 4) else x for k, x in enumerate(make(5))]
    arguments[place] = value
    with pytest.raises(error, match=words):
        selective_scan_step(*arguments)


def test_guards_report_nan():
    """With the guard on, NaN in an argument is reported by name."""
    arguments = replaced(3, torch.full((2, 5, 4), torch.nan).double())
    with switches.override(deny_nan=True), pytest.raises(NonFiniteError, match="b contains NaN"):
        fast(*arguments)
