"""A residual network for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.after_first, self.after_second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, width, height, width) to the same."""
        y = functional.relu(self.after_first(self.first(x)))
        return functional.relu(x + self.after_second(self.second(y)))


class TinyResNet(nn.Module):
    """Images in, logits of ten classes out."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(width), Residual(width))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """From (batch, 3, height, width) to (batch, classes)."""
        return self.head(self.blocks(functional.relu(self.begin(images))).mean((2, 3)))


def channels_last() -> TinyResNet:
    """The network as it is trained: convolutions are faster with the channels innermost."""
    return TinyResNet().to(memory_format=torch.channels_last)


def images(B: int, H: int) -> Tensor:
    """One batch of square images."""
    return torch.randn(B, 3, H, H).to(memory_format=torch.channels_last)
