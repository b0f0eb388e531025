"""Mistakes are refused with a class of their own and a message that tells what to do."""

import re
from typing import Any

import pytest
import torch

from anymamba.errors import (
    AnyMambaError,
    BackendError,
    CacheError,
    ConfigError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    PackingError,
    ShapeError,
)
from anymamba.nn import (
    Mamba,
    Mamba2,
    Mamba2Cache,
    Mamba3,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    RotationState,
)
from anymamba.ops import SsdPath
from anymamba.settings import override
from block_cases import CASES, WIDTH, build, tokens, used_cache

VERBS = [
    (case, verb)
    for case in CASES
    for verb in ("forward", "prefill", "step", "step_infinite")
    if hasattr(build(case), verb)
]

# Constructor arguments, and the words that the message must contain.
BAD_OPTIONS = [
    (Mamba, {"d_states": 4}, "unknown argument 'd_states'. Did you mean 'd_state'?"),
    (Mamba2, {"head_dim": 4}, "unknown argument 'head_dim'. Did you mean 'headdim'?"),
    (Mamba3, {"is_mino": True}, "unknown argument 'is_mino'. Did you mean 'is_mimo'?"),
    (Mamba3, {"zzz": 1}, "unknown argument 'zzz'. Known: A_floor, a_activation, bias"),
    (Mamba, {"d_state": 0}, "d_model, d_state and d_conv must be positive; got 8, 0, 4"),
    (Mamba, {"d_conv": 0}, "must be positive"),
    (Mamba, {"dt_init": "zeros"}, "dt_init must be 'random' or 'constant'; got 'zeros'"),
    (Mamba, {"dt_rank": 0}, "dt_rank and expand * d_model must be at least 1; got 0 and 16"),
    (Mamba, {"bcdt_rms_eps": 0.0}, "bcdt_rms_eps must be positive, or None"),
    (Mamba, {"expand": 0.05}, "at least 1; got 1 and 0"),
    (Mamba, {"dt_min": 0.0}, "0 < dt_min <= dt_max; got 0.0, 0.1"),
    (Mamba2, {"headdim": 4, "dt_min": 0.2}, "0 < dt_min <= dt_max; got 0.2, 0.1"),
    (Mamba3, {"headdim": 4, "dt_max": 1e-4}, "0 < dt_min <= dt_max"),
    (Mamba2, {"headdim": 0}, "headdim and ngroups must be positive"),
    (Mamba2, {"headdim": 5}, "headdim must divide 16"),
    (Mamba2, {"headdim": 4, "ngroups": 3}, "ngroups must divide the number of heads 4; got 3"),
    (Mamba2, {"headdim": 4, "d_ssm": 0}, "d_ssm must lie in 1..d_inner=16; got 0"),
    (Mamba2, {"headdim": 4, "d_ssm": 20}, "d_ssm must lie in 1..d_inner=16; got 20"),
    (Mamba2, {"headdim": 4, "A_init_range": (0, 1)}, "A_init_range must be 0 < low <= high"),
    (Mamba2, {"headdim": 4, "A_init_range": (2, 1)}, "A_init_range must be 0 < low <= high"),
    (Mamba2, {"headdim": 4, "dt_limit": (0.2, 0.1)}, "dt_limit must be (low, high)"),
    (Mamba2, {"headdim": 4, "chunk_size": 0}, "chunk_size must be positive; got 0"),
    (Mamba3, {"headdim": 4, "d_state": 7}, "d_state must be even; got 7"),
    (Mamba3, {"headdim": 5}, "headdim must divide d_inner = expand * d_model = 16; got 5"),
    (Mamba3, {"headdim": 4, "ngroups": 3}, "ngroups must divide the number of heads 4; got 3"),
    (Mamba3, {"headdim": 4, "is_mimo": True, "mimo_rank": 0}, "mimo_rank must be positive"),
    (Mamba3, {"headdim": 4, "A_floor": 0.0}, "A_floor must be positive; got 0.0"),
    (Mamba3, {"headdim": 4, "a_activation": "relu"}, "a_activation must be one of"),
    (Mamba3, {"headdim": 4, "pathway": "triple"}, "pathway must be one of"),
    (Mamba3, {"headdim": 4, "rotation": "octonion"}, "rotation must be one of"),
    (Mamba3, {"headdim": 4, "rotation_range": 0.0}, "rotation_range must be positive; got 0.0"),
    (Mamba3, {"headdim": 4, "rope_fraction": 0.3}, "rope_fraction must be one of"),
    (Mamba3, {"headdim": 4, "dt_limit": (-1.0, 1.0)}, "dt_limit must be (low, high)"),
    (Mamba3, {"headdim": 4, "chunk_size": -1}, "chunk_size must be positive; got -1"),
    (Mamba3, {"headdim": 4, "rotation": "quaternion", "d_state": 6}, "must be a multiple of 4"),
    (
        Mamba3,
        {"headdim": 4, "rotation": "quaternion", "d_state": 12, "rope_fraction": 0.5},
        "rotated part 6",
    ),
]


@pytest.mark.parametrize(("block", "options", "words"), BAD_OPTIONS)
def test_rejects_bad_options(block, options, words):
    """Each wrong option of each constructor: ConfigError, which names it and its value."""
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        block(WIDTH, **options)
    assert isinstance(caught.value, ValueError)


def test_rejects_a_process_group():
    """Tensor parallelism is not an option of the block; the message says so."""
    with pytest.raises(BackendError, match="process_group must be None"):
        Mamba2(WIDTH, headdim=4, process_group=object())


def test_rejects_integer_parameters():
    """A dtype that cannot hold activations is refused when the block is built."""
    with pytest.raises(DtypeError, match="must be float64, float32, bfloat16 or float16"):
        Mamba(WIDTH, dtype=torch.int64)


@pytest.mark.parametrize(("case", "verb"), VERBS)
def test_rejects_bad_inputs(case, verb):
    """Rank, width, empty axes, dtype and device of the input, in every verb."""
    block = build(case)
    shape = (2, 3, WIDTH) if verb in ("forward", "prefill") else (2, WIDTH)
    rest: list[Any] = [block.empty_cache(2)] if verb == "step" else []
    bad = [
        (ShapeError, torch.zeros(*shape, 1), "must have the axes"),
        (ShapeError, torch.zeros(shape[1:]), "must have the axes"),
        (ShapeError, torch.zeros(*shape[:-1], 9), "d_model=8; got shape"),
        (ShapeError, torch.zeros(0, *shape[1:]), "empty axis"),
        (DtypeError, torch.zeros(shape, dtype=torch.int64), "floating-point tensor; got torch.int"),
        (DtypeError, [[0.0]], "floating-point tensor; got list"),
        (DtypeError, torch.zeros(shape, dtype=torch.float64), "torch.float64 but the module torch"),
        (DeviceError, torch.zeros(shape, device="meta"), "is on meta but the module on cpu"),
    ]
    for error, given, words in bad:
        with pytest.raises(error, match=words):
            getattr(block, verb)(given, *rest)


def test_rejects_half_inputs_without_autocast():
    """A bfloat16 input to a float32 module is a mistake of dtypes, told before torch stumbles."""
    with pytest.raises(DtypeError, match=r"torch.bfloat16 but the module torch.float32"):
        build("mamba2")(tokens(1, 3, dtype=torch.bfloat16))
    with pytest.raises(DtypeError, match=r"torch.float32 but the module torch.float16"):
        build("mamba2", dtype=torch.float16)(tokens(1, 3))


@pytest.mark.parametrize("case", CASES)
def test_rejects_foreign_caches(case):
    """A state of another family, batch, device or dtype is refused by name, in both verbs."""
    block, u_bsd = build(case), tokens(2, 3).detach()
    mine = used_cache(block, 2)
    other = "mamba1" if case.startswith("mamba2") else "mamba2"
    name = next(iter(mine.to_tensors()))
    bad = [
        (
            build(other).empty_cache(2),
            f"must be a .*; got {type(build(other).empty_cache(1)).__name__}",
        ),
        (tuple(mine), "got tuple"),
        ((torch.zeros(1), torch.zeros(1)), "got tuple"),
        (block.empty_cache(3), rf"{name} of the cache must have shape \(2, .*; got \(3, "),
        (mine.to("meta"), rf"{name} of the cache is on meta, the input on cpu. Move it"),
        (
            mine.to(dtype=torch.float64),
            rf"{name} of the cache must be torch.float32; got torch.float64",
        ),
        (
            mine.map(lambda x: x.long()),
            rf"{name} of the cache must be torch.float32; got torch.int64",
        ),
    ]
    for cache, words in bad:
        with pytest.raises(CacheError, match=words):
            block.prefill(u_bsd, cache)
        with pytest.raises(CacheError, match=words):
            block.step(u_bsd[:, 0], cache)


def test_rejects_a_cache_of_another_rotation():
    """Angles are not quaternions: the message lists both sets of fields."""
    complex_block, quaternion_block = build("mamba3"), build("mamba3_quaternion")
    with pytest.raises(
        CacheError, match=r"rotation.angle_bha.*got.*quaternion_bhj4.*another rotation"
    ):
        complex_block.step(tokens(2), quaternion_block.empty_cache(2))
    with pytest.raises(CacheError, match=r"quaternion_bhj4.*got.*angle_bha.*another rotation"):
        quaternion_block.prefill(tokens(2, 3), complex_block.empty_cache(2))
    broken = complex_block.empty_cache(2)._replace(rotation=RotationState())
    with pytest.raises(CacheError, match="another rotation"):
        complex_block.step(tokens(2), broken)


def test_a_cache_of_the_other_pathway_is_welcome():
    """Single and double pathways share their state at a call boundary; the cache chooses."""
    block, u_bsd = build("mamba3"), tokens(2, 5).detach()
    cache = used_cache(block, 2)
    y_bsd, single = block.prefill(u_bsd, cache)
    again_bsd, double = block.prefill(u_bsd, cache.to_double())
    assert type(single) is Mamba3SingleSsdCache
    assert type(double) is Mamba3DoubleSsdCache
    assert torch.allclose(y_bsd, again_bsd, atol=1e-5)
    assert torch.allclose(single.ssm_bhpr, double.to_single().ssm_bhpr, atol=1e-5)


def test_rejects_what_is_not_a_cache():
    """The message says where to get one."""
    with pytest.raises(CacheError, match=r"must be a Mamba2Cache; got int. Use block.empty_cache"):
        build("mamba2").step(tokens(2), 3)


def test_rejects_a_cache_of_other_sizes():
    """A block of the same family and another width: the field that differs is named."""
    other = Mamba2(WIDTH, d_state=8, headdim=4, ngroups=2)
    with pytest.raises(CacheError, match=r"conv_bvk of the cache must have shape \(2, 32, 4\)"):
        build("mamba2").step(tokens(2), other.empty_cache(2))


@pytest.mark.parametrize("case", CASES)
def test_rejects_empty_batches(case):
    """A state has at least one row."""
    with pytest.raises(ConfigError, match="batch_size must be positive; got 0"):
        build(case).empty_cache(0)


def test_rejects_a_path_on_mamba1():
    """The selective scan has no SSD algorithm to choose."""
    for path in (SsdPath(), SsdPath.minimal(4)):
        with pytest.raises(BackendError, match="no SSD path"):
            build("mamba1")(tokens(1, 3), path=path)


@pytest.mark.parametrize("case", CASES)
def test_rejects_bad_implementations(case):
    """Unknown names, kernels that are not there, and contradictions are refused, never replaced."""
    block, u_bsd = build(case), tokens(1, 3)
    with pytest.raises(ConfigError, match="impl must be one of"):
        block(u_bsd, impl="fast")
    with override(native="off"), pytest.raises(BackendError, match="native"):
        block(u_bsd, impl="native")
    if not case.startswith("mamba1"):
        with pytest.raises(AnyMambaError, match="reference"):
            block(u_bsd, impl="reference", path=SsdPath.serial())


@pytest.mark.parametrize("case", CASES)
def test_rejects_bad_packing(case):
    """Borders and labels that do not describe the input, or both at once."""
    block, u_1sd = build(case), tokens(1, 6)
    borders, labels = torch.tensor([0, 2, 6]), torch.zeros(1, 6, dtype=torch.int64)
    bad: list[tuple[type[Exception], dict[str, Any], str]] = [
        (PackingError, {"cu_seqlens": borders, "seq_idx": labels}, "not both"),
        (PackingError, {"seq_idx": labels[:, :5]}, r"seq_idx must have shape \(1, 6\)"),
        (PackingError, {"seq_idx": labels[0]}, r"seq_idx must have shape \(1, 6\)"),
        (DtypeError, {"seq_idx": labels.float()}, "seq_idx must be an int32 or int64 tensor"),
        (DtypeError, {"seq_idx": [[0] * 6]}, "seq_idx must be an int32 or int64 tensor; got list"),
        (
            PackingError,
            {"cu_seqlens": torch.tensor([0, 2, 5])},
            "must end at the sequence length 6",
        ),
        (PackingError, {"cu_seqlens": torch.tensor([1, 6])}, "must start at 0; got 1"),
        (PackingError, {"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "must not decrease"),
        (PackingError, {"cu_seqlens": torch.tensor([0])}, "at least 2 borders"),
        (PackingError, {"cu_seqlens": torch.tensor(6)}, "at least 2 borders"),
        (DtypeError, {"cu_seqlens": borders.float()}, "int32 or int64"),
        (DtypeError, {"cu_seqlens": [0, 6]}, "int32 or int64 tensor; got list"),
    ]
    for error, options, words in bad:
        with pytest.raises(error, match=words):
            block.prefill(u_1sd, **options)
    with pytest.raises(PackingError, match="batch must be 1; got 2"):
        block(tokens(2, 6), cu_seqlens=borders)
    with pytest.raises(CacheError, match=r"must have shape \(2, .*packed sequences"):
        block.prefill(u_1sd, block.empty_cache(1), cu_seqlens=borders)
    with pytest.raises(CacheError, match=r"must have shape \(1, "):
        block.prefill(u_1sd, block.empty_cache(2), seq_idx=labels)


def test_cache_methods_refuse_what_does_not_fit():
    """Missing and foreign names in from_tensors, and shapes in assign_."""
    cache = build("mamba2").empty_cache(2)
    tensors = cache.to_tensors()
    with pytest.raises(CacheError, match="'ssm_bhpr' is missing"):
        Mamba2Cache.from_tensors({"conv_bvk": tensors["conv_bvk"]})
    with pytest.raises(CacheError, match="unexpected tensor 'more'"):
        Mamba2Cache.from_tensors({**tensors, "more": torch.zeros(1)})
    with pytest.raises(CacheError, match=r"conv_bvk has shape \(2, .*new value \(1, "):
        cache.assign_(build("mamba2").empty_cache(1))
    with pytest.raises(CacheError, match="expected angles"):
        build("mamba3_quaternion").empty_cache(1).rotation.angle()
    with pytest.raises(CacheError, match="expected quaternions"):
        build("mamba3").empty_cache(1).rotation.quaternion()


@pytest.mark.parametrize("case", CASES)
def test_guards_name_what_is_not_finite(case):
    """With the guards on, NaN in the input or in the state is caught at the door."""
    block, u_bsd = build(case), tokens(1, 3).detach()
    cache = block.empty_cache(1).map(lambda x: x + torch.nan)
    with override(deny_nan=True):
        with pytest.raises(NonFiniteError, match="NaN"):
            block(u_bsd + torch.nan)
        with pytest.raises(NonFiniteError, match="NaN"):
            block.step(u_bsd[:, 0], cache)
        with pytest.raises(NonFiniteError, match="NaN"):
            cache.sanity()
    with override(deny_inf=True), pytest.raises(NonFiniteError, match="infinity"):
        block(u_bsd + torch.inf)
