// One step of an optimizer on one array, for parameter servers. Arithmetic is that of the dtype; what depends on the
// step alone is computed in double, as PyTorch does.
//
// d is the gradient, plus weight_decay * w unless the rule says otherwise. t is the number of the step.
//
//   SGD      states: momentum buffer b, if first is not 0.   b = d at t = 1, then first * b + (1 - second) * d;
//            w -= lr * b, or with RD_NESTEROV lr * (d + first * b), or lr * d without momentum
//   Adam     states: m, v.  m += (1 - first) * (d - m);  v = second * v + (1 - second) * d * d;
//            w -= lr / (1 - first^t) * m / (sqrt(v) / sqrt(1 - second^t) + epsilon)
//            RD_DECOUPLED_DECAY: d is the gradient, and before that w *= 1 - lr * weight_decay
//   Adagrad  states: s.     s += d * d;  w -= lr / (1 + (t - 1) * first) * d / (sqrt(s) + epsilon)
//   RMSProp  states: s, then the mean g with RD_CENTERED, then the momentum buffer b if first is not 0.
//            s = second * s + (1 - second) * d * d;  g += (1 - second) * (d - g);
//            a = sqrt(s), or sqrt(s - g * g);  u = d / (a + epsilon);  b = first * b + u;  w -= lr * (b or u)
//   LAMB     states: m, v as Adam's, of the gradient alone.
//            r = m / (1 - first^t) / (sqrt(v / (1 - second^t)) + epsilon) + weight_decay * w;  w -= lr * |w| / |r| * r,
//            where the quotient is 1 if a norm is 0. The norms are those of the array: it has to be a whole tensor.
#pragma once

#include "ronde.h"

namespace ronde {

// Returns false if the rule or the dtype is unknown, or a state is missing.
bool optimizer_update(const rd_optimizer_step& step);

}  // namespace ronde
