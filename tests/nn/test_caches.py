"""Laws of the caches: values that are trees, can be forked, moved, cut, saved and compiled."""

import concurrent.futures
import copy
import multiprocessing
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anymamba import settings
from anymamba.errors import CacheError, NonFiniteError
from anymamba.nn import (
    KVCache,
    Mamba1Cache,
    Mamba2Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    ModelCache,
    RotationState,
    join_rows,
)
from laws import randn

# The number of rows is no other axis's size, so that cutting the wrong axis shows.
BATCH = 6


def state(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return randn(BATCH, *shape, seed=seed, dtype=dtype)


def make(kind: str, dtype: torch.dtype = torch.float64):
    """Return a cache of random values."""
    angles = RotationState(angle_bha=state(3, 2, seed=4, dtype=dtype))
    quaternions = RotationState(quaternion_bhj4=state(3, 2, 4, seed=5, dtype=dtype))
    keys = (
        state(3, 5, 4, seed=1, dtype=dtype),
        state(2, 3, 4, seed=2, dtype=dtype),
        state(3, 5, seed=3, dtype=dtype),
    )
    return {
        "mamba1": lambda: Mamba1Cache(
            state(7, 4, seed=6, dtype=dtype), state(7, 3, seed=7, dtype=dtype)
        ),
        "mamba2": lambda: Mamba2Cache(
            state(9, 4, seed=8, dtype=dtype), state(3, 5, 4, seed=1, dtype=dtype)
        ),
        "single": lambda: Mamba3SingleSsdCache(*keys, angles),
        "double": lambda: Mamba3DoubleSsdCache(*keys, quaternions),
        "angles": lambda: angles,
        "quaternions": lambda: quaternions,
        "attention": lambda: KVCache(
            state(3, 8, 4, seed=9, dtype=dtype),
            state(3, 8, 4, seed=10, dtype=dtype),
            torch.arange(BATCH),
        ),
        "convolved": lambda: make("attention", dtype)._replace(
            conv_bvk=state(9, 4, seed=11, dtype=dtype)
        ),
        "model": lambda: ModelCache(
            (make("mamba2", dtype), make("convolved", dtype), make("single", dtype)),
            torch.arange(BATCH) + 100,
        ),
    }[kind]()


# Floating-point values per row, counted by hand.
PER_ROW = {
    "mamba1": 7 * 4 + 7 * 3,
    "mamba2": 9 * 4 + 3 * 5 * 4,
    "single": 3 * 5 * 4 + 2 * 3 * 4 + 3 * 5 + 3 * 2,
    "double": 3 * 5 * 4 + 2 * 3 * 4 + 3 * 5 + 3 * 2 * 4,
    "angles": 3 * 2,
    "quaternions": 3 * 2 * 4,
    "attention": 2 * 3 * 8 * 4,
    "convolved": 2 * 3 * 8 * 4 + 9 * 4,
    "model": (9 * 4 + 60) + (2 * 3 * 8 * 4 + 9 * 4) + (60 + 24 + 15 + 6),
}
# Counts of tokens per row: integers of 8 bytes.
COUNTS_PER_ROW = {"attention": 1, "convolved": 1, "model": 2}
KEYS = ["ssm_bhpr", "k_state_bmhr", "v_state_bhp"]
NAMES = {
    "mamba1": ["conv_bik", "ssm_bir"],
    "mamba2": ["conv_bvk", "ssm_bhpr"],
    "single": [*KEYS, "rotation.angle_bha"],
    "double": [*KEYS, "rotation.quaternion_bhj4"],
    "angles": ["angle_bha"],
    "quaternions": ["quaternion_bhj4"],
    "attention": ["k_bhst", "v_bhst", "length_b"],
    "convolved": ["k_bhst", "v_bhst", "length_b", "conv_bvk"],
}
NAMES["model"] = [
    *(f"layers.0.{name}" for name in NAMES["mamba2"]),
    *(f"layers.1.{name}" for name in NAMES["convolved"]),
    *(f"layers.2.{name}" for name in NAMES["single"]),
    "position_b",
]
BLOCK_KINDS = ["mamba1", "mamba2", "single", "double", "attention", "convolved"]
MODEL_TYPES = (Mamba2Cache, KVCache, Mamba3SingleSsdCache)
each_kind = pytest.mark.parametrize("kind", list(PER_ROW))


def assert_equal(expected, actual):
    """Assert that two caches have one type, one set of names, and equal values and dtypes."""
    assert type(expected) is type(actual)
    want, got = expected.to_tensors(), actual.to_tensors()
    assert list(want) == list(got)
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype, name
        assert torch.equal(tensor, got[name]), name


def floats(cache) -> list[Tensor]:
    """Return the tensors of a cache that carry values, not counts."""
    return [x for x in cache.to_tensors().values() if x.is_floating_point()]


def memory_of(cache) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in cache.to_tensors().values()}


@each_kind
def test_map_reaches_every_tensor_once(kind):
    """`map` keeps type and names and applies the function to each tensor, nested ones included."""
    cache = make(kind)
    seen = []
    doubled = cache.map(lambda x: seen.append(x) or x * 2)
    assert len(seen) == len(NAMES[kind])
    assert list(doubled.to_tensors()) == NAMES[kind]
    assert type(doubled) is type(cache)
    for name, tensor in cache.to_tensors().items():
        assert torch.equal(tensor * 2, doubled.to_tensors()[name])
    assert_equal(make(kind), cache)


@each_kind
def test_to_moves_and_casts_every_tensor(kind):
    """`to` takes a device, a dtype or both; with neither, nothing changes."""
    cache = make(kind)
    assert {x.dtype for x in floats(cache.to(dtype=torch.float32))} == {torch.float32}
    assert len(floats(cache.to(dtype=torch.float32))) == len(floats(cache))
    moved = cache.to("meta", torch.bfloat16)
    assert {x.device.type for x in moved.to_tensors().values()} == {"meta"}
    assert {x.dtype for x in floats(moved)} == {torch.bfloat16}
    assert {x.dtype for x in floats(cache.to("meta"))} == {torch.float64}
    assert_equal(cache, cache.to())


@each_kind
def test_clone_shares_no_memory(kind):
    """A fork can be changed without changing its origin, and carries gradients back to it."""
    cache = make(kind).requires_grad_()
    fork = cache.clone()
    assert memory_of(cache).isdisjoint(memory_of(fork))
    total = sum(x.sum() for x in floats(fork))
    grads = torch.autograd.grad(total, floats(cache))
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)
    fork.detach().map(Tensor.zero_)
    assert_equal(make(kind), cache.detach())


@each_kind
def test_detach_cuts_the_graph_and_shares_memory(kind):
    """Truncated back-propagation stops at `detach`; no value is copied."""
    cache = make(kind).requires_grad_()
    cut = cache.map(lambda x: x * 2).detach()
    assert not any(x.requires_grad for x in cut.to_tensors().values())
    assert memory_of(cache) == memory_of(cache.detach())


@each_kind
def test_requires_grad_acts_in_place_and_can_be_undone(kind):
    """`requires_grad_` turns the tensors themselves into leaves, and back."""
    cache = make(kind)
    assert_equal(cache, cache.requires_grad_())
    assert all(x.requires_grad and x.is_leaf for x in floats(cache))
    cache.requires_grad_(False)
    assert not any(x.requires_grad for x in cache.to_tensors().values())


@each_kind
@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (2, [2]),
        (0, [0]),
        (-1, [5]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        ([4, 0, 4], [4, 0, 4]),
        ((1,), [1]),
        ([], []),
        (torch.tensor([5, 3]), [5, 3]),
        (torch.tensor([5, 3], dtype=torch.int32), [5, 3]),
        (torch.tensor([True, False, False, True, True, False]), [0, 3, 4]),
    ],
    ids=str,
)
def test_rows_picks_rows_of_every_tensor(kind, index, expected):
    """`rows` cuts the batch axis, which always stays, whatever the index is."""
    cache = make(kind)
    picked = cache.rows(index)
    assert type(picked) is type(cache)
    for name, tensor in cache.to_tensors().items():
        want = torch.stack([tensor[row] for row in expected]) if expected else tensor[:0]
        assert torch.equal(want, picked.to_tensors()[name]), name


@each_kind
def test_rows_carries_gradients(kind):
    """A row that is picked twice receives the sum of two gradients, a row left out none."""
    cache = make(kind).requires_grad_()
    total = sum(x.sum() for x in floats(cache.rows([1, 4, 1])))
    for grad in torch.autograd.grad(total, floats(cache)):
        per_row = torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0, 0.0], dtype=grad.dtype)
        assert torch.equal(grad, per_row.view(-1, *[1] * (grad.dim() - 1)).expand_as(grad))


@each_kind
@pytest.mark.parametrize("index", [BATCH, -BATCH - 1, [0, BATCH]], ids=str)
def test_rows_refuses_a_row_that_is_not_there(kind, index):
    """An index outside the batch is an IndexError, as everywhere in Python."""
    with pytest.raises(IndexError):
        make(kind).rows(index)


@each_kind
def test_sizes_equal_hand_counts(kind):
    """`numel` and `nbytes` count every tensor, each in its own dtype, also without memory."""
    cache, counts = make(kind), COUNTS_PER_ROW.get(kind, 0)
    assert cache.numel() == BATCH * (PER_ROW[kind] + counts)
    assert cache.nbytes == BATCH * (PER_ROW[kind] * 8 + counts * 8)
    assert cache.to("meta", torch.bfloat16).nbytes == BATCH * (PER_ROW[kind] * 2 + counts * 8)


def test_nbytes_of_mixed_dtypes():
    """A half window beside a float32 state counts 2 and 4 bytes."""
    cache = make("mamba1")
    mixed = cache._replace(
        conv_bik=cache.conv_bik.to(torch.bfloat16), ssm_bir=cache.ssm_bir.to(torch.float32)
    )
    assert mixed.nbytes == BATCH * (7 * 4 * 2 + 7 * 3 * 4)


@each_kind
def test_sanity_obeys_the_guards(kind):
    """NaN and infinity are met in any tensor, each by its own guard, and only if it is on."""
    good = make(kind)
    for name in [n for n, x in good.to_tensors().items() if x.is_floating_point()]:
        for value, switch, word in (
            (float("nan"), "deny_nan", "NaN"),
            (float("inf"), "deny_inf", "infinity"),
            (-float("inf"), "deny_inf", "infinity"),
        ):
            bad = make(kind)
            bad.to_tensors()[name].view(-1)[-1] = value
            with settings.override(deny_nan=False, deny_inf=False):
                bad.sanity()
            other = {"deny_nan": "deny_inf", "deny_inf": "deny_nan"}[switch]
            with settings.override(**{switch: False, other: True}):
                bad.sanity()
            with settings.override(**{switch: True, other: False}):
                good.sanity()
                field = name.replace(".", "_")
                with pytest.raises(
                    NonFiniteError, match=f"{type(good).__name__}: {field} .*{word}"
                ):
                    bad.sanity()


@each_kind
def test_tensors_and_back(kind):
    """`from_tensors` undoes `to_tensors`; the names are dotted, in order, and share the memory."""
    cache = make(kind)
    tensors = cache.to_tensors()
    assert list(tensors) == NAMES[kind]
    types = (MODEL_TYPES,) if kind == "model" else ()
    back = type(cache).from_tensors(dict(reversed(tensors.items())), *types)
    assert_equal(cache, back)
    assert memory_of(cache) == memory_of(back)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_from_tensors_refuses_missing_and_unknown_names(kind):
    """Names must match exactly; the message tells the type and the name."""
    cache = make(kind)
    optional = ("rotation.angle_bha", "rotation.quaternion_bhj4", "conv_bvk")
    for name in [n for n in NAMES[kind] if kind == "mamba2" or n not in optional]:
        tensors = cache.to_tensors()
        tensors["extra"] = tensors.pop(name)
        with pytest.raises(CacheError, match=rf"{type(cache).__name__}\..*'{name}' is missing"):
            type(cache).from_tensors(tensors)
    for name in ("extra", "rotation.extra", "rotation", "", "layers.0.ssm_bhpr"):
        tensors = cache.to_tensors() | {name: torch.zeros(1)}
        with pytest.raises(CacheError, match=rf"{type(cache).__name__}\..*unexpected.*'{name}'"):
            type(cache).from_tensors(tensors)


def test_model_from_tensors_refuses_missing_and_unknown_names():
    """A model needs its position, a type for every layer, and every tensor of each."""
    tensors = make("model").to_tensors()
    for name in ("position_b", "layers.0.ssm_bhpr", "layers.2.v_state_bhp"):
        with pytest.raises(CacheError, match=f"'{name.rpartition('.')[2]}' is missing"):
            ModelCache.from_tensors({k: x for k, x in tensors.items() if k != name}, MODEL_TYPES)
    for name in ("extra", "layers.3.ssm_bhpr", "layers.x.ssm_bhpr", "layers.0", "layers.0.extra"):
        with pytest.raises(CacheError, match="unexpected tensor"):
            ModelCache.from_tensors(tensors | {name: torch.zeros(1)}, MODEL_TYPES)
    with pytest.raises(CacheError, match=r"unexpected tensor 'layers\.2"):
        ModelCache.from_tensors(tensors, MODEL_TYPES[:2])


@each_kind
def test_repr_names_shapes_and_dtypes_but_no_values(kind):
    """A cache in a log is one line."""
    cache = make(kind, torch.float32)
    text = repr(cache)
    assert text.startswith(f"{type(cache).__name__}({NAMES[kind][0]}=[{BATCH}")
    assert "\n" not in text
    assert "tensor(" not in text
    for name, tensor in cache.to_tensors().items():
        dtype = "int64" if name.endswith(("length_b", "position_b")) else "float32"
        assert f"{name}={list(tensor.shape)} {dtype}" in text


def test_repr_is_what_the_documents_show():
    """The form of the text, in full."""
    cache = make("single", torch.bfloat16)
    assert repr(cache) == (
        "Mamba3SingleSsdCache(ssm_bhpr=[6, 3, 5, 4] bfloat16, k_state_bmhr=[6, 2, 3, 4] bfloat16, "
        "v_state_bhp=[6, 3, 5] bfloat16, rotation.angle_bha=[6, 3, 2] bfloat16)"
    )
    assert repr(RotationState()) == "RotationState()"


@each_kind
def test_is_a_tree(kind):
    """torch sees through a cache to its tensors and rebuilds it, nested types included."""
    cache = make(kind)
    leaves, spec = pytree.tree_flatten(cache)
    tensors = [leaf for leaf in leaves if leaf is not None]
    assert [id(x) for x in tensors] == [id(x) for x in cache.to_tensors().values()]
    assert_equal(cache, pytree.tree_unflatten(leaves, spec))
    doubled = pytree.tree_map_only(Tensor, lambda x: x * 2, {"layers": [cache]})["layers"][0]
    assert_equal(cache.map(lambda x: x * 2), doubled)


@each_kind
def test_compiles_as_argument_and_result(kind):
    """One graph takes a cache, calls its methods and returns a cache, with gradients."""

    def advance(cache):
        moved = cache.map(lambda x: x * 0.5 + 1 if x.is_floating_point() else x + 1)
        return moved, moved.clone().rows(slice(1, 3)), moved.detach(), cache.numel()

    # Each kind is a graph of its own; together they would reach the recompile limit.
    torch._dynamo.reset()
    expected = advance(make(kind))
    cache = make(kind).requires_grad_()
    actual = torch.compile(advance, fullgraph=True, backend="aot_eager")(cache)
    for want, got in zip(expected[:3], actual[:3], strict=True):
        assert_equal(want, got.detach())
    assert actual[3] == expected[3]
    assert not any(x.requires_grad for x in actual[2].to_tensors().values())
    total = sum(x.sum() for x in floats(actual[0]))
    for grad in torch.autograd.grad(total, floats(cache)):
        assert torch.equal(grad, torch.full_like(grad, 0.5))


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "model"])
def test_assign_writes_into_its_own_memory(kind):
    """`assign_` takes over the values, not the tensors, and returns the cache itself."""
    cache, other = make(kind), make(kind).map(lambda x: x * 2)
    before = memory_of(cache)
    assert cache.assign_(other) is cache
    assert_equal(other, cache)
    assert memory_of(cache) == before
    with pytest.raises(CacheError, match=rf"{type(cache).__name__}\.assign_: .* has shape"):
        cache.assign_(other.rows([0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_assign_converts_and_takes_views(dtype):
    """Values of another dtype are rounded into the memory that is there, wherever it lies."""
    other = make("model", dtype)
    large = make("model", torch.float32).map(lambda x: x.repeat_interleave(2, 0))
    large.map(lambda x: x[::2]).assign_(other)
    for name, tensor in large.to_tensors().items():
        assert torch.equal(tensor[::2], other.to_tensors()[name].to(tensor.dtype)), name
    with torch.inference_mode():
        assert_equal(other.to(torch.float32), make("model", torch.float32).assign_(other))


def test_gradients_pass_an_assignment():
    """With gradients enabled the new values keep their history, in every tensor."""
    cache, leaf = make("model"), make("model").requires_grad_()
    cache.assign_(leaf.map(lambda x: x * 3))
    total = sum(x.sum() for x in floats(cache))
    for grad in torch.autograd.grad(total, floats(leaf)):
        assert torch.equal(grad, torch.full_like(grad, 3.0))


def test_caches_are_assigned_under_vmap():
    """A mapped function may write into a cache of its own."""
    x_nbir = torch.randn(3, 2, 6, 4)

    def run(x_bir):
        cache = Mamba1Cache(x_bir[..., :2].clone(), torch.zeros_like(x_bir))
        return cache.assign_(Mamba1Cache(x_bir[..., 2:], x_bir)).ssm_bir

    assert torch.equal(torch.vmap(run)(x_nbir), x_nbir)


def test_caches_are_assigned_in_a_graph():
    """A traced assignment is the same."""
    cache, other = make("model"), make("model").map(lambda x: x * 2)
    graph = torch.compile(lambda mine, theirs: mine.assign_(theirs), backend="eager")
    graph(cache, other)
    assert_equal(other, cache)


def test_a_refused_assignment_writes_nothing():
    """All of a model's state is looked at before the first of it is written."""
    cache, before = make("model"), make("model")
    other = cache.map(lambda x: x * 2)
    with torch.inference_mode():
        frozen = make("model").layers[-1]
    mixed = cache._replace(layers=(*cache.layers[:-1], frozen))
    with pytest.raises(CacheError, match="inference mode"):
        mixed.assign_(other)
    assert_equal(before, cache)
    cache.layers[-1].requires_grad_()
    with pytest.raises(CacheError, match="needs a gradient"):
        cache.assign_(other)
    assert_equal(before, cache.detach())


@each_kind
def test_deepcopy_is_a_fork(kind):
    """`copy.deepcopy` keeps type and values and shares no memory."""
    cache = make(kind)
    copied = copy.deepcopy(cache)
    assert_equal(cache, copied)
    assert memory_of(cache).isdisjoint(memory_of(copied))


@each_kind
def test_pickle_keeps_the_type(kind):
    """Caches travel between processes as themselves."""
    assert_equal(make(kind), pickle.loads(pickle.dumps(make(kind))))


def double_in_another_process(caches):
    """Answer from the worker: each cache doubled, and what it called itself there."""
    return [cache.map(lambda x: x * 2) for cache in caches], [repr(cache) for cache in caches]


def test_travels_through_a_worker_process():
    """A fresh process receives caches of every type, computes with them and sends them back."""
    caches = [make(kind) for kind in PER_ROW]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        doubled, names = pool.submit(double_in_another_process, caches).result(timeout=60)
    for cache, answer, name in zip(caches, doubled, names, strict=True):
        assert_equal(cache.map(lambda x: x * 2), answer)
        assert name == repr(cache)


@pytest.mark.parametrize("kind", ["single", "double"])
def test_pathways_share_one_state(kind):
    """Changing the pathway changes the type only: same tensors, gradients pass, and back again."""
    cache = make(kind)
    single, double = cache.to_single(), cache.to_double()
    assert (type(single), type(double)) == (Mamba3SingleSsdCache, Mamba3DoubleSsdCache)
    assert (single if kind == "single" else double) is cache
    for other in (single, double, single.to_double(), double.to_single()):
        assert all(
            a is b
            for a, b in zip(cache.to_tensors().values(), other.to_tensors().values(), strict=True)
        )
    assert_equal(cache, double.to_single() if kind == "single" else single.to_double())


def test_rotation_gives_what_it_holds_and_refuses_the_other():
    """Asking angles for quaternions, or an empty state for either, is an error that says so."""
    angles, quaternions = make("angles"), make("quaternions")
    assert angles.angle() is angles.angle_bha
    assert quaternions.quaternion() is quaternions.quaternion_bhj4
    with pytest.raises(
        CacheError, match=r"expected quaternions; this state is RotationState\(angle_bha"
    ):
        angles.quaternion()
    with pytest.raises(
        CacheError, match=r"expected angles; this state is RotationState\(quaternion_bhj4"
    ):
        quaternions.angle()
    with pytest.raises(CacheError, match="expected angles"):
        RotationState().angle()
    with pytest.raises(CacheError, match="expected quaternions"):
        RotationState().quaternion()


def test_join_undoes_rows():
    """Caches that were cut apart and put together again are as before; gradients pass."""
    for kind in BLOCK_KINDS:
        cache = make(kind).requires_grad_()
        joined = join_rows([cache.rows([0, 1]), cache.rows(2), cache.rows(slice(3, None))])
        assert_equal(make(kind), joined.detach())
        grads = torch.autograd.grad(sum(x.sum() for x in floats(joined)), floats(cache))
        assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)
    model = make("model")
    assert_equal(model, ModelCache.join([model.rows([0]), model.rows(slice(1, None))]))


def test_join_pads_shorter_keys():
    """Keys of different lengths are padded behind their end; lengths stay with their rows."""
    long = make("convolved")
    short = long._replace(k_bhst=long.k_bhst[:, :, :5], v_bhst=long.v_bhst[:, :, :5]).rows([4])
    joined = join_rows([short, long])
    assert joined.k_bhst.shape == (BATCH + 1, 3, 8, 4)
    for name in ("k_bhst", "v_bhst"):
        assert torch.equal(getattr(joined, name)[0, :, :5], getattr(long, name)[4, :, :5])
        assert not getattr(joined, name)[0, :, 5:].any()
        assert torch.equal(getattr(joined, name)[1:], getattr(long, name))
    assert torch.equal(joined.length_b, torch.tensor([4, 0, 1, 2, 3, 4, 5]))


def test_join_refuses_two_types():
    """The rows of different families, or pathways, do not fit under each other."""
    with pytest.raises(CacheError, match="one type; got Mamba1Cache, Mamba2Cache"):
        join_rows([make("mamba2"), make("mamba1")])
    with pytest.raises(CacheError, match="one type; got Mamba3Double"):
        join_rows([make("single"), make("single").to_double()])


def test_position_of_a_model_has_two_names():
    """`position` is the short name of `position_b`."""
    model = make("model")
    assert model.position is model.position_b


def test_families_cannot_be_mistaken_for_each_other():
    """The two Mamba-3 pathways are different types although their fields are the same."""
    assert not isinstance(make("single"), Mamba3DoubleSsdCache)
    assert not isinstance(make("double"), Mamba3SingleSsdCache)
    assert Mamba3SingleSsdCache._fields == Mamba3DoubleSsdCache._fields
