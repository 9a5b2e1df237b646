"""Run a Diffusers video pipeline with block-sparse attention, balanced over the ranks.

weft run examples/sparse_pipeline.py --ranks 2 -- ./Wan2.1-T2V-1.3B-Diffusers "a loom at work" 81 480 832
"""

import sys

import torch
from diffusers import DiffusionPipeline

import weft

folder, prompt = sys.argv[1:3]
frames, height, width = map(int, sys.argv[3:6])
device = weft.device()
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype).to(device)

# The fifth of the blocks with the highest scores, from the second step on. They change from step to step;
# weft plans beside the run, so that ranks stay balanced without waiting for a plan.
pipe = weft.parallelize(pipe, sparse="topk:0.2,dense_steps=1", check="first")

generator = torch.Generator(device).manual_seed(7)
pipe(prompt, num_frames=frames, height=height, width=width, generator=generator, output_type="latent")
if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    print(weft.explain(pipe))  # the plan of each layer, why, and how even it was
