"""The networks that `ronde bench train` trains, and what they are fed. Used by train.py, and by the ranks.

A rank loads this file by its path, without the ronde around it (train_rank.py says why); so it needs nothing of ronde,
and PyTorch only where a network is built.

How much is reduced: sizes as written on the command line, and the gradients of a real network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ronde.text import BINARY_UNITS, format_exact_bytes

__all__ = [
    "BUCKET_BYTES",
    "BenchmarkModel",
    "MANY",
    "MODELS",
    "Workload",
    "buckets",
    "parse_models",
    "parse_numbers",
    "parse_works",
    "resnet50",
]

Network = Any
"""A torch.nn.Module; what it returns is compared with labels by cross entropy."""
Batch = tuple[Any, Any]
"""Tensors: what goes in, and the labels."""

IMAGENET_CLASSES = 1000
SMALL_CLASSES = 200
DIGITS = 10
WORDS = 1024
SEQUENCE = 64
NUM_TINY = 1000
TINY_SIZE = 16


@dataclass(frozen=True)
class BenchmarkModel:
    """A network and its data: random, the same in every step, and made before the clock runs."""

    name: str
    words: str
    batch: int
    """Samples per rank and step."""
    num_parameters: int
    build: Callable[[], Network]
    feed: Callable[[int], Batch]
    """For so many samples."""

    @property
    def num_bytes(self) -> int:
        """Of its gradients, which are float32."""
        return 4 * self.num_parameters


def alexnet() -> Network:
    """Five convolutions and three dense layers, which hold 96 % of the parameters."""
    from torch import nn

    def convolution(inside: int, outside: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        padding = 2 if stride > 1 else kernel // 2  # as published: the first one cuts off some of the edge
        return [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *convolution(3, 64, 11, stride=4),
        nn.MaxPool2d(3, 2),
        *convolution(64, 192, 5),
        nn.MaxPool2d(3, 2),
        *convolution(192, 384, 3),
        *convolution(384, 256, 3),
        *convolution(256, 256, 3),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, IMAGENET_CLASSES),
    )


def resnet() -> Network:
    """Eight residual blocks of two convolutions each, like ResNet-18."""
    from torch import Tensor, nn

    def normalized(inside: int, outside: int, kernel: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outside)]

    class Block(nn.Module):
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            first = (*normalized(inside, outside, 3, stride), nn.ReLU(inplace=True))
            self.body = nn.Sequential(*first, *normalized(outside, outside, 3, 1))
            same = stride == 1 and inside == outside
            self.short_cut = nn.Identity() if same else nn.Sequential(*normalized(inside, outside, 1, stride))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.body(x) + self.short_cut(x), inplace=True)

    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)]
    return nn.Sequential(
        *normalized(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, SMALL_CLASSES),
    )


def mlp() -> Network:
    """784-512-512-10: a step takes milliseconds, so every delay shows."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(784, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, DIGITS),
    )


def transformer() -> Network:
    """Six blocks of attention and a dense part, each behind a normalization, that guess the next word."""
    from torch import Tensor, nn

    width, num_heads, num_blocks = 512, 8, 6

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward = nn.Linear(width, 3 * width)
            self.outward = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.inward(x).unflatten(-1, (3, num_heads, -1)).transpose(1, -2)
            query, key, value = heads.unbind(-3)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            seen: Tensor = self.outward(mixed.transpose(1, 2).flatten(-2))
            return seen

    class Residual(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.LayerNorm(width), *layers)

        def forward(self, x: Tensor) -> Tensor:
            more: Tensor = self.body(x)
            return x + more

    blocks: list[nn.Module] = []
    for _ in range(num_blocks):
        dense = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        blocks += [Residual(Attention()), Residual(*dense)]
    head = (nn.LayerNorm(width), nn.Linear(width, WORDS), nn.Flatten(0, 1))
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, *head)


def tiny() -> Network:
    """A thousand parameters of sixteen numbers and next to no arithmetic: what is left is the cost per parameter."""
    import torch
    from torch import Tensor, nn

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(TINY_SIZE) for _ in range(NUM_TINY))

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x * scale
            return x

    return Chain()


def images(pixels: int, num_classes: int) -> Callable[[int], Batch]:
    """Colour images of so many pixels by as many."""
    return vectors((3, pixels, pixels), num_classes)


def vectors(shape: tuple[int, ...], num_classes: int) -> Callable[[int], Batch]:
    """Random numbers, each sample of this shape."""

    def feed(batch: int) -> Batch:
        import torch

        return torch.randn(batch, *shape), torch.randint(num_classes, (batch,))

    return feed


def sentences(batch: int) -> Batch:
    """Random words, and which one comes behind each."""
    import torch

    return torch.randint(WORDS, (batch, SEQUENCE)), torch.randint(WORDS, (batch * SEQUENCE,))


MODELS = {
    model.name: model
    for model in (
        BenchmarkModel("alexnet", "AlexNet, 224 px", 16, 61_100_840, alexnet, images(224, IMAGENET_CLASSES)),
        BenchmarkModel("resnet", "like ResNet-18, 64 px", 16, 11_279_112, resnet, images(64, SMALL_CLASSES)),
        BenchmarkModel("mlp", "784-512-512-10", 64, 669_706, mlp, vectors((784,), DIGITS)),
        BenchmarkModel("transformer", "6 blocks, 64 words", 4, 19_964_928, transformer, sentences),
        BenchmarkModel(
            "tiny", "1,000 tiny parameters", 1, NUM_TINY * TINY_SIZE, tiny, vectors((TINY_SIZE,), TINY_SIZE)
        ),
    )
}


def parse_models(text: str) -> tuple[BenchmarkModel, ...]:
    """`alexnet,mlp` as what is to be trained."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODELS:
            raise ValueError(f"no such model: {name!r}; there are {', '.join(MODELS)}")
    if not names:
        raise ValueError(f"no model to train; there are {', '.join(MODELS)}")
    return tuple(MODELS[name] for name in dict.fromkeys(names))


MANY = "many"
"""Stands for the gradients of ResNet-50 in a list of sizes."""

BUCKET_BYTES = 25 * 1024 * 1024
"""How large the buckets are that PyTorch's DistributedDataParallel makes by default."""

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """What one measured step reduces: one array of float32, or several."""

    name: str
    counts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes each rank puts in."""
        return FLOAT_BYTES * sum(self.counts)

    @property
    def is_many(self) -> bool:
        """Whether it is a set of gradients and not one array."""
        return len(self.counts) > 1


def resnet50() -> Iterator[tuple[int, ...]]:
    """The shapes of the 161 parameters of ResNet-50 (25,557,032 numbers), first layer first."""
    yield (64, 3, 7, 7)
    yield from ((64,), (64,))
    inside = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            outside = 4 * width
            for shape in ((width, inside, 1, 1), (width, width, 3, 3), (outside, width, 1, 1)):
                yield from (shape, shape[:1], shape[:1])  # a convolution, then scale and shift of its normalization
            if block == 0:  # the short cut has to change the width
                yield from ((outside, inside, 1, 1), (outside,), (outside,))
            inside = outside
    yield from ((1000, 2048), (1000,))


def buckets(counts: Sequence[int], limit_bytes: int = BUCKET_BYTES) -> tuple[int, ...]:
    """Elements per bucket when arrays are packed in their order; an array larger than the limit gets its own."""
    packed: list[int] = []
    for count in counts:
        if packed and (packed[-1] + count) * FLOAT_BYTES <= limit_bytes:
            packed[-1] += count
        else:
            packed.append(count)
    return tuple(packed)


def parse_works(text: str) -> tuple[Workload, ...]:
    """`4K,1M,many` as what is to be reduced."""
    return tuple(_parse_work(part.strip()) for part in text.split(",") if part.strip())


def _parse_work(text: str) -> Workload:
    if text.lower() == MANY:
        # Backward makes the gradient of the last layer first.
        return Workload(MANY, tuple(prod(shape) for shape in resnet50())[::-1])
    upper = text.upper().removesuffix("IB").removesuffix("B")
    unit = BINARY_UNITS.get(upper[-1:], 1)
    digits = upper[:-1] if unit > 1 else upper
    num_bytes = int(digits) * unit if digits.isascii() and digits.isdigit() else 0
    if num_bytes <= 0 or num_bytes % FLOAT_BYTES:
        raise ValueError(f"a size is a multiple of 4 bytes such as 4096, 4K, 16M or 1G, or {MANY!r}; got {text!r}")
    return Workload(format_exact_bytes(num_bytes), (num_bytes // FLOAT_BYTES,))


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """`1,10,100` as numbers from 1."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or int(part) < 1:
            raise ValueError(f"{what} must be whole numbers from 1, separated by commas; got {part!r}")
    return tuple(int(part) for part in parts)
