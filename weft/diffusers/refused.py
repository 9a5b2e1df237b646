"""The transformers of Diffusers that weft does not split, each with the reason."""

from __future__ import annotations

UNET_PART = "is a part of a UNet, which calls it for each of its resolutions: there is no sequence to split"
LANGUAGE = "decodes one token after another: there is no denoising step to split"
CONVOLUTION = "mixes neighboring tokens by a convolution in every block: tokens cannot be computed apart"
NO_ADAPTER = "has no adapter yet"

REFUSED = {
    "AnyFlowFARTransformer3DModel": NO_ADAPTER,
    "BriaFibo2Transformer2DModel": NO_ADAPTER,
    "ConsisIDTransformer3DModel": NO_ADAPTER,
    "Kandinsky6SRTransformer3DModel": NO_ADAPTER,
    "MotifVideoTransformer3DModel": NO_ADAPTER,
    "NucleusMoEImageTransformer2DModel": NO_ADAPTER,
    "SanaTransformer2DModel": CONVOLUTION,
    "SanaVideoTransformer3DModel": CONVOLUTION,
    "SanaWMLTX2RefinerTransformer3DModel": NO_ADAPTER,
    "SanaWMTransformer3DModel": CONVOLUTION,
    "DualTransformer2DModel": UNET_PART,
    "DreamLiteTransformer2DModel": UNET_PART,
    "Transformer2DModel": UNET_PART,
    "TransformerTemporalModel": UNET_PART,
    "PriorTransformer": "predicts one embedding from 80 tokens: there is nothing to gain",
    "T5FilmDecoder": "decodes spectrograms of a fixed 256 frames with an attention of its own",
    "MiniMaxMusic3RVQDepthDecoder": LANGUAGE,
    "RFD4ProteinaTransformer": "attends with a bias for each pair of residues, computed from all pairs",
}
"""By class: what follows "weft does not split a …, which"."""
