"""Every test and doctest starts from the same global random state, whatever ran before it in the process."""

import doctest
import inspect

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
