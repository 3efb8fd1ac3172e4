"""Learning rates for many ranks: scaling, and warm-up as an ordinary scheduler of PyTorch."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.training import learning_rate as schedule
from ronde.training.learning_rate import LearningRateFactor, constant, cosine, milestones

__all__ = ["LearningRateFactor", "cosine", "milestones", "scale_lr", "warmup"]


def scale_lr(lr: float, *, rule: str = "linear", passes: int = 1, group: Group | None = None) -> float:
    """Return the learning rate for the batch of all ranks (and passes), given one that suits the batch of one rank.

    rule is linear, sqrt or none.
    """
    return schedule.scaled_lr(lr, resolve_group(group).size * passes, rule=rule)


def warmup(
    optimizer: Optimizer,
    num_steps: int,
    *,
    start: float | None = None,
    after: LearningRateFactor = constant,
    group: Group | None = None,
) -> LambdaLR:
    """Return a scheduler that raises the learning rate from `start` times its value to all of it, then applies `after`.

    start is 1 / size by default: the rate of one rank, if the optimizer's was scaled by scale_lr(). `after` counts
    steps from the end of the warm-up, such as cosine(num_steps) or milestones([…]). Call step() once per step.
    """
    begin = 1.0 / resolve_group(group).size if start is None else start
    # A plain function: LambdaLR then saves where it stands, not what it does.
    return LambdaLR(optimizer, schedule.warmup(num_steps, start=begin, after=after))
