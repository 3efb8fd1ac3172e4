"""Mean and variance over the values of all members of a group, for batch normalization. The formulas are for arrays of
any framework; its package adds the operations and the gradient (combine_moments() of each).

Each member's number of values n, mean m and variance v per channel are combined into those of all members:

    N = sum(n)    M = sum(n * m) / N    V = sum(n * (v + m²)) / N - M²

The sums are one allreduce of float64, so that nothing is lost in the difference. With the gradients of M and V, summed
over all members by one more allreduce, the gradients of a member's own are

    dm = n / N * (dM + 2 * (m - M) * dV)    dv = n / N * dV

Members may have different numbers of values, also none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def weigh(count: Any, mean: Any, variance: Any) -> list[Any]:
    """What is summed over members."""
    return [count, count * mean, count * (variance + mean * mean)]


def unweigh(total: Any, maximum: Callable[[Any, float], Any]) -> tuple[Any, Any, Any]:
    """The inverse of weigh(): total number, mean and variance from the sums over members."""
    count = maximum(total[0], 1.0)
    mean = total[1] / count
    return count, mean, maximum(total[2] / count - mean * mean, 0.0)


def backpropagate(own: Any, combined: Any, gradients: Any) -> tuple[Any, Any]:
    """The gradients of a member's mean and variance. `own` and `combined` are number and mean, and `gradients` those of
    mean and variance of all, summed over members."""
    (count, mean), (total_count, total_mean), (d_mean, d_variance) = own, combined, gradients
    share = count / total_count
    return share * (d_mean + 2.0 * (mean - total_mean) * d_variance), share * d_variance
