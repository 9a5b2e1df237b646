"""Models of audio, whose blocks have one sequence."""

from __future__ import annotations

from dataclasses import replace

from weft.diffusers.adapters.sequences import ROTARY, SEQUENCE, sequence

ADAPTERS = (
    sequence("MiniMaxMusic3Transformer1DModel", "transformer_blocks", "attn", rotary_emb=ROTARY),
    replace(
        sequence("StableAudioDiTModel", "transformer_blocks", "attn1", rotary_embedding=ROTARY),
        local=("transformer_blocks.*.attn2",),
    ),
    replace(
        sequence("AceStepTransformer1DModel", "layers", "self_attn", position_embeddings=ROTARY),
        local=("layers.*.cross_attn",),
    ),
    replace(
        sequence("StableAudio3DiTModel", "transformer_blocks", "self_attn", rope=ROTARY),
        local=("transformer_blocks.*.cross_attn",),
        note="without local conditions",
    ),
    replace(
        sequence("LongCatAudioDiTTransformer", "blocks", "self_attn", rope=ROTARY, mask=SEQUENCE),
        local=("blocks.*.cross_attn",),
    ),
)
