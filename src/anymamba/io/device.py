"""Devices by name: whether there is one, said before anything is read or built for it."""

import torch

from anymamba.errors import ConfigError

__all__ = ["named_device", "usable_device"]


def named_device(where: str, name: torch.device | str) -> torch.device:
    """Return the device of a name; whether the machine has one is not asked.

    Args:
        where: the function that asks; opens every message.
        name: such as "cpu" or "cuda:1".

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _unusable(where, name, error) from error


def usable_device(where: str, name: torch.device | str | None) -> torch.device:
    """Return the device of a name, after a tensor was put on it; None is torch's default device.

    Args:
        where: the function that asks; opens every message.
        name: such as "cpu" or "cuda:1".

    Raises:
        ConfigError: torch knows no such device, or cannot use one here.

    Example:
        >>> usable_device("demo", "cpu")
        device(type='cpu')
    """
    device = torch.get_default_device() if name is None else named_device(where, name)
    try:
        torch.empty(0, device=device)
    # Each backend has its own: a torch without CUDA asserts, others are not implemented.
    except (AssertionError, AttributeError, ImportError, RuntimeError) as error:
        raise _unusable(where, device, error) from error
    return device


def _unusable(where: str, name: torch.device | str, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ConfigError(
        f"{where}: device must be one that this torch can use; got {str(name)!r}: "
        f"{reason[:200]}. Use cpu, or install a torch for that device."
    )
