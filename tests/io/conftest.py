"""Models that the tests of this folder start from."""

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import LM

from anymamba.models import MambaConfig, MambaLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy copy of one golden checkpoint, official `.bin`."""
    shutil.copytree(LM / "lm_mamba2_tied", tmp_path / "model")
    (tmp_path / "model" / "golden.safetensors").unlink()
    return tmp_path / "model"


@pytest.fixture
def tiny() -> MambaLM:
    torch.manual_seed(0)
    return MambaLM(MambaConfig(d_model=8, n_layer=3, vocab_size=13))
