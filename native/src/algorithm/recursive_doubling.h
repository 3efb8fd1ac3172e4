// The exchanges of recursive doubling, apart from what is done with two arrays. Used for reductions and for Adasum.
#pragma once

#include <vector>

#include "call_context.h"

namespace ronde {

// members[position] is this member. merge(mine_is_left) combines `data` and `theirs` into `data`.
template <class Merge>
void recursive_doubling(CallContext& context, const std::vector<uint32_t>& members, uint32_t position, char* data,
                        char* theirs, uint64_t bytes, Merge merge) {
  uint32_t num = uint32_t(members.size()), power_of_two = 1;
  while (power_of_two * 2 <= num) power_of_two *= 2;
  if (position >= power_of_two) {
    Link* partner = context.link(members[position - power_of_two]);
    send_receive(context.wait, partner, data, bytes, nullptr, nullptr, 0);
    send_receive(context.wait, nullptr, nullptr, 0, partner, data, bytes);
    return;
  }
  Link* extra = position + power_of_two < num ? context.link(members[position + power_of_two]) : nullptr;
  if (extra != nullptr) {
    send_receive(context.wait, nullptr, nullptr, 0, extra, theirs, bytes);
    merge(true);
  }
  for (uint32_t bit = 1; bit < power_of_two; bit *= 2) {
    Link* partner = context.link(members[position ^ bit]);
    send_receive(context.wait, partner, data, bytes, partner, theirs, bytes);
    merge((position & bit) == 0);
  }
  if (extra != nullptr) send_receive(context.wait, extra, data, bytes, nullptr, nullptr, 0);
}

}  // namespace ronde
