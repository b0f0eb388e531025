"""Numbers and names as people read them in a table."""

import torch

__all__ = ["NOTHING", "count", "digits", "dtype_name", "megabytes", "milliseconds", "percent"]

NOTHING = "-"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds.

    Example:
        >>> milliseconds(0.0123456), milliseconds(12.0)
        ('12.3 ms', '12000 ms')
    """
    return f"{digits(1e3 * seconds)} ms"


def count(number: float) -> str:
    """Return a number of tokens per second.

    Example:
        >>> count(12.3), count(4567.0), count(1234567.0)
        ('12.3', '4.57 k', '1.23 M')
    """
    return _in_unit(number, {1e6: (1e6, " M"), 1e3: (1e3, " k"), 0.0: (1.0, "")})


def percent(share: float) -> str:
    """Return a share in percent.

    Example:
        >>> percent(0.654), percent(0.0123), percent(0.0001)
        ('65%', '1.2%', '<0.1%')
    """
    if share < 1e-3:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def digits(number: float) -> str:
    """Return a number with three digits, or all of them in front of the point.

    Example:
        >>> digits(0.12345), digits(12.345), digits(12345.6)
        ('0.123', '12.3', '12346')
    """
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def megabytes(number: float) -> str:
    """Return a number of bytes.

    Example:
        >>> megabytes(12345678), megabytes(1234), megabytes(12345678901)
        ('12.3 MB', '1.23 kB', '12.3 GB')
    """
    return _in_unit(number, {1e9: (1e9, " GB"), 1e5: (1e6, " MB"), 0.0: (1e3, " kB")})


def _in_unit(number: float, units: dict[float, tuple[float, str]]) -> str:
    """Return a number in the first unit that is meant for it; its size and name, by the least."""
    size, name = next(unit for least, unit in units.items() if number >= least)
    return f"{digits(number / size)}{name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype without its library.

    Example:
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")
