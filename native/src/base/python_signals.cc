#include "base/python_signals.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/forbid_waiting.h"

namespace ronde {

namespace {

rd_interpreter functions;
std::atomic<bool> has_functions{false};
thread_local void* last_exception[3];
thread_local bool has_exception = false;

}  // namespace

void set_interpreter(const rd_interpreter* interpreter) {
  has_functions.store(false);
  if (interpreter == nullptr) return;
  functions = *interpreter;
  has_functions.store(true);
}

bool run_signal_handlers() {
  if (!has_functions.load() || gettid() != getpid()) return false;  // Python runs handlers in the main thread only
  ForbidWaiting forbidden;
  int gil_state = functions.acquire_gil();
  bool raised = functions.run_signal_handlers() != 0;
  if (raised) {
    functions.fetch_exception(&last_exception[0], &last_exception[1], &last_exception[2]);
    has_exception = true;
  }
  functions.release_gil(gil_state);
  return raised;
}

bool fetch_exception(void* exception[3]) {
  if (!has_exception) return false;
  has_exception = false;
  std::copy(last_exception, last_exception + 3, exception);
  return true;
}

}  // namespace ronde
