// Sleeping on a word of (shared) memory with Linux's futex system call.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace ronde {

// Sleeps while *word == seen, at most limit_ns. It may return without a reason: callers must test their condition
// again. Returns false when a signal or the limit ended the sleep.
inline bool futex_wait(std::atomic<uint32_t>* word, uint32_t seen, int64_t limit_ns) {
  timespec limit{time_t(limit_ns / 1000000000), long(limit_ns % 1000000000)};
  long result = syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &limit, nullptr, 0);
  return result == 0 || (errno != EINTR && errno != ETIMEDOUT);
}

inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ronde
