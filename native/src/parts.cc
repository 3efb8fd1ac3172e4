#include "parts.h"

#include <algorithm>

#include "reduce/reduce.h"

namespace ronde {

Range share_of(uint64_t count, uint32_t who, uint32_t many, uint64_t element_bytes) {
  uint64_t unit = std::max<uint64_t>(1, 64 / element_bytes);
  uint64_t units = (count + unit - 1) / unit;
  auto border = [&](uint64_t index) { return std::min(count, units * index / many * unit); };
  return {border(who), border(who + 1)};
}

std::vector<uint64_t> starts_of(const std::vector<uint64_t>& counts, uint64_t element_bytes) {
  std::vector<uint64_t> starts{0};
  for (uint64_t count : counts) starts.push_back(starts.back() + count * element_bytes);
  return starts;
}

Parts::Parts(const rd_part* parts, uint64_t num_parts, uint64_t element_bytes)
    : parts_(parts, parts + num_parts), element_bytes_(element_bytes) {
  starts_.reserve(num_parts + 1);
  starts_.push_back(0);
  for (const rd_part& part : parts_) starts_.push_back(starts_.back() + part.count * element_bytes);
}

size_t Parts::piece_at(uint64_t position) const {
  return size_t(std::upper_bound(starts_.begin(), starts_.end(), position) - starts_.begin()) - 1;
}

template <class Visit>
void Parts::visit(uint64_t from, uint64_t bytes, Visit visit) const {
  if (bytes == 0) return;
  for (size_t piece = piece_at(from); bytes > 0; ++piece) {
    uint64_t within = from - starts_[piece];
    uint64_t length = std::min(bytes, starts_[piece + 1] - from);
    if (length > 0) visit(parts_[piece], within, length);
    from += length;
    bytes -= length;
  }
}

void Parts::gather(uint64_t from, uint64_t bytes, char* to) const {
  visit(from, bytes, [&](const rd_part& part, uint64_t within, uint64_t length) {
    copy_bytes(to, static_cast<const char*>(part.in) + within, length, false);
    to += length;
  });
}

void Parts::scatter(uint64_t to, uint64_t bytes, const char* from) const {
  visit(to, bytes, [&](const rd_part& part, uint64_t within, uint64_t length) {
    copy_bytes(static_cast<char*>(part.out) + within, from, length, false);
    from += length;
  });
}

const char* Parts::plain_in(uint64_t from, uint64_t bytes) const {
  if (bytes == 0) return nullptr;
  size_t piece = piece_at(from);
  if (from + bytes > starts_[piece + 1]) return nullptr;
  return static_cast<const char*>(parts_[piece].in) + (from - starts_[piece]);
}

char* Parts::plain_out(uint64_t from, uint64_t bytes) const {
  if (bytes == 0) return nullptr;
  size_t piece = piece_at(from);
  if (from + bytes > starts_[piece + 1]) return nullptr;
  return static_cast<char*>(parts_[piece].out) + (from - starts_[piece]);
}

}  // namespace ronde
