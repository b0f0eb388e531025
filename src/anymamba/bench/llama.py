"""The same language models in llama.cpp: what people run on a CPU otherwise.

It is driven through its C interface, as its own programs do, so that no Python stands between the
clock and its kernels.
"""

import ctypes
import importlib
import importlib.util
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.bench.llama_file import write_gguf
from anymamba.errors import BackendError
from anymamba.models import MambaLM
from anymamba.nn import Mamba, Mamba2

__all__ = ["LLAMA_FORMATS", "LlamaFiles", "LlamaModel", "has_llama", "llama_files"]

ABSENT = "llama.cpp is not installed: pip install 'anymamba[llama]'"
NO_MAMBA3 = "llama.cpp has no Mamba-3"
# Our formats by the names of its file types.
LLAMA_FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
# Tokens it takes through all layers at once: its own default.
AT_ONCE = 512


def has_llama() -> bool:
    """Say whether llama.cpp and the writer of its files can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def llama_files(lm: MambaLM) -> "LlamaFiles | str":
    """Return the model for llama.cpp, or why it cannot have it.

    Args:
        lm: one of ours; all its layers of one family.
    """
    layers: list[Any] = list(lm.backbone.layers)
    if not isinstance(layers[0].mixer, Mamba | Mamba2):
        return NO_MAMBA3
    return LlamaFiles(lm) if has_llama() else ABSENT


class LlamaFiles:
    """A model as files for llama.cpp, each made when it is first asked for; gone with the object.

    Args:
        lm: the model; its weights are copied at once.
    """

    def __init__(self, lm: MambaLM) -> None:
        """Write the model in float32."""
        self._folder = Path(tempfile.mkdtemp(prefix="anymamba-llama-"))
        # A loaded model may still map its file, which some systems do not let go.
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        write_gguf(lm, self._file("F32"))

    def open(self, form: str, *, rows: int = 1) -> "LlamaModel":
        """Load the model with weights of a format.

        Args:
            form: one of ours; `LLAMA_FORMATS` says what it is there.
            rows: sequences that are decoded together.
        """
        kind = LLAMA_FORMATS[form]
        if not self._file(kind).is_file():
            self._convert(kind)
        return LlamaModel(self._file(kind), rows)

    def _file(self, kind: str) -> Path:
        return self._folder / f"{kind}.gguf"

    def _convert(self, kind: str) -> None:
        """Let llama.cpp make its own file: nobody else knows its blocks as well."""
        api = _api()
        options = api.llama_model_quantize_default_params()
        options.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
        options.nthread = torch.get_num_threads()
        source, target = (bytes(self._file(name)) for name in ("F32", kind))
        if api.llama_model_quantize(source, target, ctypes.byref(options)):
            raise BackendError(f"bench: llama.cpp could not convert the model to {kind}.")


class LlamaModel:
    """A loaded model with the state of its sequences.

    Args:
        file: GGUF.
        rows: how many sequences there are.
    """

    def __init__(self, file: Path, rows: int = 1) -> None:
        """Load the weights, and start from the empty state."""
        api = self._api = _api()
        model = api.llama_model_load_from_file(bytes(file), api.llama_model_default_params())
        if not model:
            raise BackendError(f"bench: llama.cpp could not load {file}.")
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = max(AT_ONCE, rows)
        options.n_ubatch = AT_ONCE
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.no_perf = True
        self._context = api.llama_init_from_model(model, options)
        self._batch = api.llama_batch_init(max(AT_ONCE, rows), 0, 1)
        self._rows, self._place = rows, 0
        self._width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.weight_bytes: int = api.llama_model_size(model)
        weakref.finalize(self, _free, api, model, self._context, self._batch)

    def read(self, ids_s: Tensor) -> Tensor:
        """Read a prompt from the empty state, one sequence; return the logits of its last token."""
        self.forget()
        last = len(ids_s) - 1
        for start in range(0, len(ids_s), AT_ONCE):
            piece = ids_s[start : start + AT_ONCE].tolist()
            places = range(start, start + len(piece))
            self._run(
                [
                    (token, 0, place, place == last)
                    for token, place in zip(piece, places, strict=True)
                ]
            )
        self._place = len(ids_s)
        return self._logits(1)[0]

    def step(self, ids_b: Tensor) -> Tensor:
        """Run one more token of every sequence; return their logits."""
        self._run([(token, row, self._place, True) for row, token in enumerate(ids_b.tolist())])
        self._place += 1
        return self._logits(self._rows)

    def forget(self) -> None:
        """Start again from the empty state."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        self._place = 0

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Run tokens: id, sequence, place in it, and whether the logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for slot, (token, row, place, is_wanted) in enumerate(tokens):
            batch.token[slot], batch.pos[slot], batch.logits[slot] = token, place, is_wanted
            batch.n_seq_id[slot], batch.seq_id[slot][0] = 1, row
        if code := self._api.llama_decode(self._context, batch):
            raise BackendError(f"bench: llama.cpp's llama_decode failed with code {code}.")

    def _logits(self, rows: int) -> Tensor:
        address = ctypes.cast(self._api.llama_get_logits(self._context), ctypes.c_void_p).value
        floats = (ctypes.c_float * (rows * self._width)).from_address(address or 0)
        return torch.frombuffer(floats, dtype=torch.float32).view(rows, self._width).clone()


def _free(api: Any, model: Any, context: Any, batch: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)


_quiet: list[Any] = []


def _api() -> Any:
    """Return its C interface, with its log lines kept off the terminal."""
    # By name: type checkers need not have what only one extra brings.
    api: Any = importlib.import_module("llama_cpp")
    if not _quiet:
        _quiet.append(api.llama_log_callback(lambda level, text, data: None))
        api.llama_log_set(_quiet[0], ctypes.c_void_p(0))
        api.llama_backend_init()
    return api
