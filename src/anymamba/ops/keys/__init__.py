"""Keys and queries of Mamba-3: norm, bias per head and cumulative rotation as one operator."""

from anymamba.ops.keys.api import Keys, keys_by_angle, keys_by_quaternion

__all__ = ["Keys", "keys_by_angle", "keys_by_quaternion"]
