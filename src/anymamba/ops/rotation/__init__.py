"""Rotations of the state: complex (pairs and angles) and quaternion (blocks of four)."""

from anymamba.ops.rotation.angles import (
    PAIRINGS,
    AngleScan,
    angle_increment,
    cumulate_angles,
    rotate_pairs,
    wrap_angle,
)
from anymamba.ops.rotation.api import cumulate_quaternions
from anymamba.ops.rotation.quaternion import (
    QuaternionScan,
    bound_rotation_vector,
    quaternion_conjugate,
    quaternion_from_vector,
    quaternion_increment,
    quaternion_multiply,
    quaternion_normalize,
    quaternion_to_matrix,
    rotate_blocks,
    safe_norm,
)
from anymamba.ops.rotation.reference import (
    cumulate_angles_reference,
    cumulate_quaternions_reference,
)

__all__ = [
    "PAIRINGS",
    "AngleScan",
    "QuaternionScan",
    "angle_increment",
    "bound_rotation_vector",
    "cumulate_angles",
    "cumulate_angles_reference",
    "cumulate_quaternions",
    "cumulate_quaternions_reference",
    "quaternion_conjugate",
    "quaternion_from_vector",
    "quaternion_increment",
    "quaternion_multiply",
    "quaternion_normalize",
    "quaternion_to_matrix",
    "rotate_blocks",
    "rotate_pairs",
    "safe_norm",
    "wrap_angle",
]
