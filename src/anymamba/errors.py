"""Every error that anymamba raises on purpose.

    AnyMambaError
    |-- ShapeError      (ValueError)    a rank or a size is wrong, or two sizes disagree
    |-- PackingError    (ValueError)    cu_seqlens or seq_idx do not describe the sequence
    |-- DtypeError      (TypeError)     not a tensor, not floating point, or a forbidden mixture
    |-- DeviceError     (ValueError)    arguments live on different devices
    |-- NonFiniteError  (ValueError)    a guard met NaN or infinity
    |-- ConfigError     (ValueError)    an option is unknown, out of range or contradicts another
    |-- CacheError      (ValueError)    a state of the wrong family, batch, device, dtype or pathway
    |-- BackendError    (RuntimeError)  the implementation that was asked for cannot run this
    `-- CheckpointError (RuntimeError)  a file is damaged, foreign, or does not match the model

Messages have one form: *where: what must hold; what was given. What to do.* Each class also
inherits the builtin that Python code expects, so `except ValueError` keeps working.
"""

__all__ = [
    "AnyMambaError",
    "BackendError",
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "DtypeError",
    "NonFiniteError",
    "PackingError",
    "ShapeError",
]


class AnyMambaError(Exception):
    """Root of the tree: catch this to catch everything anymamba raises on purpose."""


class ShapeError(AnyMambaError, ValueError):
    """A rank or a size is wrong, or two sizes disagree."""


class PackingError(AnyMambaError, ValueError):
    """`cu_seqlens` or `seq_idx` do not describe the sequence they came with."""


class DtypeError(AnyMambaError, TypeError):
    """An argument is not a tensor, not floating point, or mixes dtypes in a forbidden way."""


class DeviceError(AnyMambaError, ValueError):
    """Arguments of one call live on different devices."""


class NonFiniteError(AnyMambaError, ValueError):
    """A guard that was switched on met NaN or infinity."""


class ConfigError(AnyMambaError, ValueError):
    """An option is unknown, out of range, or contradicts another option."""


class CacheError(AnyMambaError, ValueError):
    """A state belongs to another family, batch, device, dtype or pathway."""


class BackendError(AnyMambaError, RuntimeError):
    """The implementation that was asked for cannot run this call."""


class CheckpointError(AnyMambaError, RuntimeError):
    """A file is damaged, foreign, or does not match the model."""
