"""Saving: the old checkpoint or the new one, never half of either."""

import io
from pathlib import Path
from typing import Any

import pytest
from checkpoints import content, same_weights, take

from anymamba.errors import CheckpointError
from anymamba.io import load_pretrained, save_pretrained
from anymamba.models import MambaLM


class Disk:
    """Opens new files until `room` bytes were written in all, then fails in the middle of one."""

    def __init__(self, room: int, error: BaseException) -> None:
        self.room, self.error = room, error
        self.usual = open

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "xb":
            return self.usual(file, mode, *args, **kwargs)
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
        patch.setattr("builtins.open", Disk(room, error).open)
        with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
            take(route, changed.save_pretrained, folder)
    assert isinstance(caught.value, CheckpointError) == isinstance(error, OSError)
    assert content(folder) == before
    same_weights(tiny, load_pretrained(folder))
    take(route, changed.save_pretrained, folder)
    same_weights(changed, load_pretrained(folder))


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
