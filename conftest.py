"""Every module of tests, test and doctest starts from the same global random state, whatever ran before it."""

import doctest
import inspect
import os

# Trainings amplify rounding, and torch picks its kernels by the processor: golden values are of those for AVX2. Asked
# for before torch is imported.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import pytest
import torch

_from_module = doctest.DocTestFinder._from_module


def _decorated_too(self, module, found):
    """Look behind decorators, which doctest takes for functions of the module they are written in."""
    return _from_module(self, module, inspect.unwrap(found) if inspect.isfunction(found) else found)


doctest.DocTestFinder._from_module = _decorated_too


@pytest.fixture(autouse=True)
def global_seed():
    """Seed torch."""
    torch.manual_seed(0)


def pytest_collectstart(collector):
    """Seed torch before a module is imported too: what it draws at its top level must not differ from run to run."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)
