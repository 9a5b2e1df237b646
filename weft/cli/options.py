"""Options that several verbs share, and groups of options that are one parameter of a verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from weft.core.backends import BACKENDS, check_backend
from weft.core.errors import InputError
from weft.core.problem import check_dtype
from weft.generate.cache_spec import parse_cache
from weft.simulate.models import MODELS


def flatten(run: Callable[..., object]) -> Callable[..., object]:
    """Return `run` with the options of its groups as parameters of their own, as typer reads them.

    A group is a dataclass whose fields are annotated as options.
    """
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(run, include_extras=True)
    for name, parameter in signature(run).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        groups[name] = hints[name]
        of_group = get_type_hints(hints[name], include_extras=True)
        for field in fields(groups[name]):
            option = Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
            parameters.append(option.replace(annotation=of_group[field.name]))

    def flat(**options: Any) -> object:
        made = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return run(**made, **options)

    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__doc__ = run.__doc__
    return flat


def at_least(least: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Return a callback that validates a number while options are parsed, before anything is started."""

    def check(option: typer.CallbackParam, number: int | None) -> int | None:
        if number is not None and number < least:
            raise InputError(f"{option.opts[0]} must be >= {least}, got {number}.")
        return number

    return check


def checked_backend(name: str) -> str:
    """Validate the backend while options are parsed, before torch is imported or a rank is started."""
    if name:
        check_backend(name)
    return name


def checked_dtype(name: str) -> str:
    if name:
        check_dtype(name)
    return name


def checked_cache(text: str | None) -> str | None:
    if text is not None:
        parse_cache(text)
    return text


Name = Annotated[
    str,
    typer.Argument(
        help=f"One of {', '.join(MODELS)}; or a shape TOKENSxHEADSxDIM, whose tokens may be TxHxW.",
        autocompletion=lambda: list(MODELS),
    ),
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
Ranks = Annotated[int, typer.Option(help="Ranks to start on this machine.", callback=at_least(1))]
RanksHere = Annotated[
    int,
    typer.Option(help="Ranks to start here; under torchrun its world is used.", callback=at_least(1)),
]
Cache = Annotated[
    str | None,
    typer.Option(
        help="Step cache: first-block:0.08, pab:2, taylorseer:5.",
        metavar="NAME:NUMBER",
        callback=checked_cache,
    ),
]
PlanName = Annotated[str, typer.Option(help="How attention is split; see weft plan.")]
Sparse = Annotated[str | None, typer.Option(help="Sparse attention: sta, svg, radial, topk:0.2.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
