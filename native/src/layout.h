// Who the members are and who sits where: the caller's rd_layout, checked, with what follows from it.
#pragma once

#include <cstdint>
#include <vector>

#include "ronde.h"

namespace ronde {

struct Layout {
  explicit Layout(const rd_layout& given);  // throws CallError{RD_BAD_CALL}

  uint32_t size;
  uint32_t me;
  uint32_t num_cores;
  uint64_t slot_bytes;
  uint64_t chunk_bytes;
  uint64_t bucket_bytes;
  std::vector<uint32_t> places;                 // per member
  std::vector<std::vector<uint32_t>> by_place;  // per place, its members in order
  uint32_t my_place;
  uint32_t my_local;  // my index at my place

  const std::vector<uint32_t>& locals() const { return by_place[my_place]; }
  uint32_t num_locals() const { return uint32_t(locals().size()); }
  uint32_t num_places() const { return uint32_t(by_place.size()); }
  bool one_place() const { return by_place.size() == 1; }
  bool leader() const { return my_local == 0; }
  uint32_t leader_of(uint32_t place) const { return by_place[place][0]; }
  uint32_t num_lanes() const;  // members that every place has: so many can talk across in parallel
};

}  // namespace ronde
