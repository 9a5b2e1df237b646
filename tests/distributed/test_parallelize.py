"""Wrong use of `weft.parallelize` raises a sentence on every rank, and leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import weft  # noqa: E402
from tests.diffusers.checkpoints import TINY  # noqa: E402
from tests.distributed.jobs import Worlds  # noqa: E402
from tests.distributed.pipelines import Case, call, changes, look, pipeline  # noqa: E402
from weft.core.errors import InputError  # noqa: E402


def _twice() -> None:
    weft.parallelize(pipeline("wan"))
    weft.parallelize(pipeline("wan"))


def _inner_after_outer() -> None:
    weft.parallelize(pipeline("wan"))
    weft.parallelize(pipeline("wan").transformer)


def _outer_after_inner() -> None:
    weft.parallelize(pipeline("wan").transformer)
    weft.parallelize(pipeline("wan"))


def _under_diffusers() -> None:
    pipe = TINY["flux"]()
    config = diffusers.ContextParallelConfig(ring_degree=dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:  # it counts GPUs, and divides by them
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        pipe.transformer.enable_parallelism(config=config)
    weft.parallelize(pipe)


def _own_processor() -> None:
    from diffusers.models.attention_processor import AttnProcessor

    attention = pipeline("allegro").transformer.transformer_blocks[1].attn1
    before = attention.processor
    attention.processor = AttnProcessor()
    try:
        weft.parallelize(pipeline("allegro"))
    finally:
        attention.processor = before


def _unknown() -> None:
    weft.parallelize(torch.nn.TransformerEncoderLayer(8, 2))


def _unet() -> None:
    unet = diffusers.UNet2DModel(
        block_out_channels=(4, 4), norm_num_groups=2, layers_per_block=1, sample_size=8,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    weft.parallelize(diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()))


def _cached() -> None:
    pipe = TINY["flux"]()  # its hooks stay
    pipe.transformer.enable_cache(diffusers.SeaCacheConfig())
    weft.parallelize(pipe)
    call(pipe, "flux", Case())


def _options(**options: Any) -> Callable[[], None]:
    def wrong() -> None:
        pipe = pipeline("wan")
        weft.parallelize(pipe, **options)
        call(pipe, "wan", Case())

    return wrong


WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "twice": (_twice, "This WanPipeline is parallelized already.*weft.restore it first"),
    "its transformer": (_inner_after_outer, "This WanTransformer3DModel is parallelized already"),
    "its pipeline": (_outer_after_inner, "This WanTransformer3DModel is parallelized already"),
    "Diffusers' own": (
        _under_diffusers,
        "Diffusers' own parallelism is enabled.*instead of enable_parallelism",
    ),
    "a processor": (
        _own_processor,
        "transformer_blocks.1.attn1 has a AttnProcessor, which computes attention by",
    ),
    "a model": (_unknown, r"no adapter for a TransformerEncoderLayer.*adapter=weft.Adapter\("),
    "a UNet": (_unet, "A DDPMPipeline has no transformer; its parts are unet"),
    "a thing": (lambda: weft.parallelize(3), "weft.parallelize needs a Diffusers pipeline.*got a int"),
    "restored": (lambda: weft.restore(pipeline("wan")), "This WanPipeline is not parallelized"),
    "a cache": (
        _cached,
        "A SeaCacheRootHook is on a FluxTransformer2DModel: this cache decides by frequencies.*disable_cache",
    ),
    "cfg": (_options(cfg="yes"), "cfg must be one of auto, on, off, got 'yes'"),
    "check": (_options(check="all"), "check must be one of always, first, none, got 'all'"),
    "a plan": (_options(plan="rign"), "rign"),
    "a mask": (_options(sparse="stta"), "stta"),
    "a share": (_options(sparse="topk:much"), "topk:much cannot be parsed"),
    "a mask's type": (_options(sparse=3), "sparse must be a name, a BlockMask or an object.*got a int"),
    "a mesh": (_options(mesh="all"), "mesh='all' is a str"),
}
ODD = "cfg='on' needs two halves of the ranks, of which there are 3.*Start 2 or 4 ranks"


def refused(what: str) -> tuple[str, list[str]]:
    """What was said, and what is not as it was."""
    wrong = WRONG[what][0] if what in WRONG else _options(cfg="on")
    pipes = [pipeline(name) for name in ("wan", "flux", "allegro")]
    before = [look(pipe) for pipe in pipes]
    try:
        wrong()
        said = "nothing"
    except InputError as error:
        said = str(error)
    for pipe in pipes:
        for each in (pipe, pipe.transformer):
            if hasattr(each, "_weft"):
                weft.restore(each)
    left = [change for pipe, seen in zip(pipes, before, strict=True) for change in changes(seen, look(pipe))]
    return said.replace("\n", " "), left


@pytest.mark.parametrize("what", [*WRONG, "odd ranks"])
def test_wrong_use_raises_a_sentence_on_every_rank(worlds: Worlds, what: str) -> None:
    for said, left in worlds(3).run(refused, what):
        assert left == []
        assert re.search(WRONG[what][1] if what in WRONG else ODD, said), said


def test_one_rank_of_several_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a script makes a process group of its own."""
    store: Any = vars(dist)["HashStore"]()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    try:
        with pytest.raises(
            InputError, match="started as one of several ranks, but its process group has one"
        ):
            weft.parallelize(pipeline("wan"))
    finally:
        dist.destroy_process_group()
    assert not hasattr(pipeline("wan"), "_weft")
