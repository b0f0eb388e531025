"""The archive: objects to files and back. Nothing that a file holds is ever executed."""

from anymamba.io.checkpoint import CheckpointService, load_pretrained, save_pretrained
from anymamba.io.config_file import read_config
from anymamba.io.convert import convert_checkpoint
from anymamba.io.state_file import load_state, save_state
from anymamba.io.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    IncrementalDecoder,
    Tokenizer,
    load_tokenizer,
)
from anymamba.models import use_checkpoints

__all__ = [
    "ByteTokenizer",
    "CheckpointService",
    "FileTokenizer",
    "IncrementalDecoder",
    "Tokenizer",
    "convert_checkpoint",
    "load_pretrained",
    "load_state",
    "load_tokenizer",
    "read_config",
    "save_pretrained",
    "save_state",
]

use_checkpoints(CheckpointService())
