"""Laws of the error tree and of the switches."""

import inspect
import os
import subprocess
import sys

import pytest

from anymamba import errors, settings
from anymamba.errors import AnyMambaError, ConfigError

BUILTIN = {
    "ShapeError": ValueError,
    "PackingError": ValueError,
    "DtypeError": TypeError,
    "DeviceError": ValueError,
    "NonFiniteError": ValueError,
    "ConfigError": ValueError,
    "CacheError": ValueError,
    "BackendError": RuntimeError,
    "CheckpointError": RuntimeError,
}


def print_switches_with(**variables: str) -> subprocess.CompletedProcess[str]:
    """Import the switches in a fresh interpreter whose environment has `variables`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ANYMAMBA_")}
    # The interpreter under test must find the same package as this one, however that was arranged.
    clean["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    program = "from anymamba.settings import current; s = current(); print(s.deny_nan, s.deny_inf)"
    return subprocess.run(
        [sys.executable, "-c", program], env=clean | variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_error_is_the_builtin_that_python_code_expects(name):
    """Catching the root or the builtin both catch the error."""
    error = getattr(errors, name)
    assert error.__bases__ == (AnyMambaError, BUILTIN[name])
    with pytest.raises(BUILTIN[name], match=r"^ssd: x must hold; got y\. Do z\.$"):
        raise error("ssd: x must hold; got y. Do z.")


def test_error_tree_has_no_other_members():
    """Every exception class of the module is in the tree, in `__all__` and in the docstring."""
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == {*BUILTIN, "AnyMambaError"} == set(errors.__all__)
    assert all(name in (errors.__doc__ or "") for name in classes)


def test_override_holds_inside_the_block_only():
    """`override` changes the named switches, keeps the others, and restores all of them."""
    before = settings.current()
    with settings.override(deny_nan=not before.deny_nan) as inside:
        assert inside == settings.current()
        assert inside.deny_nan is not before.deny_nan
        assert inside.deny_inf is before.deny_inf
    assert settings.current() == before


def test_override_nests():
    """An inner block adds to the outer one and gives it back."""
    with settings.override(deny_nan=True):
        with settings.override(deny_inf=True) as inner:
            assert (inner.deny_nan, inner.deny_inf) == (True, True)
        assert settings.current() == settings.Settings(deny_nan=True)


def test_override_restores_after_an_error():
    """An exception inside the block does not leave a switch on."""
    before = settings.current()
    with pytest.raises(ZeroDivisionError), settings.override(deny_nan=True):
        raise ZeroDivisionError
    assert settings.current() == before


def test_override_rejects_unknown_switch():
    """A misspelt switch is named, together with the ones that exist, and nothing changes."""
    before = settings.current()
    with (
        pytest.raises(ConfigError, match=r"'deny_nans'.*deny_inf.*deny_nan"),
        settings.override(deny_nans=True),
    ):
        pytest.fail("the block must not run")
    assert settings.current() == before


def test_settings_cannot_be_changed_in_place():
    """One set of switches is a value."""
    with pytest.raises(AttributeError):
        settings.current().deny_nan = True


def test_environment_sets_the_switches():
    """1 is on, 0 is off, and an unset variable is off."""
    result = print_switches_with(ANYMAMBA_DENY_NAN="1", ANYMAMBA_DENY_INF="0")
    assert (result.returncode, result.stdout.strip()) == (0, "True False"), result.stderr
    result = print_switches_with(ANYMAMBA_DENY_INF="1")
    assert (result.returncode, result.stdout.strip()) == (0, "False True"), result.stderr


@pytest.mark.parametrize("text", ["true", "", "2", " 1"])
def test_environment_is_parsed_strictly(text):
    """Anything but 0 and 1 is refused, naming the variable and what was given."""
    result = print_switches_with(ANYMAMBA_DENY_NAN=text)
    assert result.returncode != 0
    assert f"ANYMAMBA_DENY_NAN must be 0 or 1; got {text!r}" in result.stderr
