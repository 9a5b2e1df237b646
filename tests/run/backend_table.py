"""The table of what `auto` takes on each GPU, as Markdown, out of the data that decides it.

    python -m tests.run.backend_table docs/kernels_gpu.md

writes it between the marks of that file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from weft.run.kernels.choice import Choice, GpuPlatform, decide
from weft.run.kernels.rules import ARCHITECTURES, KernelSpec

MARKS = "<!-- choice: begin -->", "<!-- choice: end -->"
HEAD_DIMS = (40, 64, 72, 96, 128, 192, 256)
BLOCKS = (16, 64, 128)
BARE = frozenset({"cudnn", "triton"})
"""What comes with torch."""
FULL = BARE | {"fa4", "cudnn_sparse"}

WHY = {
    "fa4": "the fastest dense kernel where it is installed; sparse where its block rules fit",
    "flash": "in torch, with log-sum-exp, on every GPU",
    "cudnn": "in torch; it has the matrix instructions of sm_90 and sm_100, torch's flash has not",
    "cudnn_sparse": "block-sparse with the matrix instructions of sm_90 and sm_100",
    "triton": "weft's own block-sparse kernels",
    "gather": "no block-sparse kernel fits: rows are gathered for torch's flash attention",
    "exact": "float32 or float64 operands, or a GPU that no 16-bit backend serves",
}


def works(head_dim: int) -> Iterator[KernelSpec]:
    """Dense, and sparse in blocks of each size; forward and backward."""
    for block, backward in product((0, *BLOCKS), (False, True)):
        yield KernelSpec(bool(block), backward, head_dim, block_q=block, block_k=block)


def cells() -> Iterator[tuple[KernelSpec, GpuPlatform, Choice]]:
    """Every choice of the table."""
    for arch, installed, head_dim in product(ARCHITECTURES, (BARE, FULL), HEAD_DIMS):
        for work in works(head_dim):
            machine = GpuPlatform(arch, installed)
            yield work, machine, decide(work, machine)


def table() -> str:
    """Markdown; architectures and head dims that are alike share a row."""
    rows: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for arch in ARCHITECTURES:
        alike: dict[tuple[str, ...], list[int]] = {}
        for head_dim in HEAD_DIMS:
            found = [
                decide(work, GpuPlatform(arch, installed)).backend
                for installed in (BARE, FULL)
                for work in works(head_dim)
            ]
            alike.setdefault(tuple(found), []).append(head_dim)
        for names, head_dims in alike.items():
            rows.setdefault((*names, str(head_dims)), {})[arch] = head_dims
    kinds = ("dense", *(f"sparse {block}" for block in BLOCKS))
    heads = ["GPU", "head dim", *kinds, *(f"{kind}, packages" for kind in kinds)]
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for (*names, _), archs in rows.items():
        pairs = [_pair(*names[at : at + 2]) for at in range(0, len(names), 2)]
        head_dims = ", ".join(str(each) for each in next(iter(archs.values())))
        lines.append(_line([", ".join(archs), head_dims, *pairs]))
    return "\n".join(lines)


def _pair(forward: str, backward: str) -> str:
    return f"`{forward}`" if forward == backward else f"`{forward}` / `{backward}`"


def _line(values: list[str]) -> str:
    return f"| {' | '.join(values)} |"


def main(path: str) -> None:
    """Put the table between the marks of a file."""
    file = Path(path)
    before, _, rest = file.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    file.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
