"""Learning rates for many ranks: how far to scale, and factors per step for the frameworks' schedulers.

A *factor* is a function from the number of the step (from 0) to what the learning rate is multiplied by.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

LearningRateFactor: TypeAlias = Callable[[int], float]


def scaled_lr(lr: float, batch_factor: float, *, rule: str = "linear") -> float:
    """The learning rate for a batch that is so many times larger: by the linear rule, the square root, or none.

    Linear is right for SGD up to large batches, with a warm-up; the square root is common with Adam.
    """
    factors = {"linear": batch_factor, "sqrt": math.sqrt(batch_factor), "none": 1.0}
    if rule not in factors:
        raise ValueError(f"rule must be one of {', '.join(factors)}, got {rule!r}")
    return lr * factors[rule]


def constant(step: int) -> float:
    return 1.0


def warmup(num_steps: int, *, start: float, after: LearningRateFactor = constant) -> LearningRateFactor:
    """From `start` to 1 in equal parts over so many steps, and then `after`, whose steps count from there."""
    if num_steps < 0 or not 0.0 <= start <= 1.0:
        raise ValueError(f"warm-up needs num_steps from 0 and start from 0 to 1, got {num_steps} and {start}")

    def factor(step: int) -> float:
        return start + (1.0 - start) * step / num_steps if step < num_steps else after(step - num_steps)

    return factor


def cosine(num_steps: int, *, floor: float = 0.0) -> LearningRateFactor:
    """Return a factor that falls from 1 to `floor` over num_steps, along half a cosine, and stays there."""
    if num_steps < 1:
        raise ValueError(f"cosine needs num_steps from 1, got {num_steps}")

    def factor(step: int) -> float:
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * min(step / num_steps, 1.0))) / 2.0

    return factor


def milestones(steps: Sequence[int], *, gamma: float = 0.1) -> LearningRateFactor:
    """Return a factor that is multiplied by gamma at each of these steps."""
    if list(steps) != sorted(steps):
        raise ValueError(f"milestones must ascend, got {list(steps)}")
    reached = tuple(steps)

    def factor(step: int) -> float:
        return float(gamma ** bisect_right(reached, step))

    return factor
