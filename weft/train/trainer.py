"""Trainer: train a model by a recipe, on one rank or several.

    train(Recipe.load("recipe.toml"), Path("runs/shapes"))

A run's folder has recipe.json, log.jsonl, checkpoints/, samples/ and model/, which `weft generate` takes.
A run resumes from the last good checkpoint in its folder. A step depends on the recipe and its number only:
clips, timesteps and noise are derived from the index of a clip, on any number of ranks.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_

from weft import __version__
from weft.core.errors import InputError
from weft.core.files import whole
from weft.diffusers.parallelize import parallelize
from weft.run.devices import device
from weft.train import artifacts
from weft.train.checkpoints import Checkpoints
from weft.train.data import ClipLoader, source_of
from weft.train.diagnostics import check_same, diverged, explaining_out_of_memory
from weft.train.journal import Journal
from weft.train.mesh import TrainingMesh, full
from weft.train.optimizer import lr_at, make_optimizers, update_ema
from weft.train.recipe import Recipe
from weft.train.stop_signal import StopSignal
from weft.train.video_folder import summarize_skipped
from weft.video import flow
from weft.video.pipeline import VideoPipeline
from weft.video.saved_model import is_own
from weft.video.transformer import DiTConfig, VideoDiT

if TYPE_CHECKING:
    from weft.train.dsv import DSV


def train(recipe: Recipe, folder: Path, *, live: bool = True) -> int:
    """Train on every rank until the last step or a stop signal; return the step that was reached."""
    with explaining_out_of_memory():
        trainer = Trainer(recipe, folder, live=live)
        try:
            return trainer.run()
        finally:
            trainer.close()


class Trainer:
    """Model, optimizers, EMA of the weights and data of a run."""

    def __init__(self, recipe: Recipe, folder: Path, *, live: bool = True) -> None:
        self.recipe, self.folder, config = recipe, folder, recipe.train
        self.mesh = mesh = TrainingMesh.of(recipe.parallel.sequence)
        self.local_clips = mesh.local_clips(config.batch // config.accumulate)
        self.stop = StopSignal()
        self.clips = ClipLoader(
            source_of(recipe), batch=config.batch, held_out=recipe.data.held_out, seed=config.seed,
            downscale=recipe.model.upscale,
        )  # fmt: skip
        self.device = device()
        self.config = self._model_config()
        self.model = self._make_model().to(self.device)
        self.sparse = self._make_sparse()
        if config.checkpointing:
            self.model.enable_gradient_checkpointing()
        if mesh.sequence > 1 or self.sparse is not None:
            parallelize(
                self.model, mesh=mesh.sequence_mesh, plan=recipe.parallel.plan, sparse=self.sparse,
                cfg="off", backend=recipe.parallel.backend,
            )  # fmt: skip
        if recipe.parallel.shard:
            mesh.shard(self.model, self.model.blocks)
        self.optimizers = make_optimizers(self.model, config)
        self.ema = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.save.keep, notify=self.note)
        self.journal = Journal(folder, total=config.steps, live=live) if mesh.rank == 0 else None
        self.done = self._num_skipped_noted = 0

    def run(self) -> int:
        self._begin()
        last, save = self.recipe.train.steps, self.recipe.save
        with self.stop:
            ended = self.journal is not None and self.journal.has("end", self.done)
            if self.done == last and not any(self.mesh.mean([ended])):  # killed after its last checkpoint
                artifacts.export(self)
                self._validate()
            while self.done < last:
                stopping = self._step(self.done + 1)
                if stopping or self.done == last or self.done % save.every == 0:
                    self.checkpoints.save(self.done, self.state())
                    artifacts.export(self)
                if stopping and self.done < last:
                    self.note(f"stopped after step {self.done}; the same command resumes from there")
                    break
                self._validate()
            self.checkpoints.finish()
        if self.done == last:
            self.write("end")
        return self.done

    def _validate(self) -> None:
        """Write the held-out loss and samples, in the steps that the recipe requests and in the last one."""
        save, is_last = self.recipe.save, self.done == self.recipe.train.steps
        if save.validate and (is_last or self.done % save.validate == 0):
            self.write("validation", loss=artifacts.held_out(self))
        if save.samples and (is_last or self.done % save.samples == 0):
            self.write("sample", file=artifacts.samples(self))

    def _step(self, step: int) -> bool:
        """Run one optimizer step; return whether to stop after it."""
        config, start = self.recipe.train, time.perf_counter()
        if self.sparse is not None:
            self.sparse.begin(step)
        loss = self._forward_backward(step)
        grad_norm = float(full(clip_grad_norm_(self.model.parameters(), config.max_grad_norm)))
        # Before any weight changes, so that all ranks stop at the same step.
        loss, stopping = self.mesh.mean([loss, float(self.stop.requested)])
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            video, _ = self.clips.load(self.clips.indices(step)[self.local_clips])
            raise diverged(step, loss, grad_norm, video)
        lr = lr_at(config, step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        if self.sparse is not None:
            self.sparse.step()
        update_ema(self.ema.values(), self.model.parameters(), config.ema, step)
        self.done = step
        self.write(
            "step", loss=loss, norm=grad_norm, rate=lr, seconds=time.perf_counter() - start,
            samples=config.batch, tokens=config.batch * self.tokens,
        )  # fmt: skip
        self._note_skipped()
        for record in self.sparse.records if self.sparse is not None else ():
            self.write("sparsity", **record)
        return stopping > 0

    def _forward_backward(self, step: int) -> float:
        """Accumulate gradients over micro-batches and average them over ranks; return the mean loss."""
        config, total = self.recipe.train, 0.0
        for first in range(0, config.batch, config.batch // config.accumulate):
            clips = slice(first + self.local_clips.start, first + self.local_clips.stop)
            loss = self._loss(step, clips) / config.accumulate
            loss.backward()
            total += loss.item()
        self.mesh.average_gradients(self.model)
        return total

    def _loss(self, step: int, clips: slice) -> Tensor:
        """Return the loss of some clips of a step; noise is drawn on the CPU, for the same bits anywhere."""
        config, first = self.recipe.train, (step - 1) * self.recipe.train.batch
        video, words = (x.to(self.device) for x in self.clips.of_step(step, clips))
        batches = [
            flow.add_noise(
                video[i : i + 1], words[i : i + 1], drop=config.drop, logit_mean=config.logit_mean,
                generator=flow.generator(config.seed, first + clips.start + i),
            )
            for i in range(len(video))
        ]  # fmt: skip
        batch = flow.NoisedBatch(*(torch.cat(field) for field in zip(*batches, strict=True)))
        is_bfloat16 = config.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16) if is_bfloat16 else nullcontext():
            return flow.weighted_loss(self.model, batch, video, config.edges).mean()

    @property
    def tokens(self) -> int:
        t, h, w = self.config.grid(self.config.video)
        return self.config.length + t * h * w

    def _model_config(self) -> DiTConfig:
        recipe, (clip, _) = self.recipe, self.clips.load(self.clips.indices(1)[:1])
        frames, channels, height, width = clip.shape[1:]
        sizes = {name: size for name, size in vars(recipe.model).items() if name != "start"}
        up, vocabulary = recipe.model.upscale, self.clips.vocabulary
        sizes |= {"channels": channels, "video": (frames, height * up, width * up)}
        sizes |= {"shift": math.exp(recipe.train.logit_mean), "pixels": recipe.data.set != "latents"}
        return DiTConfig(words=len(vocabulary.words), length=vocabulary.length, **sizes)

    def _make_model(self) -> VideoDiT:
        torch.manual_seed(self.recipe.train.seed)  # the same weights on all ranks, before they are sharded
        model, start = VideoDiT(self.config), self.recipe.model.start
        if start:
            if not is_own(Path(start)):
                raise InputError(f"{start} has no model of weft's own.", hint="Give the model/ of a run.")
            weights = VideoPipeline.load(start, complete=False).transformer.state_dict()
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                raise InputError(
                    f"The model in {start} has other sizes than the recipe: {error}",
                    hint="Copy [model] from the recipe that made it.",
                ) from error
        return model

    def _make_sparse(self) -> DSV | None:
        if self.recipe.sparse is None:
            return None
        from weft.train.dsv import DSV

        config = self.config
        sparse = DSV(
            self.recipe.sparse, heads=config.heads, width=config.width, depth=config.depth,
            seed=self.recipe.train.seed, device=self.device,
        )  # fmt: skip
        sparse.prepare(self.model)
        return sparse

    def state(self) -> dict[str, Any]:
        """Return all state that the next step depends on, by the names that checkpoints have always had."""
        return {
            "step": self.done,
            "model": dict(self.model.named_parameters()),
            "average": self.ema,
            "optimiser": get_optimizer_state_dict(self.model, self.optimizers),
            "sparse": {} if self.sparse is None else self.sparse.state_dict(),
        }

    def _begin(self) -> None:
        """Resume from the last checkpoint of the same recipe, if there is one."""
        self._write_recipe()
        resumed = self.checkpoints.latest()
        if resumed is not None:
            state = self.state()
            groups = state["optimiser"]["param_groups"]
            self.checkpoints.load(resumed, state)
            state["optimiser"]["param_groups"] = groups  # the recipe's, whatever the file has
            set_model_state_dict(self.model, state["model"])
            set_optimizer_state_dict(self.model, self.optimizers, state["optimiser"])
            if self.sparse is not None:
                self.sparse.load_state_dict(state["sparse"])
            self.done = resumed
        if self.journal is not None:
            self.journal.rewind(self.done)
        count = sum(weight.numel() for weight in self.model.parameters())
        self.write(
            "run", recipe=self.recipe.to_json(), ranks=self.mesh.size, sequence=self.mesh.sequence,
            threads=torch.get_num_threads(), torch=torch.__version__, weft=__version__, parameters=count,
            resumed=resumed,
        )  # fmt: skip
        self._note_skipped()
        if missing := artifacts.left_out(self.recipe):
            self.note(
                f"model/ is saved without {missing}: other runs can start from it, generate cannot use it"
            )

    def _write_recipe(self) -> None:
        """Check the recipe against the run's own, if there is one, and store it."""
        file, digest = self.folder / "recipe.json", getattr(self.clips.source, "digest", None)
        clips = {"digest": digest} if digest else {}
        if file.exists():
            check_same(file, self.recipe, clips)
        if self.mesh.rank:
            return  # every rank checks, so that every rank raises
        recipe = self.recipe.to_json() | ({"clips": clips} if clips else {})
        with whole(file) as temporary:
            temporary.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")

    def _note_skipped(self) -> None:
        """Note newly skipped clips; some fail only when they are decoded."""
        skipped = getattr(self.clips.source, "skipped", [])[self._num_skipped_noted :]
        if skipped:
            self._num_skipped_noted += len(skipped)
            self.note(summarize_skipped(skipped))

    def write(self, kind: str, **values: Any) -> None:
        if self.journal is not None:
            self.journal.write(kind, self.done, **values)

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def close(self) -> None:
        self.clips.close()
        if self.journal is not None:
            self.journal.close()
