# %% [markdown]
# # What is wrong with this network?
#
# A network with five faults, what the doctor finds, and what mends itself.
# %% [markdown]
# On Colab: `%pip install 'normgauge[lab]'` first.
# %%
import normgauge as ng

model, batch, optimizer = ng.doctor.sick_model()
checkup = ng.checkup(model, batch, optimizer=optimizer)
checkup
# %% [markdown]
# Every finding has its evidence, a reason and a remedy. The first one in full:
# %%
print(checkup.findings[0].title)
print(checkup.findings[0].evidence)
print(checkup.findings[0].remedy)
# %% [markdown]
# A healthy network for comparison: the same calls on a BatchNorm net of your own.
# %%
import torch
from torch import nn

torch.manual_seed(0)
healthy = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
data = (torch.randn(64, 16), torch.randint(4, (64,)))
for _ in range(100):
    healthy(torch.randn(64, 16))  # statistics settle
print(ng.checkup(healthy, data).meaning())
