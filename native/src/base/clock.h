// Monotonic time and deadlines, used by everything that waits.
#pragma once

#include <time.h>

#include <cstdint>

namespace ronde {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// The moment at which a call must have ended. It is made once, at the C ABI, and handed down.
class Deadline {
 public:
  explicit Deadline(double remaining_s)
      : at_ns_(remaining_s > 1e8 ? INT64_MAX : now_ns() + int64_t(remaining_s * 1e9)) {}
  int64_t remaining_ns() const { return at_ns_ == INT64_MAX ? INT64_MAX : at_ns_ - now_ns(); }
  bool expired() const { return remaining_ns() <= 0; }
  int64_t at_ns() const { return at_ns_; }  // INT64_MAX for never

 private:
  int64_t at_ns_;
};

}  // namespace ronde
