"""The norm of a convolution: a certified bracket, iteration by iteration."""

import torch
from torch import nn

import normgauge as ng

torch.manual_seed(0)
result = ng.operator_norm(nn.Conv2d(8, 16, 3, padding=1), (8, 16, 16))
