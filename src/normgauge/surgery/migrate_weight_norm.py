"""`migrate_weight_norm`: the hooks of old weight and spectral norms made parametrizations."""

from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from normgauge.objective import Mode
from normgauge.results import instrument
from normgauge.surgery._operate import Options, Patient, operate
from normgauge.surgery._surgery import Surgery


@instrument
def migrate_weight_norm(model: nn.Module, *, example: Any, **options: Unpack[Options]) -> Surgery:
    """Turn `torch.nn.utils.weight_norm` and `spectral_norm` into `torch.nn.utils.parametrizations`, values kept.

    Keys: `weight_g`, `weight_v` -> `parametrizations.weight.original0`, `original1` (torch loads old checkpoints into
    them); `weight_orig`, `weight_u`, `weight_v` -> `parametrizations.weight.original`, `.0._u`, `.0._v`.

    Kind: exact in both modes; spectral norms iterate in another order in train mode, and are exact in eval mode alone.
    Cost: nine forward passes.

    Examples:
        >>> import warnings; warnings.simplefilter("ignore")
        >>> done = migrate_weight_norm(nn.utils.weight_norm(nn.Linear(2, 2)), example=torch.ones(1, 2))
        >>> sorted(done.model.state_dict())
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
    """

    def edit(patient: Patient) -> str:
        for name, module in patient.model.named_modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, (WeightNorm, SpectralNorm)):
                    _migrate(module, key, hook)
                    kind = "weight" if isinstance(hook, WeightNorm) else "spectral"
                    patient.did(name or "(model)", f"{kind} norm of {hook.name}: hook -> parametrization")
        return "keys of old checkpoints: see the help of migrate_weight_norm"

    iterates = any(isinstance(h, SpectralNorm) for m in model.modules() for h in m._forward_pre_hooks.values())
    modes: tuple[Mode, ...] = ("eval",) if iterates else ("eval", "train")
    return operate("migrate_weight_norm", model, example, edit, modes=modes, **options)


def _migrate(module: nn.Module, key: int, hook: Any) -> None:
    name, suffixes = hook.name, ("_g", "_v") if isinstance(hook, WeightNorm) else ("_orig", "_u", "_v")
    old = [getattr(module, f"{name}{suffix}") for suffix in suffixes]
    for suffix in suffixes:
        delattr(module, f"{name}{suffix}")
    delattr(module, name)
    del module._forward_pre_hooks[key]
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):  # the old norm's own
        for number in [n for n, own in hooks.items() if "spectral_norm" in type(own).__module__]:
            del hooks[number]
    module.register_parameter(name, nn.Parameter(old[0 if len(old) == 3 else 1].detach().clone()))
    if isinstance(hook, WeightNorm):
        parametrizations.weight_norm(module, name, dim=hook.dim)
        sources = dict(zip(("original0", "original1"), old, strict=True))
    else:
        parametrizations.spectral_norm(module, name, hook.n_power_iterations, hook.eps, hook.dim)
        inside = module.get_submodule(f"parametrizations.{name}.0")
        for buffer, value in zip(("_u", "_v"), old[1:], strict=True):
            inside.register_buffer(buffer, value.detach().double())
        sources = {"original": old[0]}
    with torch.no_grad():
        for original, value in sources.items():
            place = module.get_parameter(f"parametrizations.{name}.{original}")
            place.data = value.detach().clone()
            place.requires_grad_(value.requires_grad)
