"""The networks that `ronde bench train` trains, and their random data. Those of TensorFlow and Keras are built in
tensorflow_training.py, those of JAX in jax_training.py, those of MXNet in mxnet_training.py.

A measured rank loads this file by its path, without the ronde around it: it needs nothing of ronde, and PyTorch only
where a network is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

TORCH = "torch"
MXNET = "mxnet"
ALL_BUT_MXNET = (TORCH, "tensorflow", "keras", "jax")
ALL_FRAMEWORKS = (*ALL_BUT_MXNET, MXNET)
IMAGENET_CLASSES = 1000
WORDS = 1024
SEQUENCE = 64


@dataclass(frozen=True)
class BenchmarkModel:
    """A network and how to make data for it, which is random and the same in every step."""

    name: str
    description: str
    batch: int
    """Samples per rank and step."""
    num_parameters: int
    build: Callable[[], Any] | None
    """Returns a torch.nn.Module; what that returns is compared with labels by cross entropy. None: not for PyTorch."""
    make_batch: Callable[[int], tuple[Any, Any]] | None
    """Returns the input and the labels of so many samples, for PyTorch."""
    frameworks: tuple[str, ...] = (TORCH,)

    @property
    def num_bytes(self) -> int:
        """Of its gradients, which are float32."""
        return 4 * self.num_parameters


def alexnet() -> Any:
    """Five convolutions and three dense layers, which hold 96 % of the parameters."""
    from torch import nn

    def convolution(num_in: int, num_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        padding = 2 if stride > 1 else kernel // 2  # as published: the first one cuts off some of the edge
        return [nn.Conv2d(num_in, num_out, kernel, stride, padding), nn.ReLU(inplace=True)]

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


def resnet() -> Any:
    """Eight residual blocks of two convolutions each, like ResNet-18."""
    from torch import Tensor, nn

    def normalized(num_in: int, num_out: int, kernel: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(num_out)]

    class Block(nn.Module):
        def __init__(self, num_in: int, num_out: int, stride: int) -> None:
            super().__init__()
            first = (*normalized(num_in, num_out, 3, stride), nn.ReLU(inplace=True))
            self.body = nn.Sequential(*first, *normalized(num_out, num_out, 3, 1))
            same = stride == 1 and num_in == num_out
            self.shortcut = nn.Identity() if same else nn.Sequential(*normalized(num_in, num_out, 1, stride))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.body(x) + self.shortcut(x), inplace=True)

    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)]
    return nn.Sequential(
        *normalized(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 200),
    )


def mlp() -> Any:
    """784-512-512-10: a step takes milliseconds, so every delay is visible."""
    from torch import nn

    hidden = nn.Linear(784, 512), nn.ReLU(inplace=True), nn.Linear(512, 512), nn.ReLU(inplace=True)
    return nn.Sequential(*hidden, nn.Linear(512, 10))


def transformer() -> Any:
    """Six blocks of attention and a dense part, each behind a normalization, that predict the next word."""
    from torch import Tensor, nn

    width, num_heads, num_blocks = 512, 8, 6

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project_in = nn.Linear(width, 3 * width)
            self.project_out = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.project_in(x).unflatten(-1, (3, num_heads, -1)).transpose(1, -2)
            query, key, value = heads.unbind(-3)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return cast("Tensor", self.project_out(mixed.transpose(1, 2).flatten(-2)))

    class Residual(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.LayerNorm(width), *layers)

        def forward(self, x: Tensor) -> Tensor:
            return x + cast("Tensor", self.body(x))

    blocks: list[nn.Module] = []
    for _ in range(num_blocks):
        dense = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        blocks += [Residual(Attention()), Residual(*dense)]
    head = (nn.LayerNorm(width), nn.Linear(width, WORDS), nn.Flatten(0, 1))
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, *head)


def tiny() -> Any:
    """A thousand parameters of sixteen numbers and next to no arithmetic: what is left is the cost per parameter."""
    import torch
    from torch import Tensor, nn

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(16) for _ in range(1000))

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x * scale
            return x

    return Chain()


def random_samples(shape: tuple[int, ...], num_classes: int) -> Callable[[int], tuple[Any, Any]]:
    """Makes batches of random numbers, each sample of this shape."""

    def make_batch(batch: int) -> tuple[Any, Any]:
        import torch

        return torch.randn(batch, *shape), torch.randint(num_classes, (batch,))

    return make_batch


def random_sentences(batch: int) -> tuple[Any, Any]:
    """Random words, and the random word that follows each."""
    import torch

    return torch.randint(WORDS, (batch, SEQUENCE)), torch.randint(WORDS, (batch * SEQUENCE,))


_IMAGES = random_samples((3, 224, 224), IMAGENET_CLASSES)
_MODELS = (
    BenchmarkModel("alexnet", "AlexNet, 224 px", 16, 61_100_840, alexnet, _IMAGES, ALL_BUT_MXNET),
    BenchmarkModel("resnet", "like ResNet-18, 64 px", 16, 11_279_112, resnet, random_samples((3, 64, 64), 200)),
    BenchmarkModel("mlp", "784-512-512-10", 64, 669_706, mlp, random_samples((784,), 10), ALL_FRAMEWORKS),
    BenchmarkModel("digits", "64-256-10, digits", 32, 19_210, None, None, (MXNET,)),
    BenchmarkModel("vector", "one parameter of 4 MB", 1, 1_048_576, None, None, (MXNET,)),
    BenchmarkModel("transformer", "6 blocks, 64 words", 4, 19_964_928, transformer, random_sentences),
    BenchmarkModel("tiny", "1,000 tiny parameters", 1, 16_000, tiny, random_samples((16,), 16), ALL_BUT_MXNET),
)
MODELS = {model.name: model for model in _MODELS}


def parse_models(text: str | None, framework: str = TORCH) -> tuple[BenchmarkModel, ...]:
    """The models of a list such as `alexnet,mlp`, each once; None stands for all that this framework trains."""
    known = [model.name for model in _MODELS if framework in model.frameworks]
    names = known if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"no such model for {framework}: {name!r}; there are {', '.join(known)}")
    if not names:
        raise ValueError(f"no model to train; there are {', '.join(known)}")
    return tuple(MODELS[name] for name in dict.fromkeys(names))
