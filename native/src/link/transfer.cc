#include "link/transfer.h"

namespace ronde {

void exchange(Waiter& waiter, Link* to, const void* data, size_t bytes, Link* from, void* room, size_t room_bytes) {
  size_t sent = to == nullptr ? bytes : 0, received = from == nullptr ? room_bytes : 0;
  waiter.drive([&] {
    Turn turn;
    if (sent < bytes) {
      size_t moved = to->try_send(static_cast<const char*>(data) + sent, bytes - sent);
      sent += moved;
      turn.progress |= moved > 0;
    }
    if (received < room_bytes) {
      size_t moved = from->try_receive(static_cast<char*>(room) + received, room_bytes - received);
      received += moved;
      turn.progress |= moved > 0;
    }
    turn.done = sent == bytes && received == room_bytes;
    if (sent < bytes) turn.sending = to;
    if (received < room_bytes) turn.receiving = from;
    return turn;
  });
}

}  // namespace ronde
