"""Schedules: which weights a virtual layer uses, and which lists are refused."""

import pytest

from anymamba.errors import ConfigError
from anymamba.nn import VirtualLayers, make_bidirectional_schedule, make_schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cyclic", "01201201"),
        ("stretched", "00011122"),
        ([2, 1, 0, 0, 1, 2, 2, 2], "21001222"),
    ],
)
def test_eight_virtual_layers_over_three(schedule, expected):
    """The table of the module, entry by entry."""
    assert "".join(map(str, make_schedule(schedule, 8, 3))) == expected
    assert VirtualLayers(8, schedule).indices(3) == make_schedule(schedule, 8, 3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("strided_cyclic", "0123012301"),
        ("strided_stretched", "0101012323"),
        ("symmetric_cyclic", "0011223300"),
        ("symmetric_stretched", "0000112233"),
        ([0, 3, 1, 2, 0, 3, 1, 2, 0, 3], "0312031203"),
    ],
)
def test_ten_bidirectional_layers_over_four(schedule, expected):
    """The table of the module, entry by entry."""
    assert "".join(map(str, make_bidirectional_schedule(schedule, 10, 4))) == expected


def test_as_many_virtual_layers_as_real_ones_are_the_real_ones():
    """Both rules are then the identity."""
    for schedule in ("cyclic", "stretched"):
        assert make_schedule(schedule, 5, 5) == (0, 1, 2, 3, 4)
    for schedule in ("strided_cyclic", "strided_stretched"):
        assert make_bidirectional_schedule(schedule, 6, 6) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("make", [make_schedule, make_bidirectional_schedule])
@pytest.mark.parametrize(
    ("schedule", "virtual", "real", "message"),
    [
        ("spiral", 4, 2, "must be one of"),
        ([0, 1], 4, 2, "one entry for each of 4 virtual layers; got 2"),
        ([0, 1, 0, 1, 0, 1], 4, 2, "got 6"),
        ([0, 1, 2, 0], 4, 2, r"must lie in 0..1; got 2"),
        ([0, 0, 0, 0], 4, 2, r"every layer must be used.*leave out \[1\]"),
        ([0], 0, 1, r"virtual must be a whole number in 1..65536; got 0"),
        ([0, 0], 2, 0, r"real must be a whole number in 1..65536; got 0"),
        ("cyclic", 2 * 10**9, 1, "virtual must be a whole number"),
    ],
)
def test_mistakes_are_refused(make, schedule, virtual, real, message):
    """A schedule has a known name, the right length, and leaves no layer idle."""
    with pytest.raises(ConfigError, match=message):
        make(schedule, virtual, real)


def test_fewer_virtual_layers_than_real_ones_are_refused():
    """Some weights would never run."""
    with pytest.raises(ConfigError, match=r"2 virtual layers leave out \[2\]"):
        make_schedule("cyclic", 2, 3)
    with pytest.raises(ConfigError, match="leave out"):
        make_bidirectional_schedule("strided_cyclic", 2, 4)


def test_bidirectional_layers_come_in_pairs():
    """An odd number of passes, or one layer for two directions that must differ, is refused."""
    with pytest.raises(ConfigError, match="must be even; got 5"):
        make_bidirectional_schedule("symmetric_cyclic", 5, 2)
    with pytest.raises(ConfigError, match="at least 2 real layers"):
        make_bidirectional_schedule("strided_cyclic", 4, 1)


@pytest.mark.parametrize("count", [0, 10**9, 65537, 2.0, "8"])
def test_a_number_of_layers_that_no_machine_holds_is_refused(count):
    """A count is checked before anything of that size is made."""
    with pytest.raises(ConfigError, match=r"count must be a whole number in 1..65536; got"):
        VirtualLayers(count)
