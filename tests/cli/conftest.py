"""A tiny checkpoint, and a way to run commands without starting a process."""

import io
import json
import signal
import sys
from typing import Any, NamedTuple

import pytest
import torch

from anymamba.cli import main
from anymamba.io import save_pretrained
from anymamba.models import MambaConfig, MambaLM


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        [line] = self.out.splitlines()
        return json.loads(line)

    @property
    def documents(self) -> list[Any]:
        """The JSON documents on stdout, one per line."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def interruptible():
    """Let processes hear Ctrl-C where the tests run behind `&`: a shell makes those ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs a command line, with text on stdin if given."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return run


def small_model(seed: int = 0) -> MambaLM:
    """Return a random Mamba-3 whose tokens are bytes."""
    torch.manual_seed(seed)
    options = {"layer": "Mamba3", "d_state": 8, "headdim": 8}
    return MambaLM(MambaConfig(d_model=16, n_layer=2, vocab_size=256, ssm_cfg=options))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return the folder of a saved `small_model`."""
    folder = tmp_path_factory.mktemp("small")
    save_pretrained(small_model(), folder)
    return folder
