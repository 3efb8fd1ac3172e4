// The optimizers' rules against the same formulas for one number at a time, in long double.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "optimizer/optimizer.h"

using namespace ronde;

namespace {

constexpr int kSteps = 5;

// One parameter under one rule, written as in a textbook.
struct Reference {
  long double w, b = 0, m = 0, v = 0, s = 0, g = 0;

  void apply(const rd_optimizer_step& o, long double gradient) {
    const long double t = o.step, lr = o.lr, wd = o.weight_decay, first = o.first, second = o.second, eps = o.epsilon;
    long double d = gradient + wd * w;
    if (o.kind == RD_SGD) {
      if (first != 0) {
        b = o.step == 1 ? d : first * b + (1 - second) * d;
        d = o.flags & RD_NESTEROV ? d + first * b : b;
      }
      w -= lr * d;
    } else if (o.kind == RD_ADAM || o.kind == RD_LAMB) {
      if (o.kind == RD_LAMB || o.flags & RD_DECOUPLED_DECAY) d = gradient;
      m = first * m + (1 - first) * d;
      v = second * v + (1 - second) * d * d;
      long double u = m / (1 - std::pow(first, t)) / (std::sqrt(v / (1 - std::pow(second, t))) + eps);
      if (o.kind == RD_LAMB) {
        u += wd * w;
        u *= std::fabs(w) / std::fabs(u);  // an array of one element
      } else if (o.flags & RD_DECOUPLED_DECAY) {
        u += wd * w;
      }
      w -= lr * u;
    } else if (o.kind == RD_ADAGRAD) {
      s += d * d;
      w -= lr / (1 + (t - 1) * first) * d / (std::sqrt(s) + eps);
    } else {
      s = second * s + (1 - second) * d * d;
      g = second * g + (1 - second) * d;
      long double u = d / (std::sqrt(o.flags & RD_CENTERED ? s - g * g : s) + eps);
      b = first * b + u;
      w -= lr * b;
    }
  }
};

template <typename T>
void run(rd_optimizer_step o, rd_dtype dtype, bool in_place, double tolerance) {
  const size_t n = o.kind == RD_LAMB ? 1 : 37;
  o.dtype = dtype;
  o.count = n;
  std::vector<T> values(n), gradient(n), other(n),
      states[3] = {std::vector<T>(n), std::vector<T>(n), std::vector<T>(n)};
  std::vector<Reference> wanted(n);
  for (size_t i = 0; i < n; ++i) {
    values[i] = static_cast<T>(0.3) * static_cast<T>(i + 1) - 4;
    wanted[i].w = values[i];
  }
  for (int k = 0; k < 3; ++k) o.states[k] = states[k].data();
  for (int t = 1; t <= kSteps; ++t) {
    for (size_t i = 0; i < n; ++i) gradient[i] = static_cast<T>(std::sin(static_cast<double>(i * 7 + t * 3)) + 0.1);
    o.step = t;
    o.values = values.data();
    o.gradient = gradient.data();
    o.out = in_place ? values.data() : other.data();
    const std::vector<T> before = values;
    CHECK(optimizer_update(o));
    if (!in_place) {
      CHECK(values == before);
      values.swap(other);
    }
    for (size_t i = 0; i < n; ++i) wanted[i].apply(o, gradient[i]);
  }
  for (size_t i = 0; i < n; ++i) {
    if (std::fabs(static_cast<double>(values[i] - static_cast<T>(wanted[i].w))) > tolerance) {
      check::fail(__FILE__, __LINE__,
                  "rule " + std::to_string(o.kind) + " flags " + std::to_string(o.flags) + ": element " +
                      std::to_string(i) + " is wrong");
      break;
    }
  }
}

rd_optimizer_step rule(rd_optimizer_kind kind, uint32_t flags, double first, double second, double decay = 0.0) {
  rd_optimizer_step o{};
  o.kind = kind;
  o.flags = flags;
  o.lr = 0.05;
  o.weight_decay = decay;
  o.first = first;
  o.second = second;
  o.epsilon = 1e-8;
  return o;
}

const std::vector<rd_optimizer_step>& rules() {
  static const std::vector<rd_optimizer_step> all = {
      rule(RD_SGD, 0, 0.0, 0.0),
      rule(RD_SGD, 0, 0.0, 0.0, 0.1),
      rule(RD_SGD, 0, 0.9, 0.2, 0.1),
      rule(RD_SGD, RD_NESTEROV, 0.9, 0.0, 0.1),
      rule(RD_ADAM, 0, 0.9, 0.999, 0.1),
      rule(RD_ADAM, RD_DECOUPLED_DECAY, 0.9, 0.999, 0.1),
      rule(RD_ADAGRAD, 0, 0.1, 0.0, 0.1),
      rule(RD_RMSPROP, 0, 0.0, 0.99, 0.1),
      rule(RD_RMSPROP, RD_CENTERED, 0.9, 0.99),
      rule(RD_RMSPROP, 0, 0.9, 0.99),
      rule(RD_LAMB, 0, 0.9, 0.999, 0.1),
  };
  return all;
}

}  // namespace

TEST(every_rule_follows_its_formula_in_place_and_not) {
  for (const rd_optimizer_step& each : rules()) {
    for (const bool in_place : {false, true}) {
      run<float>(each, RD_FLOAT32, in_place, 2e-5);
      run<double>(each, RD_FLOAT64, in_place, 1e-12);
    }
  }
}

TEST(lamb_uses_the_norms_of_the_whole_array) {
  rd_optimizer_step o = rule(RD_LAMB, 0, 0.9, 0.999);
  double values[2] = {3.0, 4.0}, gradient[2] = {1.0, -1.0}, m[2] = {}, v[2] = {};
  o.dtype = RD_FLOAT64;
  o.count = 2;
  o.step = 1;
  o.values = o.out = values;
  o.gradient = gradient;
  o.states[0] = m;
  o.states[1] = v;
  CHECK(optimizer_update(o));  // the direction is (1, -1), the trust ratio 5 / sqrt(2)
  CHECK(std::fabs(values[0] - (3.0 - 0.05 * 5.0 / std::sqrt(2.0))) < 1e-7);
  CHECK(std::fabs(values[1] - (4.0 + 0.05 * 5.0 / std::sqrt(2.0))) < 1e-7);
}

TEST(what_is_not_known_is_refused) {
  float one[1] = {1.0f};
  rd_optimizer_step o = rule(RD_ADAM, 0, 0.9, 0.999);
  o.count = o.step = 1;
  o.values = o.gradient = o.out = one;
  o.dtype = RD_FLOAT32;
  CHECK(!optimizer_update(o));  // no states
  o.states[0] = o.states[1] = one;
  o.dtype = RD_FLOAT16;
  CHECK(!optimizer_update(o));
  o.dtype = RD_FLOAT32;
  o.kind = 17;
  CHECK(!optimizer_update(o));
  CHECK_EQ(one[0], 1.0f);
}
