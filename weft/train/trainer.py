"""Trainer: a recipe to a model, on the ranks there are.

    train(Recipe.load("recipe.toml"), Path("runs/shapes"))

A run's folder has recipe.json, log.jsonl, checkpoints/, samples/ and model/, which `weft generate` takes. A
run that finds checkpoints there goes on from the last good one. What a step does depends on the recipe and
its number only: clips, timesteps and noise are those of a clip's number, on any number of ranks.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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
from weft.models import checkpoint, flow
from weft.models.dit import DiTConfig, VideoDiT
from weft.models.parallelize import parallelize
from weft.models.video import VideoPipeline
from weft.run.devices import device
from weft.train import results
from weft.train.checkpoints import Checkpoints
from weft.train.data import Captions, Clips, generator, source_of
from weft.train.folder import told
from weft.train.journal import Journal
from weft.train.optimise import follow, optimisers, rate
from weft.train.ranks import Ranks, full, local
from weft.train.recipe import Recipe
from weft.train.refusals import check_same, diverged, fitting, reading
from weft.train.stop import Stop


def train(recipe: Recipe, folder: Path, *, live: bool = True) -> int:
    """Run on every rank, until the recipe's last step or until told to stop; the step that was reached."""
    with fitting():
        trainer = Trainer(recipe, folder, live=live)
        try:
            return trainer.run()
        finally:
            trainer.close()


class Trainer:
    """Model, optimiser, average and clips; one `step` after the other."""

    def __init__(self, recipe: Recipe, folder: Path, *, live: bool = True) -> None:
        self.recipe, self.folder, part = recipe, folder, recipe.train
        self.ranks = ranks = Ranks.of(recipe.parallel.sequence)
        self.mine = ranks.part(part.batch // part.accumulate)
        self.stop = Stop()
        source = source_of(recipe)
        self.captions = Captions.of(source)
        self.clips = Clips(
            source, batch=part.batch, held_out=recipe.data.held_out, seed=part.seed,
            encode=self.captions.encode, shrink=recipe.model.upscale,
        )  # fmt: skip
        self.device = device()
        self.config = self._config()
        self.model = self._model().to(self.device)
        self.sparse = self._sparse()
        if part.checkpointing:
            self.model.enable_gradient_checkpointing()
        if ranks.sequence > 1 or self.sparse is not None:
            plan, backend = recipe.parallel.plan, recipe.parallel.backend
            parallelize(
                self.model, mesh=ranks.sharing, plan=plan, sparse=self.sparse, cfg="off", backend=backend
            )
        if recipe.parallel.shard:
            ranks.shard(self.model, self.model.blocks)
        self.optimisers = optimisers(self.model, part)
        self.average = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.save.keep, tell=self.note)
        self.journal = Journal(folder, total=part.steps, live=live) if ranks.rank == 0 else None
        self.done = self._told = 0

    def run(self) -> int:
        self._begin()
        last, save = self.recipe.train.steps, self.recipe.save
        with self.stop:
            ended = self.journal is not None and self.journal.has("end", self.done)
            if self.done == last and not any(self.ranks.mean([ended])):  # killed after its last checkpoint
                results.export(self)
                self._judge()
            while self.done < last:
                stopping = self._step(self.done + 1)
                final = stopping or self.done == last
                if final or self.done % save.every == 0:
                    self.checkpoints.save(self.done, self.state())
                    results.export(self)
                if stopping and self.done < last:
                    self.note(f"stopped after step {self.done}; the same command goes on from there")
                    break
                self._judge()
            self.checkpoints.finish()
        if self.done == last:
            self.write("end")
        return self.done

    def _judge(self) -> None:
        """What the model has come to, in the steps in which that is asked for, and in the last one."""
        save, last = self.recipe.save, self.done == self.recipe.train.steps
        if save.validate and (last or self.done % save.validate == 0):
            self.write("validation", loss=results.held_out(self))
        if save.samples and (last or self.done % save.samples == 0):
            self.write("sample", file=results.samples(self))

    def _step(self, step: int) -> bool:
        """One step of the optimiser; whether to stop after it."""
        part, began = self.recipe.train, time.perf_counter()
        if self.sparse is not None:
            self.sparse.begin(step)
        loss = self._gradients(step)
        norm = float(full(clip_grad_norm_(self.model.parameters(), part.clip)))
        # Agreed on before anything changes, so that no rank goes on alone.
        loss, stopping = self.ranks.mean([loss, float(self.stop.asked)])
        if not math.isfinite(loss) or not math.isfinite(norm):
            video, _ = self.clips.load(self.clips.indices(step)[self.mine])
            raise diverged(step, loss, norm, video)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate(part, step)
            optimiser.step()
            optimiser.zero_grad()
        if self.sparse is not None:
            self.sparse.step()
        weights = [local(weight) for weight in self.model.parameters()]
        follow([local(x) for x in self.average.values()], weights, part.ema, step)
        self.done = step
        self.write(
            "step", loss=loss, norm=norm, rate=rate(part, step), seconds=time.perf_counter() - began,
            samples=part.batch, tokens=part.batch * self.tokens,
        )  # fmt: skip
        self._tell_skipped()
        for fact in self.sparse.facts() if self.sparse is not None else ():
            self.write("sparsity", **fact)
        return stopping > 0

    def _gradients(self, step: int) -> float:
        """Of the mean loss of this rank's clips of a step, in parts."""
        part, total = self.recipe.train, 0.0
        each = part.batch // part.accumulate
        for at in range(0, part.batch, each):
            mine = slice(at + self.mine.start, at + self.mine.stop)
            loss = self._loss(step, mine) / part.accumulate
            loss.backward()
            total += loss.item()
        self.ranks.average(self.model)
        return total

    def _loss(self, step: int, mine: slice) -> Tensor:
        """Of some of a step's clips. Noise is drawn on the CPU, so that a seed means the same anywhere."""
        part, first = self.recipe.train, (step - 1) * self.recipe.train.batch
        video, words = (x.to(self.device) for x in self.clips.of_step(step, mine))
        given = self._noised(video, words, range(first + mine.start, first + mine.stop))
        lower = part.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16) if lower else nullcontext():
            return flow.weighted(self.model, given, video, part.edges).mean()

    def _noised(self, video: Tensor, words: Tensor, numbers: range) -> flow.Noised:
        part = self.recipe.train
        found = [
            flow.noised(
                video[i : i + 1], words[i : i + 1], drop=part.drop, mean=part.mean,
                generator=generator(part.seed, number),
            )
            for i, number in enumerate(numbers)
        ]  # fmt: skip
        return flow.Noised(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    @property
    def tokens(self) -> int:
        t, h, w = self.config.grid(self.config.video)
        return self.config.length + t * h * w

    def _config(self) -> DiTConfig:
        recipe, (clip, _) = self.recipe, self.clips.load(self.clips.indices(1)[:1])
        frames, channels, height, width = clip.shape[1:]
        sizes = {name: size for name, size in vars(recipe.model).items() if name != "start"}
        up = recipe.model.upscale
        sizes |= {"channels": channels, "video": (frames, height * up, width * up)}
        sizes |= {"shift": math.exp(recipe.train.mean), "pixels": recipe.data.set != "latents"}
        return DiTConfig(words=self.captions.size, length=self.captions.length, **sizes)

    def _model(self) -> VideoDiT:
        torch.manual_seed(self.recipe.train.seed)  # the same weights on all ranks, before they are sharded
        model, start = VideoDiT(self.config), self.recipe.model.start
        if start:
            if not checkpoint.is_own(Path(start)):
                raise InputError(f"{start} has no model of weft's own.", hint="Give the model/ of a run.")
            weights = VideoPipeline.load(start, whole=False).transformer.state_dict()
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                raise InputError(
                    f"The model in {start} has other sizes than the recipe: {error}",
                    hint="Copy [model] from the recipe that made it.",
                ) from error
        return model

    def _sparse(self) -> Any:
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
        """Everything that a step needs of the ones before."""
        return {
            "step": self.done,
            "model": dict(self.model.named_parameters()),
            "average": self.average,
            "optimiser": get_optimizer_state_dict(self.model, self.optimisers),
            "sparse": {} if self.sparse is None else self.sparse.state_dict(),
        }

    def _begin(self) -> None:
        """Go on from the last checkpoint, if there is one, of the same recipe."""
        self._keep_recipe()
        found = self.checkpoints.latest()
        if found is not None:
            state = self.state()
            groups = state["optimiser"]["param_groups"]
            self.checkpoints.load(found, state)
            state["optimiser"]["param_groups"] = groups  # the recipe's, whatever the file has
            set_model_state_dict(self.model, state["model"])
            set_optimizer_state_dict(self.model, self.optimisers, state["optimiser"])
            if self.sparse is not None:
                with reading(f"The state of [sparse] at step {found} of {self.folder}"):
                    self.sparse.load_state_dict(state["sparse"])
            self.done = found
        if self.journal is not None:
            self.journal.rewind(self.done)
        count = sum(weight.numel() for weight in self.model.parameters())
        self.write(
            "run", recipe=self.recipe.to_json(), ranks=self.ranks.size, sequence=self.ranks.sequence,
            threads=torch.get_num_threads(), torch=torch.__version__, weft=__version__, parameters=count,
            resumed=found,
        )  # fmt: skip
        self._tell_skipped()
        if missing := results.left_out(self.recipe):
            self.note(f"model/ will be without {missing}: to begin other runs with, not to generate by")

    def _keep_recipe(self) -> None:
        """What is asked for again must be the same, but for what is LOOSE."""
        file, said = self.folder / "recipe.json", json.loads(json.dumps(self.recipe.to_json()))
        if clips := getattr(self.clips.source, "digest", None):
            said["clips"] = {"digest": clips}
        if file.exists():
            check_same(file, said)
        if self.ranks.rank:
            return  # all have looked, so that all refuse
        with whole(file) as temporary:
            temporary.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

    def _tell_skipped(self) -> None:
        """Clips that cannot be used, as far as they have not been told yet; some break only when decoded."""
        skipped = getattr(self.clips.source, "skipped", [])[self._told :]
        if skipped:
            self._told += len(skipped)
            self.note(told(skipped))

    def write(self, kind: str, **values: Any) -> None:
        if self.journal is not None:
            self.journal.write(kind, self.done, **values)

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def close(self) -> None:
        self.clips.close()
        if self.journal is not None:
            self.journal.close()
