"""Laws of the layout letters: one size per letter, and messages a stranger can act on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.errors import DtypeError, ShapeError
from anymamba.notation import LEGEND, bind_dims, layout_of, spell

LAYOUTS = st.lists(st.sampled_from(sorted(LEGEND)), min_size=1, max_size=5, unique=True)
SIZES = st.lists(st.integers(1, 7), min_size=5, max_size=5)


def meta(*shape: int) -> torch.Tensor:
    """Return a tensor that has a shape and nothing else."""
    return torch.empty(shape, device="meta")


def test_legend_letters_are_single_lower_case():
    """Capitals are derived sizes and digits are sizes, so neither is in the legend."""
    assert all(len(letter) == 1 and letter in "abcdefghijklmnopqrstuvwxyz" for letter in LEGEND)
    assert len(set(LEGEND.values())) == len(LEGEND)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("x_bshp", "bshp"), ("grad_x_bshp", "bshp"), ("x_bShp", "bShp"), ("quaternion_bhj4", "bhj4")],
)
def test_layout_is_the_part_after_the_last_underscore(name, layout):
    """Prefixes such as `grad_` do not matter."""
    assert layout_of(name) == layout


def test_spell_writes_a_layout_in_words():
    """Small letters and capitals share their word; digits stay digits."""
    assert spell("bs") == "batch, sequence length"
    assert spell("S4") == "sequence length, 4"


@settings(deadline=None, max_examples=50)
@given(letters=LAYOUTS, sizes=SIZES, order=st.randoms(use_true_random=False))
def test_dims_are_the_sizes_of_the_letters(letters, sizes, order):
    """Whatever the order of axes, each letter is bound to its own size."""
    dims = dict(zip(letters, sizes, strict=False))
    shuffled = list(letters)
    order.shuffle(shuffled)
    tensors = {
        f"{name}_{''.join(layout)}": meta(*(dims[letter] for letter in layout))
        for name, layout in (("x", letters), ("y", shuffled))
    }
    assert bind_dims("demo", **tensors) == dims


@settings(deadline=None, max_examples=50)
@given(letters=LAYOUTS, sizes=SIZES, place=st.integers(0, 4))
def test_rejects_disagreeing_sizes(letters, sizes, place):
    """One changed size is refused, naming the axis, both sizes, both arguments and both shapes."""
    letter = letters[place % len(letters)]
    dims = dict(zip(letters, sizes, strict=False))
    other = dims | {letter: dims[letter] + 1}
    layout = "".join(letters)
    with pytest.raises(ShapeError) as caught:
        bind_dims(
            "demo", **{f"x_{layout}": meta(*dims.values()), f"y_{layout}": meta(*other.values())}
        )
    assert str(caught.value) == (
        f"demo: {LEGEND[letter]} is {dims[letter]} in x_{layout} {tuple(dims.values())} but "
        f"{other[letter]} in y_{layout} {tuple(other.values())}. "
        f"Axis '{letter}' must have one size in all arguments."
    )


def test_rejects_disagreement_inside_one_tensor():
    """A letter that occurs twice in a layout means a square."""
    assert bind_dims("demo", x_ll=meta(3, 3)) == {"l": 3}
    with pytest.raises(ShapeError, match=r"chunk length is 3 in x_ll \(3, 4\) but 4 in x_ll"):
        bind_dims("demo", x_ll=meta(3, 4))


def test_capitals_are_sizes_of_their_own():
    """`S` is a padded sequence: it binds separately from `s`, under the same word."""
    assert bind_dims("demo", x_bs=meta(2, 5), y_bS=meta(2, 8)) == {"b": 2, "s": 5, "S": 8}
    with pytest.raises(ShapeError, match=r"sequence length is 8 in y_S \(8,\) but 9 in z_S \(9,\)"):
        bind_dims("demo", y_S=meta(8), z_S=meta(9))


def test_none_is_passed_over():
    """Optional tensors take part when they are given."""
    assert bind_dims("demo", x_bs=meta(2, 5), skip_h=None) == {"b": 2, "s": 5}


def test_digits_are_sizes_and_bind_nothing():
    """A digit demands its size and adds no letter."""
    assert bind_dims("demo", q_j4=meta(3, 4), x_1s=meta(1, 5)) == {"j": 3, "s": 5}
    with pytest.raises(ShapeError, match=r"demo: axis '4' of q_j4 must have size 4.*\(3, 5\)"):
        bind_dims("demo", q_j4=meta(3, 5))


def test_rejects_wrong_rank():
    """The message gives the argument, the axes in words and the shape that came."""
    with pytest.raises(ShapeError) as caught:
        bind_dims("ssd", x_bshp=meta(2, 5, 3))
    assert str(caught.value) == (
        "ssd: x_bshp must have 4 axes (batch, sequence length, heads, head width (headdim)); "
        "got shape (2, 5, 3)."
    )


def test_rejects_empty_axis():
    """An empty axis is named in words, with the shape that came."""
    with pytest.raises(
        ShapeError, match=r"ssd: the sequence length axis of x_bs is empty.*\(2, 0\)"
    ):
        bind_dims("ssd", x_bs=meta(2, 0))


@pytest.mark.parametrize("value", [1.0, [1.0], "x"])
def test_rejects_what_is_not_a_tensor(value):
    """The message gives the argument and the type that came."""
    with pytest.raises(DtypeError, match=f"ssd: a_h must be a tensor; got {type(value).__name__}"):
        bind_dims("ssd", a_h=value)


def test_traces_without_graph_break():
    """The check costs a compiled function nothing and follows changing lengths."""

    def scale(x_bsh: torch.Tensor, a_h: torch.Tensor) -> torch.Tensor:
        dims = bind_dims("scale", x_bsh=x_bsh, a_h=a_h)
        return x_bsh * a_h / dims["s"]

    compiled = torch.compile(scale, fullgraph=True, backend="eager")
    for length in (1, 63, 64, 65):
        x_bsh, a_h = torch.ones(2, length, 3), torch.arange(3.0)
        assert torch.equal(scale(x_bsh, a_h), compiled(x_bsh, a_h))
