// A call's memory: several spans seen as one run of bytes. Fused operations need no copy of their own this way: the
// staging that an algorithm does anyway gathers from the spans and scatters to them.
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

// Returns the share of `index` when `count` elements are divided among `num_shares`. Shares begin at cache lines, so
// that no line has two writers.
Range share_of(uint64_t count, uint32_t index, uint32_t num_shares, uint64_t element_bytes);

// Returns the byte at which each member's elements begin when all lie one after the other, and the end of the last.
std::vector<uint64_t> starts_of(const std::vector<uint64_t>& counts, uint64_t element_bytes);

class SpanList {
 public:
  SpanList(const rd_span* spans, uint64_t num_spans, uint64_t element_bytes);

  uint64_t bytes() const { return starts_.back(); }
  uint64_t element_bytes() const { return element_bytes_; }
  uint64_t count() const { return bytes() / element_bytes_; }  // elements

  size_t size() const { return spans_.size(); }
  const rd_span& operator[](size_t index) const { return spans_[index]; }
  std::vector<rd_span>::const_iterator begin() const { return spans_.begin(); }
  std::vector<rd_span>::const_iterator end() const { return spans_.end(); }

  void gather(uint64_t from, uint64_t bytes, char* to) const;         // inputs -> contiguous memory
  void scatter(uint64_t to, uint64_t bytes, const char* from) const;  // contiguous memory -> outputs

  // The address of these bytes, or null when they are not all in one span.
  const char* contiguous_in(uint64_t from, uint64_t bytes) const;
  char* contiguous_out(uint64_t from, uint64_t bytes) const;

 private:
  template <class Visit>
  void visit(uint64_t from, uint64_t bytes, Visit visit) const;
  size_t span_at(uint64_t position) const;

  std::vector<rd_span> spans_;
  std::vector<uint64_t> starts_;  // the byte at which each span begins, and the end of the last
  uint64_t element_bytes_;
};

}  // namespace ronde
