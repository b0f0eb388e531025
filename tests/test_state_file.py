"""Laws of state files: what is in them, and what is refused."""

import json

import pytest
import torch

from anymamba.errors import CacheError, CheckpointError, ShapeError
from anymamba.io import load_state, save_state
from anymamba.nn import (
    Mamba1Cache,
    Mamba2Cache,
    ModelCache,
    RotationState,
)
from laws import randn
from state_files import BITS, DTYPES, KINDS, assert_same_cache, make, same_bits, saved_state

saved = pytest.fixture(saved_state)


def parts_of(file) -> tuple[dict, bytes]:
    """Take a safetensors file apart into header and values."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def forge(file, header: dict, values: bytes) -> None:
    """Put a safetensors file together, whatever it says."""
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_keeps_every_bit(tmp_path, kind, dtype):
    """What comes back has the type, the names, the dtypes and the bits of what was saved."""
    cache = make(kind, dtype)
    save_state(cache, tmp_path / "a")
    assert_same_cache(cache, load_state(tmp_path / "a"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_numbers_keep_their_bits(tmp_path, dtype):
    """Infinities, signed zero, the smallest numbers and NaN with a payload are not normalised."""
    bits = BITS[dtype.itemsize]
    special = torch.tensor([float("inf"), -float("inf"), -0.0, float("nan")], dtype=dtype)
    payload = special[3:].view(bits) + 1
    tiny = torch.ones(1, dtype=bits)
    window = torch.cat([special, payload.view(dtype), tiny.view(dtype)]).view(1, 2, 3)
    cache = Mamba1Cache(window, torch.zeros(1, 2, 1))
    save_state(cache, tmp_path / "a")
    assert_same_cache(cache, load_state(tmp_path / "a"))


@pytest.mark.parametrize("container", [list, tuple])
def test_stack_comes_back_as_a_list(tmp_path, container):
    """A stack of mixed families keeps its order, also beyond ten layers."""
    stack = [make(KINDS[place % 6], batch=place + 1) for place in range(12)]
    save_state(container(stack), tmp_path / "a")
    loaded = load_state(tmp_path / "a")
    assert type(loaded) is list
    for expected, actual in zip(stack, loaded, strict=True):
        assert_same_cache(expected, actual)
    assert "layers.9.rotation.quaternion_bhj4" in parts_of(tmp_path / "a")[0]


def test_model_and_list_are_told_apart(tmp_path):
    """A model's file has the names of `to_tensors`; a model comes back as one, a list as a list."""
    model = make("model")
    save_state(model, tmp_path / "a")
    header, _ = parts_of(tmp_path / "a")
    types = json.loads(header.pop("__metadata__")["types"])
    assert types == {"ModelCache": [type(layer).__name__ for layer in model.layers]}
    assert set(header) == set(model.to_tensors())
    assert type(load_state(tmp_path / "a").layers) is tuple
    header, values = parts_of(tmp_path / "a")
    header["__metadata__"]["types"] = json.dumps(types["ModelCache"])
    forge(tmp_path / "a", header, values)
    with pytest.raises(CheckpointError, match="'position_b' belongs to none of its 6 layers"):
        load_state(tmp_path / "a")
    save_state(model.layers, tmp_path / "a")
    assert type(load_state(tmp_path / "a")) is list


def test_header_describes_the_content(saved):
    """Type and sizes can be read without the tensors; names are those of `to_tensors`."""
    header, values = parts_of(saved)
    facts = header.pop("__metadata__")
    assert (facts["format"], facts["version"]) == ("anymamba-state", "1")
    assert json.loads(facts["types"]) == "Mamba2Cache"
    assert json.loads(facts["sizes"]) == {"b": 2, "v": 9, "k": 4, "h": 3, "p": 5, "r": 4}
    assert set(header) == set(make().to_tensors())
    assert len(values) == make().nbytes


def test_other_readers_can_open_it(saved):
    """The file is an ordinary safetensors file, each tensor aligned to its element size."""
    safetensors = pytest.importorskip("safetensors.torch")
    for name, tensor in safetensors.load_file(saved).items():
        assert same_bits(make().to_tensors()[name], tensor)
    save_state(Mamba1Cache(torch.zeros(1, 1, 3, dtype=torch.bfloat16), torch.ones(1, 1, 1)), saved)
    header, _ = parts_of(saved)
    del header["__metadata__"]
    start = int.from_bytes(saved.read_bytes()[:8], "little") + 8
    for entry in header.values():
        width = 4 if entry["dtype"] == "F32" else 2
        assert (start + entry["data_offsets"][0]) % width == 0


def test_views_gradients_and_shared_memory_are_saved_by_value(tmp_path):
    """Strides, graphs, parameters and aliasing do not reach the file."""
    memory = randn(2, 4, 7, seed=1, dtype=torch.float32)
    window = memory.transpose(1, 2)
    aliases = memory.transpose(1, 2)[..., :3]
    broadcast = torch.nn.Parameter(randn(1, 3, 1, 4, seed=2, dtype=torch.float32))
    leaf = Mamba1Cache(window, aliases).clone().requires_grad_()
    caches = [
        Mamba1Cache(window, aliases),
        Mamba1Cache(window, window),
        leaf,
        leaf.map(lambda x: x * 2),
        Mamba2Cache(window, broadcast.expand(2, 3, 5, 4)),
        make("single", batch=4).rows(slice(1, 4, 2)),
    ]
    save_state(caches, tmp_path / "stack")
    for place, cache in enumerate(caches):
        save_state(cache, tmp_path / "one")
        for loaded in (load_state(tmp_path / "one"), load_state(tmp_path / "stack")[place]):
            assert_same_cache(cache, loaded)
            assert not any(x.requires_grad for x in loaded.to_tensors().values())
    assert leaf.ssm_bir.requires_grad


def test_loaded_state_does_not_follow_the_file(tmp_path):
    """Overwriting the bytes of a file in place does not change a state that was read from it."""
    file = tmp_path / "a"
    save_state(make(), file)
    loaded = load_state(file)
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert_same_cache(make(), loaded)


def test_device_is_chosen_by_the_reader(saved):
    """The tensors go to `device`; a default device of the program does not interfere."""
    assert load_state(saved, device="meta").ssm_bhpr.device.type == "meta"
    cache = make("mamba1")
    with torch.device("meta"):
        loaded = load_state(saved)
        save_state(cache, saved)
    assert_same_cache(make(), loaded)
    assert_same_cache(cache, load_state(str(saved), torch.device("cpu")))


def test_any_flipped_bit_is_refused(tmp_path):
    """One wrong bit, at whatever place of the file, is a `CheckpointError` that names the file."""
    file = tmp_path / "a"
    save_state(Mamba1Cache(randn(1, 2, 3, seed=1), randn(1, 2, 1, seed=2)), file)
    good = file.read_bytes()
    for place in range(2 * len(good)):
        bad = bytearray(good)
        bad[place // 2] ^= 1 << place * 5 % 8
        file.write_bytes(bad)
        with pytest.raises(CheckpointError) as caught:
            load_state(file)
        assert str(caught.value).startswith(f"load_state: {str(file)!r} must "), place
    file.write_bytes(good)
    load_state(file)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 200, -1])
def test_truncated_file_is_refused(saved, keep):
    """A file that lost its end is refused, down to no byte at all."""
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"talk\.state' must be a whole state file; .*copy"):
        load_state(saved)


@pytest.mark.parametrize(
    "content",
    [
        b"not a tensor file at all",
        b"\xff" * 64,
        b"PK\x03\x04" + bytes(100),
        (2).to_bytes(8, "little") + b"{}",
        (2**40).to_bytes(8, "little") + b"{}",
    ],
    ids=["text", "ones", "zip", "no entries", "huge header"],
)
def test_foreign_file_is_refused(tmp_path, content):
    """A file of another kind is refused, whatever it is."""
    file = tmp_path / "a"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="a' must be a whole state file"):
        load_state(file)


def test_longer_file_is_refused(saved):
    """Bytes behind the end are refused."""
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="whole state file"):
        load_state(saved)


def test_pickle_is_never_executed(tmp_path):
    """A pickle that would run code is refused unread."""
    program = f"c__builtin__\nopen\n(V{tmp_path / 'hacked'}\nVw\ntR."
    (tmp_path / "a").write_text(program)
    with pytest.raises(CheckpointError, match="whole state file"):
        load_state(tmp_path / "a")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "pt"}, r"another kind: format 'pt'.*save_state"),
        ({"format": None}, "another kind: format None"),
        ({"version": "2"}, "version 1 or less; got 2.*upgrade"),
        ({"version": "1000000"}, "version 1 or less; got 1000000"),
        ({"version": "9" * 5000}, "its version is"),
        ({"version": "one"}, "its version is 'one'"),
        ({"version": "0"}, "its version is '0'"),
        ({"version": None}, "its version is ''"),
        ({"types": '"Mamba9Cache"'}, "any of Mamba1Cache.*got 'Mamba9Cache'.*install -U"),
        ({"types": '"RotationState"'}, "got 'RotationState'"),
        ({"types": '{"model": []}'}, "got {'model'"),
        ({"types": '{"ModelCache": "Mamba2Cache"}'}, "got {'ModelCache'"),
        ({"types": '{"ModelCache": []}'}, "belongs to none of its 0 layers"),
        ({"types": "7"}, "got 7"),
        ({"types": "[[]]"}, "belongs to none of its 1 layers"),
        ({"types": '"Mamba1Cache"'}, "do not make up what .*'conv_bik' is missing"),
        ({"types": '["Mamba2Cache"]'}, "belongs to none of its 1 layers"),
        ({"types": "[]"}, "belongs to none of its 0 layers"),
        ({"types": "Mamba2Cache"}, "header is damaged"),
        ({"types": "[" * 100_000}, "header is damaged"),
        ({"types": None}, "header is damaged"),
        ({"sizes": '{"b": 3}'}, "other sizes than its header says"),
        ({"sizes": None}, "header is damaged"),
        ({"checksum": "00000000"}, "checksum does not match"),
        ({"checksum": None}, "checksum does not match"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_header_is_refused(saved, change, message):
    """Each entry of the header is checked; the message names the file and what to do."""
    header, values = parts_of(saved)
    facts = header["__metadata__"] | change
    header["__metadata__"] = {key: text for key, text in facts.items() if text is not None}
    forge(saved, header, values)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_state(saved)
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("mamba2", "ssm_bhpr", {"shape": [2, 15, 4]}, "must have 4 axes"),
        ("mamba2", "ssm_bhpr", {"shape": [1, 6, 5, 4]}, "batch is"),
        ("mamba2", "ssm_bhpr", {"dtype": "I32"}, "got torch.int32"),
        ("mamba2", "ssm_bhpr", None, "'ssm_bhpr' is missing"),
        ("mamba2", "ssm_bhpr", "conv_bik", "'ssm_bhpr' is missing"),
        ("mamba2", None, "extra", "unexpected tensor 'extra'"),
        ("single", "rotation.angle_bha", None, "angles or quaternions"),
        ("single", "rotation.angle_bha", "rotation.angle", "angles or quaternions"),
        ("double", "rotation.quaternion_bhj4", {"shape": [2, 3, 2, 2]}, "must have size 4"),
        ("single", None, "rotation.quaternion_bhj4", "angles or quaternions"),
        ("model", "position_b", None, "position_b of a ModelCache must be a tensor"),
        ("model", "position_b", {"dtype": "F64"}, "must be torch.int64; got torch.float64"),
        ("model", "layers.1.ssm_bhpr", "layers.6.ssm_bhpr", "belongs to none of its 6 layers"),
        ("model", "layers.1.ssm_bhpr", "layers.01.ssm_bhpr", "belongs to none of its 6 layers"),
        ("model", "layers.1.ssm_bhpr", "layers.\u00b9.ssm_bhpr", "belongs to none"),
        ("model", "layers.1.ssm_bhpr", "layers.0.ssm_bhpr", "'ssm_bhpr' is missing|unexpected"),
        ("model", None, "position", "belongs to none of its 6 layers"),
    ],
)
def test_tensors_that_do_not_fit_the_type_are_refused(tmp_path, kind, name, change, message):
    """A missing, surplus, renamed, reshaped or retyped tensor is refused with the reason."""
    file = tmp_path / "a"
    save_state(make(kind), file)
    header, values = parts_of(file)
    if name is None:
        header[change] = {
            "dtype": "F32",
            "shape": [1, 1, 1, 4],
            "data_offsets": [len(values), len(values) + 16],
        }
        values += bytes(16)
    elif change is None:
        begin, end = header.pop(name)["data_offsets"]
        values = values[:begin] + values[end:]
        for key, entry in header.items():
            if key != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [x - (end - begin) for x in entry["data_offsets"]]
    elif isinstance(change, str):
        header[change] = header.pop(name)
    else:
        header[name] |= change
    forge(file, header, values)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_state(file)
    assert str(file) in str(caught.value)


def test_type_is_part_of_the_checksum(tmp_path):
    """Two types with the same fields cannot be exchanged in the header unseen."""
    save_state(make("single"), tmp_path / "a")
    header, values = parts_of(tmp_path / "a")
    header["__metadata__"]["types"] = '"Mamba3DoubleSsdCache"'
    forge(tmp_path / "a", header, values)
    with pytest.raises(CheckpointError, match="checksum does not match"):
        load_state(tmp_path / "a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2), "got Tensor"),
        ({"a": 1}, "got dict"),
        (None, "got NoneType"),
        (RotationState(torch.zeros(1, 1, 1)), "got RotationState"),
        ([make(), None], "got NoneType"),
        ([[make()]], "got list"),
        ([], "must not be empty"),
        (make().to("meta"), "meta device"),
        (make().map(lambda x: x.to(torch.complex64)), "torch.float32 or .* got torch.complex64"),
        (make().map(lambda x: x.to(torch.int64)), "torch.float32 or .* got torch.int64"),
        (
            make("attention")._replace(length_b=torch.zeros(2)),
            "length_b of a KVCache must be torch.int64; got torch.float32",
        ),
        (make("attention")._replace(length_b=None), "length_b of a KVCache must be a tensor"),
        (make("model")._replace(position_b=None), "position_b of a ModelCache must be a tensor"),
        (make("model")._replace(layers=()), "must not be empty"),
        (make("model")._replace(layers=(make("model"),)), "got ModelCache"),
        ([make("model")], "got ModelCache"),
        (Mamba2Cache(RotationState(torch.zeros(1, 1, 1)), make().ssm_bhpr), "conv_bvk of a Mamba2"),
        (make()._replace(conv_bvk=None), "conv_bvk of a Mamba2Cache must be a tensor"),
        (make("single")._replace(rotation=RotationState()), "either angles or quaternions"),
        (
            make("single")._replace(
                rotation=RotationState(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1, 4))
            ),
            "either angles or quaternions",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_saving_something_else_is_refused(tmp_path, given, message):
    """What is not a cache, or not a whole one, is refused before a file appears."""
    with pytest.raises(CacheError, match=f"^save_state: .*{message}"):
        save_state(given, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Mamba2Cache(make().conv_bvk, make(batch=1).ssm_bhpr), "Mamba2Cache: batch is 2 .* but 1"),
        (make("model")._replace(position_b=torch.zeros(3).long()), r"one batch; got \[2, 3\]"),
        (ModelCache((make(), make(batch=1)), torch.zeros(2).long()), r"one batch; got \[1, 2\]"),
        (make("model")._replace(position_b=torch.tensor(1)), "position_b of a .* 1 axes"),
        (make()._replace(conv_bvk=torch.zeros(2, 0)), "conv_bvk of a Mamba2Cache must have 3 axes"),
    ],
    ids=str,
)
def test_saving_tensors_that_disagree_is_refused(tmp_path, given, message):
    """Sizes that contradict each other are met when they are saved, not when they are read."""
    with pytest.raises(ShapeError, match=f"^save_state: .*{message}"):
        save_state(given, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
