#include "base/interrupt.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace ronde {

namespace {

rd_interpreter functions;
std::atomic<bool> known{false};
thread_local void* last_raised[3];
thread_local bool has_raised = false;

}  // namespace

void set_interpreter(const rd_interpreter* interpreter) {
  known.store(false);
  if (interpreter == nullptr) return;
  functions = *interpreter;
  known.store(true);
}

bool interrupted() {
  if (!known.load() || gettid() != getpid()) return false;  // handlers run in the main thread
  int state = functions.enter();
  bool raised = functions.run_signal_handlers() != 0;
  if (raised) {
    functions.fetch_raised(&last_raised[0], &last_raised[1], &last_raised[2]);
    has_raised = true;
  }
  functions.leave(state);
  return raised;
}

bool take_raised(void* raised[3]) {
  if (!has_raised) return false;
  has_raised = false;
  std::copy(last_raised, last_raised + 3, raised);
  return true;
}

}  // namespace ronde
