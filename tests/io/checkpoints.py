"""The golden language models, and how checkpoints are compared."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from anymamba.io import load_pretrained
from anymamba.models import MambaLM
from golden import HERE, relative_error

LM = HERE / "lm"
INDEX = {entry["name"]: entry for entry in json.loads((LM / "index.json").read_text())}
NAMES = sorted(INDEX)
# transformers has no Mamba-3, no MLP, no attention and no layer norm.
IN_TRANSFORMERS = ("lm_mamba1_tied", "lm_mamba2_tied")
# The keys of the official config.json, all of them.
FIELDS = (
    "d_model",
    "d_intermediate",
    "n_layer",
    "vocab_size",
    "ssm_cfg",
    "attn_layer_idx",
    "attn_cfg",
    "rms_norm",
    "residual_in_fp32",
    "fused_add_norm",
    "pad_vocab_size_multiple",
    "tie_embeddings",
)


def activation(name: str) -> str | None:
    return INDEX[name]["a_activation"] or None


def load(name: str, dtype: torch.dtype = torch.float64) -> MambaLM:
    return load_pretrained(LM / name, dtype=dtype, a_activation=activation(name))


def greedy(lm: MambaLM, prompt_bs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return prompt and new tokens, and the scores they were chosen from."""
    size = lm.config.vocab_size
    logits_bsw, cache = lm.prefill(prompt_bs, num_last_tokens=1)
    logits_bw, ids, scores = logits_bsw[:, -1], [prompt_bs], []
    for _ in range(count):
        scores.append(logits_bw[:, :size])
        ids.append(scores[-1].argmax(-1, keepdim=True))
        logits_bw, cache = lm.step(ids[-1][:, 0], cache)
    return torch.cat(ids, 1), torch.stack(scores, 1)


def assert_golden(name: str, lm: MambaLM, dtype: torch.dtype) -> None:
    """Compare logits, loss, the gradient of every parameter, and greedy generation."""
    golden = load_file(LM / name / "golden.safetensors")
    recorded = INDEX[name]["fp32_official_reference"]
    exact = dtype == torch.float64
    value_limit = 1e-9 if exact else 10 * recorded["logits_abs"] / recorded["logits_max"]
    ids_bs = golden["input_ids"]
    with torch.no_grad():
        assert relative_error(golden["logits"], lm(ids_bs)) <= value_limit
        last = lm(ids_bs, num_last_tokens=2)
        assert relative_error(golden["logits_last2"], last) <= value_limit
        sequences, scores = greedy(lm, golden["gen/prompt"], golden["gen/scores"].shape[1])
    assert torch.equal(golden["gen/sequences"], sequences)
    assert relative_error(golden["gen/scores"], scores) <= value_limit
    lm.zero_grad()
    loss = lm.loss(ids_bs)
    assert relative_error(golden["loss"][0], loss.detach()) <= value_limit
    loss.backward()
    grads = {name: x.grad for name, x in lm.named_parameters()}
    judged = {key.partition("/")[2] for key in golden if key.startswith(("grad/", "gradrow0/"))}
    assert judged == set(grads)
    for key, expected in golden.items():
        kind, _, parameter = key.partition("/")
        if kind not in ("grad", "gradrow0", "gradnorm"):
            continue
        grad = grads[parameter]
        assert grad is not None
        actual = {"grad": grad, "gradrow0": grad[0], "gradnorm": grad.norm()[None]}[kind]
        stored = 1e-9 if expected.dtype == torch.float64 else 5e-7
        limit = stored if exact else 10 * recorded["grad_rel"]
        assert relative_error(expected, actual) <= limit, key


def take(route: str, save: Any, folder: Path) -> None:
    """Write by a route: `save` is save_pretrained or convert_checkpoint, bound to its source."""
    layout = "transformers" if route.startswith("transformers") else "official"
    format = "bin" if route.endswith("bin") else "safetensors"
    shard = {"max_shard_bytes": 8000} if route == "shards" else {}
    save(folder, layout=layout, format=format, **shard)


def same_weights(expected: MambaLM, actual: MambaLM) -> None:
    wanted, got = expected.state_dict(), actual.state_dict()
    assert list(wanted) == list(got)
    for name, value in wanted.items():
        assert value.dtype == got[name].dtype, name
        assert torch.equal(value, got[name]), name


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
