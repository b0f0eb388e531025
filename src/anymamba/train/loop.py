"""The loop: batches in, a trained model out, and nothing lost on the way.

A step is a pure function of the checkpoint before it: weights, optimiser, position in the data,
carried state, random numbers and counters are all in there. So a run that was killed and resumed
writes the same losses, to the last bit, as one that was not (same machine, same threads).
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anymamba.io import save_pretrained
from anymamba.models import MambaLM, count_model
from anymamba.nn import gather_tensors
from anymamba.train.batches import training_batches, validation_batches
from anymamba.train.data import tokenizer_file
from anymamba.train.evaluate import Evaluation, evaluate, sample
from anymamba.train.guard import Guard
from anymamba.train.learner import Learner, build_model, check_mode
from anymamba.train.metrics import MetricsFile
from anymamba.train.optim import build_optimizer
from anymamba.train.rank_learner import RankLearner
from anymamba.train.ranks import clip_gradients, open_ranks
from anymamba.train.recipe_sections import Recipe
from anymamba.train.report import leave_papers
from anymamba.train.run_folder import RunFolder
from anymamba.train.run_state import RunState
from anymamba.train.schedule import schedule_factor
from anymamba.train.speed import SpeedMeter, matmul_rate

__all__ = ["RunSummary", "Trainer"]

# How often the machine's own speed is measured again: the first time it may have been busy.
_MEASURE_SECONDS = 15.0

Watch = Callable[[Mapping[str, Any]], None]


class RunSummary(NamedTuple):
    """How a run ended."""

    finished: bool
    step: int
    tokens: int
    bytes: float
    seconds: float
    skipped: int
    evaluation: Evaluation | None
    folder: RunFolder
    is_first: bool = True


class Trainer:
    """Trains a model after a recipe, in the folder that the recipe names.

    Args:
        recipe: everything that decides the run.
        resume: go on with the run in that folder, from its newest whole checkpoint; a run that was
            stopped before its first checkpoint starts again.
        watch: is told everything that happens, in the words of `metrics.jsonl`.
    """

    def __init__(self, recipe: Recipe, *, resume: bool = False, watch: Watch | None = None) -> None:
        """Take the recipe; nothing is read or written before `run`."""
        self.recipe, self.resume = recipe, resume
        self.folder = RunFolder(recipe.loop.out)
        self._watch: Watch = watch or (lambda entry: None)
        self._is_stopping = False

    def request_stop(self) -> None:
        """Ask for an end after the step that is being taken; the run can be resumed from there."""
        self._is_stopping = True

    def run(self) -> RunSummary:
        """Train to the end, or until somebody asks for a stop.

        Raises:
            ConfigError: the recipe cannot be followed here, or differs from that of the run.
            CheckpointError: the disk is full, or no checkpoint is whole.
            NonFiniteError: too many steps in a row had to be skipped.
        """
        self._ranks = open_ranks(self.recipe.parallel, self.recipe.loop.device)
        try:
            self._ranks.ask_first(lambda: self.folder.claim(self.recipe, resume=self.resume))
            self._build()
            # Not before: a start that fails must leave the folder free for the corrected command.
            self._ranks.ask_first(lambda: self.folder.keep_recipe(self.recipe))
            self._restore()
            while not self._is_over() and not self._is_stopping:
                self._step()
                self._after_step()
            return self._finish()
        except Exception as error:
            if (lost := self._ranks.explain(error)) is not None:
                raise lost from error
            raise
        finally:
            self._close()

    def _build(self) -> None:
        loop = self.recipe.loop
        if loop.threads is not None:
            torch.set_num_threads(loop.threads)
        self._device = self._ranks.device(loop.device)
        self._data = self._ranks.after_first(lambda: self.folder.prepare_data(self.recipe.data))
        torch.manual_seed(loop.seed)
        self.lm = build_model(self.recipe.model, self._data.vocab_size, self._device)
        check_mode(self.recipe.data.mode, self.lm)
        flops = 3 * count_model(self.lm, length=self.recipe.data.window).flops
        mesh = self._ranks.mesh
        # The learner first: it may spread the parameters that the optimiser then finds.
        learner = (
            Learner(self.lm, loop) if mesh is None else RankLearner(self.lm, self.recipe, mesh)
        )
        self._state = RunState(
            ranks=self._ranks,
            lm=self.lm,
            learner=learner,
            optimizer=build_optimizer(self.lm, self.recipe.optim),
            batches=training_batches(self._data.train, self.recipe.data),
            guard=Guard(spike_factor=loop.spike_factor, max_skips=loop.max_skips),
        )
        self._checkpoints = self.folder.checkpoints(loop.keep)
        self._ranks.ask_first(self._checkpoints.sweep)
        self._saved_step = -1
        self._meter = SpeedMeter(flops, self._matmul_rate())
        self._measured = time.monotonic()

    def _matmul_rate(self) -> float:
        loop = self.recipe.loop
        dtype = torch.bfloat16 if loop.autocast == "bfloat16" else torch.float32
        return matmul_rate(loop.device, dtype)

    def _restore(self) -> None:
        """Take up the newest checkpoint, if the run is to go on and there is one."""
        step = self._ranks.ask_first(self._checkpoints.newest_step) if self.resume else None
        if self._ranks.is_first:
            self._metrics = MetricsFile(self.folder.metrics, step)
        if step is not None:
            self._state.restore(self._checkpoints, step)
            self._saved_step = step
        self._tell(
            "start",
            resumed=step is not None,
            steps=self.recipe.loop.steps,
            seconds_limit=self.recipe.loop.seconds,
            parameters=sum(p.numel() for p in self.lm.parameters()),
            layer=self.lm.config.layer,
            tokens_per_step=self.recipe.data.window
            * self.recipe.data.batch
            * self.recipe.loop.accumulate,
            train_bytes=int(self._data.train.bytes_q.sum()),
            notes=list(self._data.notes),
            matmul_flops=self._meter.rate,
        )

    def _is_over(self) -> bool:
        steps, seconds = self.recipe.loop.steps, self.recipe.loop.seconds
        return (steps is not None and self._state.progress.step >= steps) or (
            seconds is not None and self._state.progress.seconds >= seconds
        )

    def _step(self) -> None:
        """Read the batches of one update, judge it, and take it."""
        recipe, state, progress = self.recipe, self._state, self._state.progress
        start = time.perf_counter()
        loss, tokens = 0.0, 0
        for _ in range(recipe.loop.accumulate):
            batch = next(state.batches)
            part = state.learner.loss(batch.to(self._device)) / recipe.loop.accumulate
            part.backward()
            value, many = float(part.detach()) * recipe.loop.accumulate, batch.predictions
            loss += value / recipe.loop.accumulate
            tokens += many
            progress.sum_nats += value * many
            progress.sum_bytes += batch.bytes_count
            progress.bytes += batch.bytes_count
        limit = recipe.optim.clip or math.inf
        norm = clip_gradients(self.lm, limit)
        progress.step += 1
        why = state.guard.judge(loss, norm)
        if why is None:
            state.optimizer.set_lr_factor(self._lr_factor())
            state.optimizer.step()
        else:
            self._tell("skip", why=why)
            if not math.isfinite(loss + norm):
                state.learner.forget()
        state.optimizer.zero_grad()
        # Clocks differ, and one person's Ctrl-C is everybody's.
        seconds, stop = self._ranks.largest(time.perf_counter() - start, self._is_stopping)
        self._is_stopping = bool(stop)
        self._meter.add(tokens, seconds)
        progress.tokens += tokens
        progress.seconds += seconds
        progress.sum_steps += 1
        progress.sum_loss += loss
        progress.grad_norm = norm

    def _lr_factor(self) -> float:
        """Return the factor of the update that was counted last, the first one being number 1."""
        return schedule_factor(
            self.recipe.schedule, self._state.progress.step, steps=self.recipe.loop.steps
        )

    def _after_step(self) -> None:
        """Report, validate, sample and save, in this order, each in its own rhythm."""
        loop, step = self.recipe.loop, self._state.progress.step
        is_over = self._is_over()
        if step % loop.report_every == 0 or is_over:
            self._report()
        if is_over:
            return
        if loop.evaluate_every and step % loop.evaluate_every == 0 and self._data.valid is not None:
            self._validate(loop.evaluate_tokens)
        if loop.sample_every and step % loop.sample_every == 0:
            self._sample(self._whole_model())
        if loop.checkpoint_every and step % loop.checkpoint_every == 0:
            self._save()

    def _report(self) -> None:
        progress = self._state.progress
        if time.monotonic() - self._measured > _MEASURE_SECONDS:
            self._meter.saw_rate(self._matmul_rate())
            self._measured = time.monotonic()
        self._tell(
            "step",
            loss=progress.sum_loss / progress.sum_steps,
            bits_per_byte=progress.sum_nats / math.log(2) / max(progress.sum_bytes, 1.0),
            grad_norm=progress.grad_norm,
            lr_factor=self._lr_factor(),
            tokens=progress.tokens,
            epoch=self._state.batches.epoch,
            seconds=progress.seconds,
            tokens_per_second=self._meter.tokens_per_second,
            share_of_ideal=self._meter.share_of_ideal,
        )
        progress.sum_steps, progress.sum_loss = 0, 0.0
        progress.sum_nats, progress.sum_bytes = 0.0, 0.0
        self._meter.reset()

    def _validate(self, tokens: int | None) -> Evaluation:
        assert self._data.valid is not None
        batches = validation_batches(self._data.valid, self.recipe.data, tokens)
        learner = self._state.learner
        shared = learner if isinstance(learner, RankLearner) else None
        found = evaluate(self.lm, batches, self.recipe.loop, shared)
        self._tell(
            "valid", loss=found.loss, bits_per_byte=found.bits_per_byte, of_all=tokens is None
        )
        return found

    def _sample(self, lm: MambaLM | None) -> None:
        loop = self.recipe.loop

        def write() -> str:
            assert lm is not None
            return sample(
                lm,
                self._data.tokenizer,
                loop.sample_prompt,
                max_new_tokens=loop.sample_tokens,
                seed=loop.seed,
            )

        self._tell("sample", prompt=loop.sample_prompt, text=self._ranks.ask_first(write))

    def _whole_model(self) -> MambaLM | None:
        """Return a model with all weights on the first rank, None on the others; all call it."""
        if self._ranks.mesh is None:
            return self.lm
        # Not on the rank's own device, which may be too small for the whole.
        tensors = gather_tensors(self.lm, keep=self._ranks.is_first, device="cpu")
        if not self._ranks.is_first:
            return None
        lm = MambaLM(self.lm.config)
        lm.load_state_dict(tensors)
        return lm

    def _save(self) -> None:
        if self._saved_step == self._state.progress.step:
            return
        path = self._state.save(self._checkpoints)
        self._saved_step = self._state.progress.step
        self._tell("checkpoint", name=path.name)

    def _finish(self) -> RunSummary:
        """Save; at the end of the run also evaluate on everything, sample, draw and report."""
        progress, finished = self._state.progress, self._is_over()
        found, lm = None, None
        self._save()
        if finished:
            if self._data.valid is not None:
                found = self._validate(None)
            lm = self._whole_model()
            self._sample(lm)
            if lm is not None:
                save_pretrained(lm, self.folder.model)
                keep_tokenizer(self.recipe.data.tokenizer, self.folder.model)
        self._tell("end", finished=finished, tokens=progress.tokens, seconds=progress.seconds)
        summary = RunSummary(
            finished=finished,
            step=progress.step,
            tokens=progress.tokens,
            bytes=progress.bytes,
            seconds=progress.seconds,
            skipped=self._state.guard.skipped,
            evaluation=found,
            folder=self.folder,
            is_first=self._ranks.is_first,
        )
        if finished and lm is not None:
            leave_papers(self.folder, self.recipe, lm)
        return summary

    def _close(self) -> None:
        """Let go of every file, whatever was opened before something failed."""
        for name in ("_metrics", "_data"):
            if (opened := getattr(self, name, None)) is not None:
                opened.close()
        self.folder.release()
        self._ranks.close()

    def _tell(self, kind: str, **facts: Any) -> None:
        if not self._ranks.is_first:
            return
        entry = {"kind": kind, "step": self._state.progress.step, **facts}
        self._metrics.write(entry)
        self._watch(entry)


def keep_tokenizer(name: str, folder: Path) -> None:
    """Copy the files of a tokenizer on this machine beside the model; bytes need none."""
    if (file := tokenizer_file(name)) is None:
        return
    # Whatever its own name is: this is the one that a model's folder is searched for.
    shutil.copyfile(file, folder / "tokenizer.json")
    config = file.parent / "tokenizer_config.json"
    if config.is_file():
        shutil.copyfile(config, folder / config.name)
