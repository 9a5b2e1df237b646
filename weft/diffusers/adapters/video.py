"""weft's own video transformer."""

from __future__ import annotations

from weft.diffusers.adapter import Adapter, Shard

ADAPTERS = (
    Adapter(
        "VideoDiT",
        inputs={"embed": {"input": Shard("video", 1)}},
        outputs={"text": (Shard("text", 1), None), "rope": Shard("video", 0)},
        attention={"blocks.*.attn": "text video"},
        gather={"head": Shard("video", 1)},
        grid=lambda model, arguments: model.grid(arguments["video"]),
        note="weft's own",
        replicated=frozenset({"video", "timestep", "words"}),
    ),
)
