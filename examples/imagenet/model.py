"""AlexNet (Krizhevsky 2014, "One weird trick"), written out, for images of any size from 63 pixels on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["AlexNet", "feature_grid", "normalize", "num_parameters"]

POOLED = 6
"""The convolutions' output is pooled to a grid of 6 x 6, as for images of 224 pixels; smaller images have less."""


def feature_grid(image_size: int) -> int:
    """How many rows and columns the convolutions leave of an image."""
    size = (image_size + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    if size < 1:
        raise ValueError(f"AlexNet needs images of at least 63 pixels, got {image_size}")
    return size


class AlexNet(nn.Module):
    """Five convolutions, three dense layers."""

    def __init__(self, num_classes: int, *, image_size: int = 224, width: int = 4096) -> None:
        super().__init__()
        grid = min(POOLED, feature_grid(image_size))
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.AdaptiveAvgPool2d(grid),
        )
        answer = nn.Linear(width, num_classes)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(256 * grid * grid, width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            answer,
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                # PyTorch's own start is too small for eight layers of ReLU: training would stand still for long.
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        nn.init.normal_(answer.weight, std=0.01)  # at first, every class is equally likely

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def normalize(images: Tensor) -> Tensor:
    """Bytes (batch, rows, columns, colours) as AlexNet likes them: about -1 to 1, colours first."""
    return (images.permute(0, 3, 1, 2).to(torch.float32) - 127.5) / 64.0
