"""The tables of bench.quality: arms over their seeds, against dense in pairs, and what each layer needed."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.rows import Results, Row, write_json
from bench.rows import show as show_rows
from weft.report import training
from weft.video.checker import Accuracy
from weft.video.evaluation import TIMESTEPS, paired_difference
from weft.video.metrics import features, frechet, psnr, ssim
from weft.video.pan import Pan

MARGIN = 0.01
"""By how much of dense's held-out loss another's may be above it. Declared before the first run."""
MEAN = 1.0
"""Of the runs' logit-normal timesteps: what a camera does shows through much noise."""
DENSE, DSV = "dense", "dsv"
MEASURED = ("density", "sparsity", "coverage", "recall", "keys")
"""By layer; `keys` is the mass of as many predicted keys as are critical, over the mass asked for."""


@dataclass(frozen=True)
class Result:
    """One run."""

    arm: str
    seed: int
    loss: np.ndarray
    right: int
    total: int
    parts: dict[str, list[int]]
    steady: float
    camera: list[float]
    layers: list[dict[str, Any]]
    cpu: float | None
    """Seconds of training, if it was in one go."""
    clips: np.ndarray

    @property
    def density(self) -> float:
        """The mean over layers and heads, of the second half of the run."""
        return float(np.mean([layer["density"] for layer in self.layers]))


def as_trained(loss: np.ndarray) -> np.ndarray:
    """[..., timesteps] by how often training meets each of them.

    Of the plain mean, which was declared, the timestep 0.1 has two fifths and nearly all of the spread from
    run to run, though three of a thousand in training are near it. This says what was learned.
    """
    t = np.array(TIMESTEPS)
    share = np.exp(-((np.log(t / (1 - t)) - MEAN) ** 2) / 2) / (t * (1 - t)) * np.gradient(t)
    return loss @ (share / share.sum())


def read(out: Path, steps: int) -> list[Result]:
    """The runs of so many steps that have ended."""
    file = out / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    results: list[Result] = []
    for record in (record for record in lines if record.pop("steps") == steps):
        clips = np.load(out / f"{record['arm']}-{record['seed']}" / "clips.npy")
        results.append(Result(**{**record, "loss": np.array(record["loss"])}, clips=clips))
    return results


def density_of(folder: Path, steps: int) -> dict[str, Any]:
    """By layer, from a run's log: the means of the second half of its steps."""
    layers: list[dict[str, Any]] = []
    for readings in training.read(folder).layers.values():
        late = [one for one in readings if one.step > steps // 2]
        means = {name: _mean([getattr(one, name) for one in late]) for name in MEASURED}
        layers.append({**means, "sparse": float(np.mean([one.sparse for one in late]))})
    return {"layers": layers}


def _mean(values: Sequence[Any]) -> Any:
    known = [value for value in values if np.isfinite(value).all()]
    return np.round(np.mean(known, axis=0), 4).tolist() if known else None


def show(out: Path, steps: int, pan: Pan, console: Console, options: Namespace) -> bool:
    """Print what there is; whether DSV holds what was declared."""
    results = read(out, steps)
    by_arm = {arm: [r for r in results if r.arm == arm] for arm in dict.fromkeys(r.arm for r in results)}
    if DENSE not in by_arm:
        console.print(f"no dense run of {steps} steps in {out}")
        return False
    for table in (_losses(by_arm), _samples(by_arm, pan), _layers(by_arm)):
        console.print(table)
    report = Results(_rows(by_arm))
    show_rows(report, console)
    if options.json:
        write_json(report, options.json, quick=options.quick)
    return all(row.holds for row in report.rows)


def _same_seeds(arm: Sequence[Result], dense: Sequence[Result]) -> list[tuple[Result, Result]]:
    by_seed = {r.seed: r for r in dense}
    return [(by_seed[r.seed], r) for r in sorted(arm, key=lambda r: r.seed) if r.seed in by_seed]


def _differences(arm: Sequence[Result], dense: Sequence[Result]) -> tuple[Any, Any]:
    """Of the mean over timesteps, and of that by their share in training."""
    pairs = _same_seeds(arm, dense)
    losses = [np.stack([pair[side].loss for pair in pairs]) for side in (0, 1)]
    return paired_difference(*losses), paired_difference(*map(as_trained, losses))


def _accuracy(arm: Sequence[Result], kind: str | None = None) -> Accuracy:
    """Over all seeds."""
    counts = [(r.right, r.total) if kind is None else tuple(r.parts[kind]) for r in arm]
    right, total = np.sum(counts, axis=0).tolist()
    return Accuracy(right, total)


def _losses(by_arm: dict[str, list[Result]]) -> Table:
    against = "over dense, in pairs"
    table = Table(
        "arm", "seeds", "density", "held-out loss", against, "as trained", against, "camera off", "CPU s"
    )
    for arm, runs in by_arm.items():
        cpu = [r.cpu for r in runs if r.cpu]
        losses = [r.loss.mean() for r in runs], [as_trained(r.loss).mean() for r in runs]
        over = ("", "") if arm == DENSE else map(str, _differences(runs, by_arm[DENSE]))
        texts = [f"{np.mean(loss):.4f} ± {np.std(loss, ddof=len(loss) > 1):.4f}" for loss in losses]
        table.add_row(
            arm, str(len(runs)), f"{np.mean([r.density for r in runs]):.2f}",
            *(cell for pair in zip(texts, over, strict=True) for cell in pair),
            f"{np.mean([r.camera for r in runs]):.2f} px", f"{np.mean(cpu):.0f}" if cpu else "",
        )  # fmt: skip
    table.caption = (
        "± over seeds; intervals over seeds and clips; as trained: timesteps by their share in training; "
        "camera as recovered from noise; CPU of training."
    )
    return table


def _samples(by_arm: dict[str, list[Result]], pan: Pan) -> Table:
    dense, parts = by_arm[DENSE], list(by_arm[DENSE][0].parts)
    count = sum(len(r.clips) for r in dense)
    real = features(pan.batch(range(1000, 1000 + 2 * count))[0])
    table = Table("arm", "prompts right", *parts, "steady", "Fréchet", "to dense")
    for arm, runs in by_arm.items():
        shown, pairs = _accuracy(runs), _same_seeds(runs, dense)
        both = [np.concatenate([pair[side].clips for pair in pairs]) for side in (0, 1)]
        made = features(np.concatenate([r.clips for r in runs]))
        table.add_row(
            arm, f"{shown.right}/{shown.total} ({shown.low:.0%} to {shown.high:.0%})",
            *(f"{each.right / each.total:.0%}" for each in (_accuracy(runs, kind) for kind in parts)),
            f"{np.mean([r.steady for r in runs]):.1f} dB", f"{frechet(made, real[: len(made)]):.2f}",
            "" if arm == DENSE else f"{psnr(*both).clip(max=100).mean():.1f} dB, {ssim(*both).mean():.2f}",
        )  # fmt: skip
    floor = frechet(real[:count], real[count:])
    table.caption = (
        "Clips of all seeds; 95 % intervals. Steady: a frame against the last one, moved as the camera. "
        f"Fréchet distance on random features, of {count} clips; of as many real ones {floor:.2f}. "
        "To dense: PSNR, SSIM at the same seed and prompt."
    )
    return table


def _layers(by_arm: dict[str, list[Result]]) -> Table:
    depth = max(len(r.layers) for runs in by_arm.values() for r in runs)
    table = Table("arm", "", *(f"layer {layer}" for layer in range(depth)))
    for arm, runs in by_arm.items():
        for name in MEASURED:
            cells = [_cell([r.layers[at][name] for r in runs]) for at in range(depth)]
            if any(cells):
                table.add_row("" if name != "density" else arm, name, *cells)
    table.caption = (
        "Means of the second half of the steps, over seeds; in brackets from head to head. "
        "Keys: the mass of as many predicted keys as are critical, of what is asked for."
    )
    return table


def _cell(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = np.mean(known, axis=0)
    spread = f" ({np.min(mean):.2f}-{np.max(mean):.2f})" if np.ptp(mean) > 0.005 else ""
    return f"{np.mean(mean):.2f}{spread}"


def _rows(by_arm: dict[str, list[Result]]) -> list[Row]:
    if DSV not in by_arm:
        return []
    dense, dsv = by_arm[DENSE], by_arm[DSV]
    (over, trained), ours, theirs = _differences(dsv, dense), _accuracy(dsv), _accuracy(dense)
    loss = {"unit": "%", "peer": 0.0, "peer_name": DENSE, "limit": None, "bar": f"at most +{MARGIN:.0%}"}
    share = 100 * ours.right / ours.total
    return [
        Row(case="held-out loss over dense", measured=100 * over.mean, holds=over.mean <= MARGIN, **loss),
        Row(case="upper end of its interval", measured=100 * over.high, holds=over.high <= MARGIN, **loss),
        Row(
            case="the same, timesteps as trained", measured=100 * trained.mean,
            holds=trained.mean <= MARGIN, **loss,
        ),
        Row(
            case="upper end of that interval", measured=100 * trained.high,
            holds=trained.high <= MARGIN, **loss,
        ),
        Row(
            case="prompts right", measured=share, unit="%", peer=100 * theirs.right / theirs.total,
            peer_name=DENSE, limit=None, bar=f"at least {theirs.low:.1%}, as dense's interval",
            holds=share >= 100 * theirs.low,
        ),
    ]  # fmt: skip
