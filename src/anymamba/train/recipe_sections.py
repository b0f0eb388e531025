"""A training run as a value: the fields of a recipe, their defaults and their limits.

`recipe.py` reads and writes the files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from anymamba.errors import ConfigError
from anymamba.models import MambaConfig, preset
from anymamba.train.recipe_types import expected_of, fits

__all__ = [
    "DataRecipe",
    "LoopRecipe",
    "ModelRecipe",
    "OptimRecipe",
    "ParallelRecipe",
    "Recipe",
    "ScheduleRecipe",
]

Family = Literal["Mamba1", "Mamba2", "Mamba3"]
# What is trained when a recipe says nothing of the model: small enough for a laptop's processor.
SMALL = MambaConfig(d_model=128, n_layer=4, vocab_size=1, ssm_cfg={"layer": "Mamba3"})


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Which text, in which tokens, and how it is cut into batches.

    Args:
        train: files and folders; none means the sources of Python's standard library.
        valid: files and folders held out; none means a share of `train`.
        valid_share: share of the training files held out when `valid` is empty; 0 means none.
        kind: "text" (a file is a document) or "jsonl" (a line is a document).
        text_key: where the text of a JSON line, or of a row of a data set, is found.
        dataset: a name for the `datasets` library instead of `train`, as "name" or "name:subset".
        tokenizer: "bytes", a `tokenizer.json`, a folder that holds one, or a name on the hub.
        window: tokens per row.
        batch: rows per step.
        mode: "packed" (each window starts from an empty state) or "carried" (a window starts from
            the state in which its document's previous window ended).
        seed: of the order of documents.
        cache_dir: where token files are kept; none means beside the run.
    """

    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    valid_share: float = 0.05
    kind: Literal["text", "jsonl"] = "text"
    text_key: str = "text"
    dataset: str | None = None
    tokenizer: str = "bytes"
    window: int = 512
    batch: int = 8
    mode: Literal["packed", "carried"] = "packed"
    seed: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Check types and limits."""
        _check_types("data", self)
        _need_positive("data", self, ("window", "batch"))
        _need("data", "valid_share", self.valid_share, 0 <= self.valid_share < 1, "in [0, 1)")
        if self.dataset is not None and self.train:
            raise ConfigError(
                f"data: dataset and train exclude each other; got dataset={self.dataset!r} and "
                f"train={list(self.train)}. Keep one of them."
            )


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The model, in the words of `MambaConfig`; its vocabulary comes from the data.

    A field that is not given is the preset's, and without a preset that of a small Mamba-3.

    Args:
        preset: a published size, such as "mamba3-siso-187m".
        layer: the family; must agree with the preset.
        d_model: width of the residual stream.
        n_layer: number of layers.
        d_intermediate: hidden width of the MLP after each mixer; 0 means no MLP.
        ssm_cfg: arguments of the block, laid over the preset's.
        attn_layer_idx: places of attention layers.
        attn_cfg: arguments of attention, laid over the preset's.
        rms_norm: RMS norms; else layer norms.
        residual_in_fp32: keep the residual stream in float32 beside half types.
        pad_vocab_size_multiple: the embedding has a multiple of this many rows.
        tie_embeddings: the head shares the embedding's weight.
    """

    preset: str | None = None
    layer: Family | None = None
    d_model: int | None = None
    n_layer: int | None = None
    d_intermediate: int | None = None
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: tuple[int, ...] | None = None
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool | None = None
    residual_in_fp32: bool | None = None
    pad_vocab_size_multiple: int | None = None
    tie_embeddings: bool | None = None

    def __post_init__(self) -> None:
        """Check types, and that there is such a model."""
        _check_types("model", self)
        if "layer" in self.ssm_cfg:
            raise ConfigError(
                "model: ssm_cfg holds arguments of the block; got 'layer' in it. "
                "Set model.layer instead."
            )
        self.config(vocab_size=1)

    def config(self, vocab_size: int) -> MambaConfig:
        """Return the model's configuration for a vocabulary.

        Raises:
            ConfigError: the family contradicts the preset, or the model's own checks fail.

        Example:
            >>> ModelRecipe(preset="mamba2-130m", n_layer=2).config(vocab_size=257).d_model
            768
        """
        base = SMALL if self.preset is None else preset(self.preset)
        layer = self.layer or base.layer
        if self.preset is not None and layer != base.layer:
            raise ConfigError(
                f"model: layer must be {base.layer!r}, the family of the preset {self.preset!r}; "
                f"got {layer!r}. Leave one of them out."
            )
        given = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in ("preset", "layer", "ssm_cfg", "attn_cfg")
            and getattr(self, entry.name) is not None
        }
        if self.attn_layer_idx is not None:
            given["attn_layer_idx"] = list(self.attn_layer_idx)
        return replace(
            base,
            vocab_size=vocab_size,
            ssm_cfg={**base.ssm_cfg, **self.ssm_cfg, "layer": layer},
            attn_cfg={**base.attn_cfg, **self.attn_cfg},
            **given,
        )


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """The optimiser.

    Args:
        name: "adamw", or "muon" (AdamW for whatever is no matrix).
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon; none means `lr`.
        betas: decay of AdamW's two averages.
        eps: AdamW's epsilon.
        weight_decay: decoupled decay; vectors and tagged parameters are exempt.
        clip: largest norm of the whole gradient; 0 means no clipping.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 2e-3
    muon_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        """Check types and limits."""
        _check_types("optim", self)
        _need_positive("optim", self, ("lr", "eps"))
        if self.muon_lr is not None:
            _need_positive("optim", self, ("muon_lr",))
        _need_not_negative("optim", self, ("weight_decay", "clip"))
        good = all(0 <= beta < 1 for beta in self.betas)
        _need("optim", "betas", self.betas, good, "two numbers in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """How the learning rate moves; a factor of the peak, as a function of the step alone.

    Args:
        kind: "cosine", "wsd" (warm-up, stable, decay) or "constant".
        warmup: steps from 0 to the peak.
        decay_share: share of all steps in which "wsd" decays.
        floor: the factor at the end, as a share of the peak.
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = 20
    decay_share: float = 0.2
    floor: float = 0.01

    def __post_init__(self) -> None:
        """Check types and limits."""
        _check_types("schedule", self)
        _need_not_negative("schedule", self, ("warmup",))
        for name in ("decay_share", "floor"):
            value = getattr(self, name)
            _need("schedule", name, value, 0 <= value <= 1, "in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class LoopRecipe:
    """How long to train, with which means, and what to write down on the way.

    Args:
        out: the run's folder.
        steps: updates of the weights; none means until `seconds` are over.
        seconds: stop after this time of training; none means no limit.
        accumulate: batches per update.
        device: where to train, such as "cpu" or "cuda:0".
        autocast: "none" or "bfloat16".
        checkpoint_activations: recompute each layer in the backward instead of keeping it.
        compile: run the model through `torch.compile`.
        seed: of the initial weights and of samples.
        threads: of the processor; none leaves torch's own choice.
        report_every: steps between lines of metrics.
        evaluate_every: steps between validations; 0 means only at the end.
        evaluate_tokens: held-out tokens per validation on the way; the last one takes all.
        sample_every: steps between samples; 0 means only at the end.
        sample_prompt: what a sample continues.
        sample_tokens: length of a sample.
        checkpoint_every: steps between checkpoints; 0 means only at the end.
        keep: newest checkpoints that are kept.
        spike_factor: a loss above this multiple of the recent ones is skipped; 0 means never.
        max_skips: skipped steps in a row after which the run stops.
    """

    out: str = "run"
    steps: int | None = 1000
    seconds: float | None = None
    accumulate: int = 1
    device: str = "cpu"
    autocast: Literal["none", "bfloat16"] = "none"
    checkpoint_activations: bool = False
    compile: bool = False
    seed: int = 0
    threads: int | None = None
    report_every: int = 10
    evaluate_every: int = 100
    evaluate_tokens: int = 65536
    sample_every: int = 0
    sample_prompt: str = ""
    sample_tokens: int = 256
    checkpoint_every: int = 100
    keep: int = 3
    spike_factor: float = 3.0
    max_skips: int = 10

    def __post_init__(self) -> None:
        """Check types and limits."""
        _check_types("loop", self)
        counts = ("accumulate", "report_every", "evaluate_tokens", "sample_tokens", "keep")
        _need_positive("loop", self, counts)
        optional = [n for n in ("steps", "seconds", "threads") if getattr(self, n) is not None]
        _need_positive("loop", self, optional)
        rhythm = ("evaluate_every", "sample_every", "checkpoint_every", "max_skips")
        _need_not_negative("loop", self, rhythm)
        good = self.spike_factor == 0 or self.spike_factor > 1
        _need("loop", "spike_factor", self.spike_factor, good, "greater than 1, or 0 for no guard")


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe:
    """How the ranks that `torchrun` starts are used; what is left of them shares the batch.

    Args:
        cp: ranks that share a sequence.
        tp: ranks that share the heads.
        shard: shard parameters, gradients and moments over ranks (FSDP2); else replicate (DDP).
        param_dtype: what sharded matrices are gathered in: "none" or "bfloat16".
        timeout: seconds after which a rank that does not answer counts as lost; one whose process
            ends is noticed at once.
    """

    cp: int = 1
    tp: int = 1
    shard: bool = False
    param_dtype: Literal["none", "bfloat16"] = "none"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Check types and limits."""
        _check_types("parallel", self)
        _need_positive("parallel", self, ("cp", "tp", "timeout"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run.

    Example:
        >>> Recipe(data=DataRecipe(window=128)).data.window
        128
    """

    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    loop: LoopRecipe = field(default_factory=LoopRecipe)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)

    def __post_init__(self) -> None:
        """Check what one section alone cannot know: that the schedule has an end."""
        _check_types("recipe", self)
        steps = self.loop.steps
        if steps is None:
            if self.loop.seconds is None:
                raise ConfigError(
                    "loop: steps or seconds must be given; got neither. Set loop.steps."
                )
            if self.schedule.kind != "constant":
                raise ConfigError(
                    f"schedule: kind={self.schedule.kind!r} needs to know the last step; "
                    "got loop.steps=none. Set loop.steps, or schedule.kind='constant'."
                )
        elif self.schedule.warmup > steps:
            raise ConfigError(
                f"schedule: warmup must not exceed loop.steps; got {self.schedule.warmup} of "
                f"{steps} steps. Lower schedule.warmup."
            )


def _check_types(section: str, recipe: Any) -> None:
    for name, kind in get_type_hints(type(recipe)).items():
        value = getattr(recipe, name)
        if not fits(value, kind):
            words = kind.__name__ if section == "recipe" else expected_of(kind)
            raise ConfigError(f"{section}: {name} must be {words}; got {value!r}. Correct it.")


def _need(section: str, name: str, value: Any, good: bool, what: str) -> None:
    if not good:
        raise ConfigError(f"{section}: {name} must be {what}; got {value!r}. Correct it.")


def _need_positive(section: str, recipe: Any, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(recipe, name)
        _need(section, name, value, value > 0, "positive")


def _need_not_negative(section: str, recipe: Any, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(recipe, name)
        _need(section, name, value, value >= 0, "at least 0")
