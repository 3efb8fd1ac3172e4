"""accumulation_amp.py: four backward passes per step (nothing travels before the last), in mixed precision, clipped.

ronde run -np 2 python examples/accumulation_amp.py
"""

import torch
from torch import nn

import ronde
import ronde.torch

PASSES = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float16 has few bits for small numbers, so its gradients are scaled; bfloat16 does not need that.
DTYPE = torch.float16 if DEVICE == "cuda" else torch.bfloat16

ronde.init()
if DEVICE == "cuda":
    torch.cuda.set_device(ronde.local_rank())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
optimizer = ronde.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), passes=PASSES)
ronde.torch.broadcast_parameters(model)
scaler = torch.amp.GradScaler(DEVICE, enabled=DTYPE is torch.float16)
generator = torch.Generator().manual_seed(1 + ronde.rank())  # every rank sees data of its own

losses = []
for _ in range(100):
    optimizer.zero_grad()
    for _ in range(PASSES):
        x = torch.randn(32, 16, generator=generator).to(DEVICE)
        y = x.sin().sum(1, keepdim=True)
        with torch.autocast(DEVICE, DTYPE):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()  # the fourth time, gradients become their mean over all ranks and passes
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(ronde.torch.average_metrics({"loss": loss.detach()})["loss"])

ronde.torch.check_in_sync(model)  # an error that names rank and parameter if the ranks had drifted apart
if ronde.rank() == 0:
    print(f"{ronde.size()} ranks, {PASSES} passes per step, {DTYPE}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
ronde.shutdown()
