"""Models and what they are held against: one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.stdit import AxialBlock
from tests.threads import run_threads
from weft.run.world import World
from weft.switching.stages import Stages, stages

DIMS = "batch time space channel"
TURNS = {"blocks.*.spatial": "space", "blocks.*.temporal": "time"}


def seeded(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Random weights everywhere: gates that begin at 0 would hide what is behind them."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 / max(1, parameter.shape[-1]) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * scale)
    return model.to(dtype)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Video(nn.Module):
    """[B, T, S, C] through blocks within frames and through time."""

    def __init__(self, width: int = 6, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"spatial": AxialBlock(width, heads, 2), "temporal": AxialBlock(width, heads, 1)})
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = layer["temporal"](layer["spatial"](x))  # pyright: ignore
        return self.head(x)


class AxialForecast(nn.Module):
    """Fields [B, lat, lon, level, variables] → the same some hours later."""

    GRID = ("lat", "lon", "level")

    def __init__(self, variables: int, *, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(variables, width), nn.Linear(width, variables)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: AxialBlock(width, heads, dim) for dim, name in enumerate(self.GRID, 1)})
            for _ in range(depth)
        )

    def shard(self, mesh: Any = None) -> Stages:
        declared = {f"blocks.*.{name}": name for name in self.GRID}
        return stages(self, declared, dims=" ".join(("batch", *self.GRID, "channel")), mesh=mesh)

    def forward(self, fields: Tensor) -> Tensor:
        x = self.embed(fields)
        for layer in self.blocks:
            for block in layer.values():  # pyright: ignore[reportCallIssue]
                x = block(x)
        return fields + self.head(x)


def step(model: nn.Module, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of a loss that every rank computes alike."""
    out = model(*inputs)
    loss = (out * normal(*out.shape, seed=7, dtype=out.dtype)).sum()
    return out.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def on_ranks(ranks: int, job: Callable[[World], Any], timeout: float = 20.0) -> list[Any]:
    return run_threads(ranks, lambda comm: job(World(comm)), timeout=timeout)


def check(
    expected: tuple[Tensor, list[Tensor]], answers: list[tuple[Tensor, list[Tensor]]], tolerance: float
) -> None:
    """Outputs of all ranks, and the mean of their gradients, against one process."""
    out, grads = expected
    for found, _ in answers:
        assert (found - out).abs().max() <= tolerance * out.abs().max()
    for by_rank, grad in zip(zip(*(g for _, g in answers), strict=True), grads, strict=True):
        mean = torch.stack(by_rank).mean(0)
        assert (mean - grad).abs().max() <= tolerance * max(grad.abs().max().item(), 1e-3)
