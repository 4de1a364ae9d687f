"""Surgery is proved in float64 and lived in float32: its tests build models as users do."""

import pytest
import torch


@pytest.fixture
def single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
