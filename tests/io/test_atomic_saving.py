"""Saving: the old checkpoint or the new one, never half of either."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    content,
    same_weights,
    take,
)
from torch import Tensor

import anymamba.io.weights_file as weights_file
from anymamba.errors import CheckpointError
from anymamba.io import load_pretrained, save_pretrained
from anymamba.models import MambaLM


@pytest.mark.parametrize("route", ["safetensors", "bin", "shards"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
def test_a_crash_while_saving_leaves_the_old_model_whole(
    route: str, error: BaseException, tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half a file is never seen: the old one stays until the new one is complete."""
    limit = {"max_shard_bytes": 1500} if route == "shards" else {}
    how: dict[str, Any] = {"format": "bin"} if route == "bin" else limit
    save_pretrained(tiny, tmp_path, **how)
    before = content(tmp_path)
    with torch.no_grad():
        changed = MambaLM(tiny.config)

    calls = []

    def bytes_of(tensor: Tensor) -> bytearray:
        calls.append(tensor)
        if len(calls) > 12:
            raise error
        return bytearray(tensor.numel() * tensor.element_size())

    def save(_: Any, stream: Any) -> None:
        stream.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(weights_file, "bytes_of", bytes_of)
        patch.setattr(torch, "save", save)
        expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected):
            save_pretrained(changed, tmp_path, **how)
    assert content(tmp_path) == before
    same_weights(tiny, load_pretrained(tmp_path))
    save_pretrained(changed, tmp_path, **how)
    same_weights(changed, load_pretrained(tmp_path))


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
