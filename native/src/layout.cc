#include "layout.h"

#include <algorithm>

#include "base/error.h"

namespace ronde {

Layout::Layout(const rd_layout& given)
    : size(given.num_members),
      me(given.me),
      num_cores(std::max(1u, given.num_cores)),
      slot_bytes(given.slot_bytes),
      chunk_bytes(given.chunk_bytes),
      bucket_bytes(given.bucket_bytes) {
  bool sane = given.abi == RD_ABI && size >= 1 && size <= RD_MAX_MEMBERS && me < size && given.places != nullptr &&
              chunk_bytes >= 64 && slot_bytes >= chunk_bytes && chunk_bytes % 64 == 0 && slot_bytes % 64 == 0;
  if (!sane) throw CallError{RD_BAD_CALL};
  places.assign(given.places, given.places + size);
  for (uint32_t member = 0; member < size; ++member) {
    if (places[member] > by_place.size()) throw CallError{RD_BAD_CALL, int(member)};  // places count up from 0
    if (places[member] == by_place.size()) by_place.emplace_back();
    if (member == me) my_local = uint32_t(by_place[places[member]].size());
    by_place[places[member]].push_back(member);
  }
  my_place = places[me];
}

uint32_t Layout::num_lanes() const {
  size_t lanes = by_place[0].size();
  for (const auto& members : by_place) lanes = std::min(lanes, members.size());
  return uint32_t(lanes);
}

}  // namespace ronde
