// A call's memory: several pieces seen as one run of bytes. Fusing operations costs nothing this way: what is staged is
// gathered from the pieces and scattered back to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ronde.h"

namespace ronde {

// A range of elements.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t size() const { return end - begin; }
};

// The share of `who` when `count` elements are dealt out to `many`, in cache lines so that no line has two writers.
Range share_of(uint64_t count, uint32_t who, uint32_t many, uint64_t element_bytes);

// Where each member's elements begin, in bytes, when they lie one after the other; and behind the last, where all end.
std::vector<uint64_t> starts_of(const std::vector<uint64_t>& counts, uint64_t element_bytes);

class Parts {
 public:
  Parts(const rd_part* parts, uint64_t num_parts, uint64_t element_bytes);

  uint64_t bytes() const { return starts_.back(); }
  uint64_t element_bytes() const { return element_bytes_; }
  uint64_t count() const { return bytes() / element_bytes_; }
  const std::vector<rd_part>& pieces() const { return parts_; }

  void gather(uint64_t from, uint64_t bytes, char* to) const;         // in  -> flat memory
  void scatter(uint64_t to, uint64_t bytes, const char* from) const;  // flat memory -> out

  // The bytes in one piece, or null when they cross a border.
  const char* plain_in(uint64_t from, uint64_t bytes) const;
  char* plain_out(uint64_t from, uint64_t bytes) const;

 private:
  template <class Visit>
  void visit(uint64_t from, uint64_t bytes, Visit visit) const;
  size_t piece_at(uint64_t position) const;

  std::vector<rd_part> parts_;
  std::vector<uint64_t> starts_;  // in bytes, one more than there are parts
  uint64_t element_bytes_;
};

}  // namespace ronde
