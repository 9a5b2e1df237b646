"""Options that several verbs have, each with the same words everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[
    str, typer.Argument(help="A model (wan2.1-14b …), or a shape TOKENSxHEADSxDIM; tokens may be TxHxW.")
]
Cluster = Annotated[str, typer.Option(help="8xh100, 4x8xa100, or a TOML of weft calibrate.")]
Mask = Annotated[str, typer.Option(help="dense, svg:density=0.25, sta:…, random:…; see weft mask.")]
Size = Annotated[str, typer.Option(help="Pixels, such as 1280x720; the model's own if left out.")]
Frames = Annotated[int, typer.Option(help="Frames of the video; the model's own if 0.")]
Block = Annotated[int, typer.Option(help="Tokens in a block of the mask.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadDim = Annotated[int, typer.Option(help="Size of one head.")]
Dtype = Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
