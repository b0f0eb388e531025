"""Laws of the numbered checkpoints: whole or absent, checked, pruned, never lost."""

import logging
import os
import resource
from pathlib import Path

import pytest
import torch

from anymamba.errors import CheckpointError, ConfigError
from anymamba.train import CheckpointFolder, Snapshot


def snapshot(step: int, size: int = 8) -> Snapshot:
    """Return a snapshot whose values say which step they belong to."""
    tensors = {
        "model": {"w": torch.full((size,), step / 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        "random": {"cpu": torch.arange(16, dtype=torch.uint8), "count": torch.tensor(step)},
    }
    return Snapshot(step=step, tensors=tensors, facts={"loss": step / 7, "tiny": 5e-324})


def filled(folder: Path, *steps: int, keep: int = 3) -> CheckpointFolder:
    """Return a folder with checkpoints of these steps."""
    saved = CheckpointFolder(folder, keep=keep)
    for step in steps:
        saved.save(snapshot(step))
    return saved


def same(left: Snapshot, right: Snapshot) -> bool:
    """Compare to the last bit."""
    return (
        left.step == right.step
        and left.facts == right.facts
        and left.tensors.keys() == right.tensors.keys()
        and all(
            torch.equal(left.tensors[group][name], tensor)
            and left.tensors[group][name].dtype == tensor.dtype
            for group in right.tensors
            for name, tensor in right.tensors[group].items()
        )
    )


def spoil(file: Path) -> None:
    """Turn one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_was_saved_comes_back_to_the_last_bit(tmp_path):
    """Tensors of any dtype and plain values survive."""
    saved = filled(tmp_path, 10)
    newest = saved.newest()
    assert newest is not None
    assert same(newest, snapshot(10))


def test_a_new_folder_has_no_checkpoint(tmp_path):
    """Nothing saved yet is not an error, and looking creates nothing."""
    assert CheckpointFolder(tmp_path / "none").newest() is None
    assert not (tmp_path / "none").exists()


def test_only_the_newest_stay(tmp_path):
    """`keep` checkpoints remain, whatever their number of digits."""
    saved = filled(tmp_path, 5, 10, 99_999_999, 100_000_000, keep=2)
    assert saved.steps() == [99_999_999, 100_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100000000", "step-99999999"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: spoil(folder / "model.safetensors"),
        lambda folder: spoil(folder / "random.safetensors"),
        lambda folder: spoil(folder / "facts.json"),
        lambda folder: spoil(folder / "manifest.json"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: os.truncate(folder / "model.safetensors", 20),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog, harm):
    """One wrong bit, a cut or a missing file is noticed, said, and kept for inspection."""
    saved = filled(tmp_path, 10, 20)
    harm(saved.path(20))
    with caplog.at_level(logging.WARNING, "anymamba.train"):
        newest = saved.newest()
    assert newest is not None
    assert same(newest, snapshot(10))
    assert "the checkpoint of step 20 is damaged" in caplog.text
    assert saved.steps() == [10]
    assert len(list(tmp_path.glob("damaged-step-00000020-*"))) == 1


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    """Asking for one checkpoint never gives another."""
    saved = filled(tmp_path, 10, 20)
    spoil(saved.path(20) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"must be a whole checkpoint; model\.safetensors"):
        saved.load(20)


def test_all_damaged_is_an_error(tmp_path):
    """A run whose checkpoints are all damaged does not silently start from nothing."""
    saved = filled(tmp_path, 10, 20)
    for step in (10, 20):
        spoil(saved.path(step) / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="all 2 are damaged"):
            saved.newest()
    assert saved.steps() == [10, 20]


def test_only_set_aside_ones_are_an_error_too(tmp_path):
    """Checkpoints that were set aside still say that there was a run."""
    saved = filled(tmp_path, 10)
    saved.path(10).rename(tmp_path / "damaged-step-00000010-0123abcd")
    with pytest.raises(CheckpointError, match="all 1 are damaged"):
        saved.newest()


def test_saving_a_step_again_repairs_it_or_leaves_it(tmp_path):
    """A whole checkpoint of that step is not touched; a damaged one is replaced."""
    saved = filled(tmp_path, 10)
    before = saved.path(10).stat().st_ino
    saved.save(snapshot(10))
    assert saved.path(10).stat().st_ino == before
    spoil(saved.path(10) / "model.safetensors")
    saved.save(snapshot(10))
    assert same(saved.load(10), snapshot(10))


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path):
    """Refused in the middle of a file: a clear error, nothing lost, nothing left over."""
    saved = filled(tmp_path, 10, 20)
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="must be writable"):
            saved.save(snapshot(30, size=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.rglob("*")) == before
    assert saved.newest().step == 20  # pyright: ignore[reportOptionalMemberAccess]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """The message names the folder and the system's reason."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"'.*file/checkpoints' must be writable"):
        CheckpointFolder(tmp_path / "file" / "checkpoints").save(snapshot(1))


def test_half_written_checkpoints_are_invisible_and_swept(tmp_path):
    """What a killed process leaves is never read, and goes at the next start."""
    saved = filled(tmp_path, 10)
    part = tmp_path / ".step-00000020.0badcafe.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    assert saved.steps() == [10]
    saved.sweep()
    assert not part.exists()
    assert saved.steps() == [10]


def test_values_that_json_cannot_hold_fail_before_anything_has_a_name(tmp_path):
    """A mistake in the facts leaves no checkpoint behind."""
    bad = Snapshot(step=1, tensors={"model": {"w": torch.ones(1)}}, facts={"x": object()})
    with pytest.raises(TypeError):
        CheckpointFolder(tmp_path).save(bad)
    assert list(tmp_path.iterdir()) == []


def test_rejects_keeping_none():
    """At least one checkpoint stays."""
    with pytest.raises(ConfigError, match="keep must be at least 1; got 0"):
        CheckpointFolder(Path("x"), keep=0)
