# %% [markdown]
# # Is it true what the paper prints?
#
# Claims of the papers, judged by numbers here and now.
# %%
import normgauge as ng

book = ng.claims.ledger(ids=["S1-T4.1", "S1-FC.2", "S0-P4.3", "S0-WD"]).judge()
book
# %%
print(book.explain("S1-T4.1"))
# %% [markdown]
# The same by hand: both sides of Theorem 4.1 of Santurkar et al. on random batches.
# %%
import torch

worst = 0.0
for seed in range(200):
    torch.manual_seed(seed)
    y, g = torch.randn(2, 8, dtype=torch.float64)
    y.requires_grad_()
    s = y.var(correction=0).sqrt()
    yh = (y - y.mean()) / s
    (slope,) = torch.autograd.grad((g * yh).sum(), y)
    printed = (g @ g - g.sum() ** 2 / 8 - (g @ yh) ** 2 / 8**0.5) / s**2
    worst = max(worst, float((slope @ slope - printed).detach()))
print(f"the left side exceeds the printed bound by up to {worst:.3g}")
