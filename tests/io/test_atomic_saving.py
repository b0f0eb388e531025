"""Saving: the old checkpoint or the new one, never half of either."""

import io
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from checkpoints import content, same_weights, take
from safetensors import SafetensorError
from safetensors.torch import save_file

from anymamba.errors import CheckpointError
from anymamba.io import load_pretrained, save_pretrained
from anymamba.models import MambaConfig, MambaLM


class Disk:
    """Takes `room` bytes of new files in all, then fails in the middle of one."""

    def __init__(self, room: int, error: BaseException) -> None:
        self.room, self.error = room, error
        self.usual_open, self.usual_save = open, save_file

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb":
            return self.usual_open(file, mode, *args, **kwargs)
        disk = self

        class Stream(io.FileIO):
            def write(self, data: Any) -> int:
                view = memoryview(data)
                size = min(view.nbytes, disk.room)
                disk.room -= super().write(view.cast("B")[:size])
                if size < view.nbytes:
                    raise disk.error
                return size

        return Stream(file, mode)

    def save_file(self, tensors: Any, file: str, metadata: Any) -> None:
        """Fail as the library does, which has its own name for errors of the system."""
        self.usual_save(tensors, file, metadata)
        size = os.stat(file).st_size
        if size > self.room:
            os.truncate(file, self.room)
            is_full = isinstance(self.error, OSError)
            raise SafetensorError(f"I/O error: {self.error}") if is_full else self.error
        self.room -= size


@pytest.mark.parametrize("route", ["safetensors", "bin", "shards"])
@pytest.mark.parametrize("error", [OSError("disk is full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("room", [0, 5000, 12000])
def test_a_crash_while_saving_leaves_the_old_model_whole(
    route: str,
    error: BaseException,
    room: int,
    tiny: MambaLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Half a file is never seen: the old one stays until the new one is complete."""
    folder = tmp_path / "model"
    take(route, tiny.save_pretrained, folder)
    before = content(folder)
    changed = MambaLM(tiny.config)
    with monkeypatch.context() as patch:
        disk = Disk(room, error)
        patch.setattr("builtins.open", disk.open)
        patch.setattr("safetensors.torch.save_file", disk.save_file)
        with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
            take(route, changed.save_pretrained, folder)
    assert isinstance(caught.value, CheckpointError) == isinstance(error, OSError)
    assert content(folder) == before
    same_weights(tiny, load_pretrained(folder))
    take(route, changed.save_pretrained, folder)
    same_weights(changed, load_pretrained(folder))


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_what_the_system_refuses_is_told(tiny: MambaLM, tmp_path: Path):
    """Its reason reaches the message, and nothing is left beside the old model."""
    import resource

    save_pretrained(tiny, tmp_path)
    before = content(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"must be writable.*File too large.*make room"):
            save_pretrained(MambaLM(tiny.config), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(tmp_path) == before


def test_a_folder_may_be_named_from_where_one_stands(
    tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The current folder is one: its files have no folder in their names."""
    monkeypatch.chdir(tmp_path)
    save_pretrained(tiny, "")
    assert (tmp_path / "model.safetensors").is_file()
    same_weights(tiny, load_pretrained(tmp_path))


def test_saving_takes_no_second_copy(tmp_path: Path):
    """The file is written from the model's own memory: Python holds little of it at any time."""
    lm = MambaLM(MambaConfig(d_model=256, n_layer=2, vocab_size=4000))
    save_pretrained(lm, tmp_path)  # what is imported on the way counts once
    tracemalloc.start()
    try:
        save_pretrained(lm, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (tmp_path / "model.safetensors").stat().st_size / 10


@pytest.mark.parametrize("first", ["safetensors", "bin", "shards"])
@pytest.mark.parametrize("second", ["safetensors", "bin", "shards"])
def test_the_last_save_is_what_loads(first: str, second: str, tiny: MambaLM, tmp_path: Path):
    """Weights of another format from before do not shadow the new ones, nor stay behind."""
    take(first, tiny.save_pretrained, tmp_path / "model")
    new = MambaLM(tiny.config)
    take(second, new.save_pretrained, tmp_path / "model")
    same_weights(new, load_pretrained(tmp_path / "model"))
    take(second, new.save_pretrained, tmp_path / "alone")
    assert len(content(tmp_path / "model")) == len(content(tmp_path / "alone"))


def test_saving_over_a_link_keeps_the_file_behind_it(tiny: MambaLM, tmp_path: Path):
    """The hub's cache is made of links to shared files, which must not change."""
    save_pretrained(tiny, tmp_path / "blobs")
    before = content(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for name in before:
        (tmp_path / "model" / name).symlink_to(tmp_path / "blobs" / name)
    new = MambaLM(tiny.config)
    save_pretrained(new, tmp_path / "model")
    assert content(tmp_path / "blobs") == before
    same_weights(new, load_pretrained(tmp_path / "model"))
