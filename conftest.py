"""Every test and doctest starts from the same global random state, whatever ran before it in the process."""

import pytest
import torch


@pytest.fixture(autouse=True)
def global_seed():
    """Seed torch."""
    torch.manual_seed(0)
