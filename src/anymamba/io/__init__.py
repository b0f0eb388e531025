"""The archive: objects to files and back. Nothing that a file holds is ever executed."""

from anymamba.io.checkpoint import CheckpointService, load_pretrained, save_pretrained
from anymamba.io.config_file import read_config
from anymamba.io.convert import convert_checkpoint
from anymamba.io.device import named_device, usable_device
from anymamba.io.disk import read_json, read_text, replacing, utf8, write_json
from anymamba.io.model_files import ModelFolders, load_model, save_model
from anymamba.io.quantized import stored_scheme
from anymamba.io.state_file import load_state, save_state
from anymamba.io.tensor_file import read_safetensors, write_safetensors
from anymamba.io.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    IncrementalDecoder,
    Tokenizer,
    load_tokenizer,
)
from anymamba.models import use_checkpoints, use_model_files

__all__ = [
    "ByteTokenizer",
    "CheckpointService",
    "FileTokenizer",
    "IncrementalDecoder",
    "ModelFolders",
    "Tokenizer",
    "convert_checkpoint",
    "load_model",
    "load_pretrained",
    "load_state",
    "load_tokenizer",
    "named_device",
    "read_config",
    "read_json",
    "read_safetensors",
    "read_text",
    "replacing",
    "save_model",
    "save_pretrained",
    "save_state",
    "stored_scheme",
    "usable_device",
    "utf8",
    "write_json",
    "write_safetensors",
]

use_checkpoints(CheckpointService())
use_model_files(ModelFolders())
