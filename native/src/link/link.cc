#include "link/link.h"

#include "link/wait.h"

namespace ronde {

void send_receive(CallWait& wait, Link* to, const void* data, size_t bytes, Link* from, void* buffer,
                  size_t buffer_bytes) {
  size_t sent = to == nullptr ? bytes : 0, received = from == nullptr ? buffer_bytes : 0;
  wait.run_steps([&] {
    StepResult step;
    if (sent < bytes) {
      size_t moved = to->try_send(static_cast<const char*>(data) + sent, bytes - sent);
      sent += moved;
      step.progress |= moved > 0;
    }
    if (received < buffer_bytes) {
      size_t moved = from->try_receive(static_cast<char*>(buffer) + received, buffer_bytes - received);
      received += moved;
      step.progress |= moved > 0;
    }
    step.done = sent == bytes && received == buffer_bytes;
    if (sent < bytes) step.sending = to;
    if (received < buffer_bytes) step.receiving = from;
    return step;
  });
}

}  // namespace ronde
