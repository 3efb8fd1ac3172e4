// Whole messages over links, both ways at once. Used by the algorithms that exchange rather than stream.
#pragma once

#include "link/link.h"
#include "link/waiter.h"

namespace ronde {

// Sends and receives at the same time until both are done; a null link means that side has nothing to do.
void exchange(Waiter& waiter, Link* to, const void* data, size_t bytes, Link* from, void* room, size_t room_bytes);

}  // namespace ronde
