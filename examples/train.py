"""Train a Diffusers transformer with each sample split over all ranks.

weft run examples/train.py --ranks 2
"""

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

import weft

device = weft.device()
torch.manual_seed(0)  # the same weights on every rank; a checkpoint has them as well
model = WanTransformer3DModel(
    num_attention_heads=3, attention_head_dim=12, num_layers=2, ffn_dim=24, text_dim=16, freq_dim=16
).to(device)
model.enable_gradient_checkpointing()
weft.parallelize(model)  # mesh=mesh["sequence"] beside a data dim
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(4):
    # Ranks that share a sequence need the same sample, noise and timestep: here they draw from the same seed.
    rng = torch.Generator().manual_seed(step)
    clean, noise = torch.randn(2, 1, 16, 3, 6, 10, generator=rng).to(device)
    text = torch.randn(1, 17, 16, generator=rng).to(device)
    t = torch.rand(1, generator=rng).to(device)

    noisy = (1 - t) * clean + t * noise
    velocity = model(noisy, timestep=1000 * t, encoder_hidden_states=text).sample  # whole on every rank
    loss = torch.nn.functional.mse_loss(velocity, noise - clean)
    loss.backward()

    # The gradient of a parameter is the mean over the ranks. DDP and FSDP would do this for you.
    if dist.is_initialized():
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}")
