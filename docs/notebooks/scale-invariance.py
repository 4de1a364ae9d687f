# %% [markdown]
# # Weights whose length does not matter
#
# Find them, see what training does to them, and train on spheres.
# %%
import torch
from torch import nn

import normgauge as ng

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
batch = (torch.randn(128, 16), torch.randint(4, (128,)))
objective = ng.Objective(model, nn.functional.cross_entropy, batch, mode="train")
ng.symmetries(objective)
# %% [markdown]
# The rows before the BatchNorm can be rescaled without any change of the outputs. A step of SGD is then at a right
# angle to each row and lengthens it; weight decay shortens it; together they set the rate at which its direction is
# trained.
# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=5e-3)
ng.weight_dynamics(objective, optimizer)
# %% [markdown]
# Curvature as it is, and with the symmetry divided out:
# %%
print(ng.spectrum(objective, top=3).meaning())
print(ng.spectrum(objective, top=3, of="quotient").meaning())
# %% [markdown]
# On spheres the length is fixed, so the learning rate is the one that was set.
# %%
groups = ng.param_groups(objective, geometry=True)
optimizer = ng.optim.SphereSGD(groups, lr=0.1, radius=1.0)
for _ in range(20):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
print(model[0].weight.norm(dim=1)[:4])
