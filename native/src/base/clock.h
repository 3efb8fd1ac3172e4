// Monotonic time and deadlines. Used by everything that waits.
#pragma once

#include <time.h>

#include <cstdint>

namespace ronde {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// A point in time, made once where the caller's patience is known and passed down.
class Deadline {
 public:
  explicit Deadline(double left_s) : at_ns_(left_s > 1e8 ? INT64_MAX : now_ns() + int64_t(left_s * 1e9)) {}
  int64_t left_ns() const { return at_ns_ == INT64_MAX ? INT64_MAX : at_ns_ - now_ns(); }
  bool passed() const { return left_ns() <= 0; }

 private:
  int64_t at_ns_;
};

}  // namespace ronde
