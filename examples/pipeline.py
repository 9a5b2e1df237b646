"""Run a Diffusers pipeline on several ranks.

weft run examples/pipeline.py --ranks 2 -- ./Wan2.1-T2V-1.3B-Diffusers "a loom at work" loom.gif 81 480 832
"""

import sys

import torch
from diffusers import DiffusionPipeline

import weft

folder, prompt, output = sys.argv[1:4]
frames, height, width = map(int, sys.argv[4:7])
device = weft.device()  # the GPU of this rank; the CPU if there is none
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype).to(device)
pipe = weft.parallelize(pipe)  # the same line on every rank

generator = torch.Generator(device).manual_seed(7)
video = pipe(prompt, num_frames=frames, height=height, width=width, generator=generator, output_type="pil")

rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
if rank == 0:  # every rank has the whole result
    first, *others = video.frames[0]
    first.save(output, save_all=True, append_images=others)
    print(weft.explain(pipe))
