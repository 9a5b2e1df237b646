"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.core.backends import BACKENDS, check_backend
from weft.core.problem import check_dtype


def checked_backend(name: str) -> str:
    """Validate the backend while options are parsed, before torch is imported or a rank is started."""
    if name:
        check_backend(name)
    return name


def checked_dtype(name: str) -> str:
    if name:
        check_dtype(name)
    return name


Name = Annotated[
    str, typer.Argument(help="A model (wan2.1-14b …), or a shape TOKENSxHEADSxDIM; tokens may be TxHxW.")
]
Cluster = Annotated[str, typer.Option(help="8xh100, 4x8xa100, 8xh100:fa4, or a TOML of weft calibrate.")]
Mask = Annotated[str, typer.Option(help="dense, svg:density=0.25, sta:…, random:…; see weft mask.")]
Size = Annotated[str, typer.Option(help="Pixels, such as 1280x720; the model's own if left out.")]
Frames = Annotated[int, typer.Option(help="Frames of the video; the model's own if 0.")]
Block = Annotated[int, typer.Option(help="Tokens in a block of the mask.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadDim = Annotated[int, typer.Option(help="Size of one head.")]
Backend = Annotated[
    str,
    typer.Option(help=f"Attention kernel: {', '.join(BACKENDS)}.", metavar="NAME", callback=checked_backend),
]
Dtype = Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.", callback=checked_dtype)]
DeviceDtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16; by default bfloat16 on GPUs, float32 on CPUs.",
        callback=checked_dtype,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
