#include "spans.h"

#include <algorithm>

#include "reduce/reduce.h"

namespace ronde {

Range share_of(uint64_t count, uint32_t index, uint32_t num_shares, uint64_t element_bytes) {
  uint64_t per_line = std::max<uint64_t>(1, 64 / element_bytes);
  uint64_t lines = (count + per_line - 1) / per_line;
  auto boundary = [&](uint64_t i) { return std::min(count, lines * i / num_shares * per_line); };
  return {boundary(index), boundary(index + 1)};
}

std::vector<uint64_t> starts_of(const std::vector<uint64_t>& counts, uint64_t element_bytes) {
  std::vector<uint64_t> starts{0};
  for (uint64_t count : counts) starts.push_back(starts.back() + count * element_bytes);
  return starts;
}

SpanList::SpanList(const rd_span* spans, uint64_t num_spans, uint64_t element_bytes)
    : spans_(spans, spans + num_spans), element_bytes_(element_bytes) {
  starts_.reserve(num_spans + 1);
  starts_.push_back(0);
  for (const rd_span& span : spans_) starts_.push_back(starts_.back() + span.count * element_bytes);
}

size_t SpanList::span_at(uint64_t position) const {
  return size_t(std::upper_bound(starts_.begin(), starts_.end(), position) - starts_.begin()) - 1;
}

template <class Visit>
void SpanList::visit(uint64_t from, uint64_t bytes, Visit visit) const {
  if (bytes == 0) return;
  for (size_t index = span_at(from); bytes > 0; ++index) {
    uint64_t within = from - starts_[index];
    uint64_t length = std::min(bytes, starts_[index + 1] - from);
    if (length > 0) visit(spans_[index], within, length);
    from += length;
    bytes -= length;
  }
}

void SpanList::gather(uint64_t from, uint64_t bytes, char* to) const {
  visit(from, bytes, [&](const rd_span& span, uint64_t within, uint64_t length) {
    copy_bytes(to, static_cast<const char*>(span.input) + within, length, false);
    to += length;
  });
}

void SpanList::scatter(uint64_t to, uint64_t bytes, const char* from) const {
  visit(to, bytes, [&](const rd_span& span, uint64_t within, uint64_t length) {
    copy_bytes(static_cast<char*>(span.output) + within, from, length, false);
    from += length;
  });
}

const char* SpanList::contiguous_in(uint64_t from, uint64_t bytes) const {
  if (bytes == 0) return nullptr;
  size_t index = span_at(from);
  if (from + bytes > starts_[index + 1]) return nullptr;
  return static_cast<const char*>(spans_[index].input) + (from - starts_[index]);
}

char* SpanList::contiguous_out(uint64_t from, uint64_t bytes) const {
  if (bytes == 0) return nullptr;
  size_t index = span_at(from);
  if (from + bytes > starts_[index + 1]) return nullptr;
  return static_cast<char*>(spans_[index].output) + (from - starts_[index]);
}

}  // namespace ronde
