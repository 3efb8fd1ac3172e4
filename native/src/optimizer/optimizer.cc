#include "optimizer/optimizer.h"

#include <cmath>

namespace ronde {

namespace {

// The arrays of a step, typed. `out` may be `values`: each element is read before it is written.
template <typename T>
struct Arrays {
  explicit Arrays(const rd_optimizer_step& step)
      : n(step.count),
        values(static_cast<const T*>(step.values)),
        gradient(static_cast<const T*>(step.gradient)),
        out(static_cast<T*>(step.out)),
        states{static_cast<T*>(step.states[0]), static_cast<T*>(step.states[1]), static_cast<T*>(step.states[2])} {}

  const size_t n;
  const T* const values;
  const T* const gradient;
  T* const out;
  T* const states[3];
};

template <typename T>
void sgd(const rd_optimizer_step& step, const Arrays<T>& a) {
  const T lr = static_cast<T>(step.lr), decay = static_cast<T>(step.weight_decay);
  if (step.first == 0.0) {
    for (size_t i = 0; i < a.n; ++i) a.out[i] = a.values[i] - lr * (a.gradient[i] + decay * a.values[i]);
    return;
  }
  // At the first step the buffer is the gradient, whatever the momentum and the dampening are.
  const bool is_first = step.step == 1, is_nesterov = step.flags & RD_NESTEROV;
  const T momentum = static_cast<T>(step.first);
  const T kept = is_first ? T(0) : momentum, added = is_first ? T(1) : static_cast<T>(1.0 - step.second);
  T* const buffer = a.states[0];
  for (size_t i = 0; i < a.n; ++i) {
    const T d = a.gradient[i] + decay * a.values[i];
    const T b = kept * buffer[i] + added * d;
    buffer[i] = b;
    a.out[i] = a.values[i] - lr * (is_nesterov ? d + momentum * b : b);
  }
}

template <typename T>
void adam(const rd_optimizer_step& step, const Arrays<T>& a) {
  const bool is_decoupled = step.flags & RD_DECOUPLED_DECAY;
  const T decay = is_decoupled ? T(0) : static_cast<T>(step.weight_decay);
  const T shrink = is_decoupled ? static_cast<T>(1.0 - step.lr * step.weight_decay) : T(1);
  const double t = static_cast<double>(step.step);
  const T rate = static_cast<T>(step.lr / (1.0 - std::pow(step.first, t)));
  const T root = static_cast<T>(std::sqrt(1.0 - std::pow(step.second, t)));
  const T one_minus_first = static_cast<T>(1.0 - step.first), second = static_cast<T>(step.second);
  const T one_minus_second = static_cast<T>(1.0 - step.second), epsilon = static_cast<T>(step.epsilon);
  T *const m = a.states[0], *const v = a.states[1];
  for (size_t i = 0; i < a.n; ++i) {
    const T w = shrink * a.values[i];
    const T d = a.gradient[i] + decay * w;
    m[i] += one_minus_first * (d - m[i]);
    v[i] = second * v[i] + one_minus_second * d * d;
    a.out[i] = w - rate * m[i] / (std::sqrt(v[i]) / root + epsilon);
  }
}

template <typename T>
void adagrad(const rd_optimizer_step& step, const Arrays<T>& a) {
  const T rate = static_cast<T>(step.lr / (1.0 + static_cast<double>(step.step - 1) * step.first));
  const T decay = static_cast<T>(step.weight_decay), epsilon = static_cast<T>(step.epsilon);
  T* const sum = a.states[0];
  for (size_t i = 0; i < a.n; ++i) {
    const T d = a.gradient[i] + decay * a.values[i];
    sum[i] += d * d;
    a.out[i] = a.values[i] - rate * d / (std::sqrt(sum[i]) + epsilon);
  }
}

template <typename T>
void rmsprop(const rd_optimizer_step& step, const Arrays<T>& a) {
  const bool is_centered = step.flags & RD_CENTERED, has_momentum = step.first != 0.0;
  const T lr = static_cast<T>(step.lr), decay = static_cast<T>(step.weight_decay);
  const T alpha = static_cast<T>(step.second), one_minus_alpha = static_cast<T>(1.0 - step.second);
  const T momentum = static_cast<T>(step.first), epsilon = static_cast<T>(step.epsilon);
  T *const square = a.states[0], *const mean = a.states[1], *const buffer = a.states[is_centered ? 2 : 1];
  for (size_t i = 0; i < a.n; ++i) {
    const T d = a.gradient[i] + decay * a.values[i];
    square[i] = alpha * square[i] + one_minus_alpha * d * d;
    T variance = square[i];
    if (is_centered) {
      mean[i] += one_minus_alpha * (d - mean[i]);
      variance -= mean[i] * mean[i];
    }
    T u = d / (std::sqrt(variance) + epsilon);
    if (has_momentum) u = buffer[i] = momentum * buffer[i] + u;
    a.out[i] = a.values[i] - lr * u;
  }
}

template <typename T>
void lamb(const rd_optimizer_step& step, const Arrays<T>& a) {
  const double t = static_cast<double>(step.step);
  const T first_correction = static_cast<T>(1.0 - std::pow(step.first, t));
  const T second_correction = static_cast<T>(1.0 - std::pow(step.second, t));
  const T one_minus_first = static_cast<T>(1.0 - step.first), second = static_cast<T>(step.second);
  const T one_minus_second = static_cast<T>(1.0 - step.second), epsilon = static_cast<T>(step.epsilon);
  const T decay = static_cast<T>(step.weight_decay);
  T *const m = a.states[0], *const v = a.states[1];
  const auto direction = [&](size_t i) {
    return m[i] / first_correction / (std::sqrt(v[i] / second_correction) + epsilon) + decay * a.values[i];
  };
  double values_square = 0.0, direction_square = 0.0;
  for (size_t i = 0; i < a.n; ++i) {
    const T d = a.gradient[i];
    m[i] += one_minus_first * (d - m[i]);
    v[i] = second * v[i] + one_minus_second * d * d;
    const double w = a.values[i], r = direction(i);
    values_square += w * w;
    direction_square += r * r;
  }
  const bool has_norms = values_square > 0.0 && direction_square > 0.0;
  const double trust = has_norms ? std::sqrt(values_square) / std::sqrt(direction_square) : 1.0;
  const T rate = static_cast<T>(step.lr * trust);
  for (size_t i = 0; i < a.n; ++i) a.out[i] = a.values[i] - rate * direction(i);
}

template <typename T>
bool update(const rd_optimizer_step& step) {
  const Arrays<T> arrays(step);
  switch (step.kind) {
    case RD_SGD:
      sgd(step, arrays);
      return true;
    case RD_ADAM:
      adam(step, arrays);
      return true;
    case RD_ADAGRAD:
      adagrad(step, arrays);
      return true;
    case RD_RMSPROP:
      rmsprop(step, arrays);
      return true;
    case RD_LAMB:
      lamb(step, arrays);
      return true;
    default:
      return false;
  }
}

// How many states the rule has; more than three if it is unknown.
int num_states(const rd_optimizer_step& step) {
  const int has_momentum = step.first != 0.0;
  switch (step.kind) {
    case RD_SGD:
      return has_momentum;
    case RD_ADAM:
    case RD_LAMB:
      return 2;
    case RD_ADAGRAD:
      return 1;
    case RD_RMSPROP:
      return 1 + has_momentum + ((step.flags & RD_CENTERED) != 0);
    default:
      return 4;
  }
}

}  // namespace

bool optimizer_update(const rd_optimizer_step& step) {
  const int needed = num_states(step);
  if (needed > 3) return false;
  for (int i = 0; i < needed; ++i) {
    if (step.states[i] == nullptr && step.count > 0) return false;
  }
  if (step.dtype == RD_FLOAT32) return update<float>(step);
  return step.dtype == RD_FLOAT64 && update<double>(step);
}

}  // namespace ronde
