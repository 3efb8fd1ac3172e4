// The pattern of recursive doubling, apart from what is done with two arrays. Used for sums and for Adasum.
#pragma once

#include <vector>

#include "link/link.h"
#include "team.h"

namespace ronde {

// merge(mine_is_left) combines `data` and `theirs` into `data`.
template <class Merge>
void pair_up(Team& team, const std::vector<uint32_t>& order, uint32_t position, char* data, char* theirs,
             uint64_t bytes, Merge merge) {
  uint32_t num = uint32_t(order.size()), core = 1;
  while (core * 2 <= num) core *= 2;
  if (position >= core) {
    Link* partner = team.link(order[position - core]);
    send_receive(team.wait, partner, data, bytes, nullptr, nullptr, 0);
    send_receive(team.wait, nullptr, nullptr, 0, partner, data, bytes);
    return;
  }
  Link* extra = position + core < num ? team.link(order[position + core]) : nullptr;
  if (extra != nullptr) {
    send_receive(team.wait, nullptr, nullptr, 0, extra, theirs, bytes);
    merge(true);
  }
  for (uint32_t bit = 1; bit < core; bit *= 2) {
    Link* partner = team.link(order[position ^ bit]);
    send_receive(team.wait, partner, data, bytes, partner, theirs, bytes);
    merge((position & bit) == 0);
  }
  if (extra != nullptr) send_receive(team.wait, extra, data, bytes, nullptr, nullptr, 0);
}

}  // namespace ronde
