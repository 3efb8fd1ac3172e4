// Where a thread must not wait for a call, because it would wait for itself: in a callback (rd_callback), which the
// channel's thread runs, and in Python's signal handlers that run inside of another wait.
#pragma once

#include <cerrno>

#include "base/error.h"

namespace ronde {

inline thread_local bool waiting_is_forbidden = false;

class ForbidWaiting {
 public:
  ForbidWaiting() : before_(waiting_is_forbidden) { waiting_is_forbidden = true; }
  ~ForbidWaiting() { waiting_is_forbidden = before_; }
  ForbidWaiting(const ForbidWaiting&) = delete;

 private:
  const bool before_;
};

// Throws CallError where waiting is forbidden.
inline void check_may_wait() {
  if (waiting_is_forbidden) throw CallError{RD_BAD_CALL, -1, EDEADLK};
}

}  // namespace ronde
