"""Names of the hub, from a cache that was laid out by hand: there is no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load, same_weights, take

from anymamba.errors import CheckpointError
from anymamba.io import convert_checkpoint, load_pretrained, save_pretrained
from anymamba.models import MambaConfig, MambaLM

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fake_hub(cache: Path, source: Path, reference: str) -> Path:
    """Lay a checkpoint out as huggingface_hub's cache does, without a network."""
    repository = cache / "models--state-spaces--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for place, file in enumerate(source.iterdir()):
        shutil.copy(file, repository / "blobs" / str(place))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(place))
    (repository / "refs" / reference).parent.mkdir(parents=True)
    (repository / "refs" / reference).write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("reference", ["main", "refs/pr/1"])
@pytest.mark.parametrize("route", ["safetensors", "bin", "shards", "transformers"])
def test_hub_names_load_from_the_cache(route: str, reference: str, tmp_path: Path):
    """A name and a revision find what the hub's cache holds, without a network."""
    lm = load("lm_mamba1_tied", torch.float32)
    take(route, lm.save_pretrained, tmp_path / "source")
    fake_hub(tmp_path / "cache", tmp_path / "source", reference)
    revision = None if reference == "main" else reference
    how: dict[str, Any] = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    again = load_pretrained("state-spaces/tiny", revision=revision, **how)
    same_weights(lm, again)
    assert again.config.to_dict() == lm.config.to_dict()
    convert_checkpoint("state-spaces/tiny", tmp_path / "out", revision=revision, **how)
    same_weights(lm, load_pretrained(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="'state-spaces/tiny' at 'v2' must"):
        load_pretrained("state-spaces/tiny", revision="v2", **how)
    with pytest.raises(CheckpointError, match=r"must have a config\.json that can"):
        load_pretrained("state-spaces/other", **how)


def test_hf_home_and_the_offline_flag_are_honoured(tmp_path: Path):
    """The environment that others obey is obeyed here; and torch's compiler is not loaded."""
    lm = MambaLM(MambaConfig(d_model=64, n_layer=2, vocab_size=2000, ssm_cfg={"layer": "Mamba3"}))
    save_pretrained(lm, tmp_path / "source")
    fake_hub(tmp_path / "hub", tmp_path / "source", "refs/pr/1")
    code = (
        "import sys, anymamba.io; from anymamba.models import MambaLM;"
        "lm = MambaLM.from_pretrained('state-spaces/tiny', revision='refs/pr/1');"
        "print(sum(x.numel() for x in lm.parameters()), 'torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    count = sum(x.numel() for x in lm.parameters())
    assert run.stdout.split() == [str(count), "False"]


def test_shards_that_the_cache_lacks_are_named(tiny: MambaLM, tmp_path: Path):
    """An interrupted download is not half a model."""
    take("shards", lambda *args, **how: save_pretrained(tiny, *args, **how), tmp_path / "source")
    snapshot = fake_hub(tmp_path / "cache", tmp_path / "source", "main")
    gone = sorted(snapshot.glob("model-*"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"'{gone.name}' cannot be reached"):
        load_pretrained("state-spaces/tiny", cache_dir=tmp_path / "cache", local_files_only=True)


def test_a_folder_is_never_looked_up_on_the_hub(
    tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder named like a repository wins, and needs no huggingface_hub at all."""
    save_pretrained(tiny, tmp_path / "state-spaces" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    same_weights(tiny, load_pretrained("state-spaces/tiny"))
    with pytest.raises(CheckpointError, match=r"pip install 'anymamba\[io\]'"):
        load_pretrained("state-spaces/other")
