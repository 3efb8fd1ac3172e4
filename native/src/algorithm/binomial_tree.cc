// Binomial tree: a broadcast over links. Positions are counted from the root, which is position 0; the parent of a
// position is the position without its lowest bit. Large arrays travel in segments, so that all levels of the tree work
// at the same time.
#include <algorithm>

#include "algorithm/algorithm.h"

namespace ronde {

namespace {

constexpr uint64_t kSegmentBytes = 256 * 1024;

}  // namespace

void binomial_tree_broadcast(Group& group, const Call& call) {
  uint32_t size = group.topology.size, root = uint32_t(call.peer);
  uint32_t position = (group.topology.member_index + size - root) % size;
  auto link_to = [&](uint32_t other) { return group.link((other + root) % size); };
  uint32_t lowest_bit = 1;  // of the position; its children are position + bit for every lower bit
  while (lowest_bit < size && (position & lowest_bit) == 0) lowest_bit *= 2;
  uint64_t bytes = call.spans.bytes();
  for (uint64_t begin = 0; begin < bytes; begin += kSegmentBytes) {
    uint64_t length = std::min(kSegmentBytes, bytes - begin);
    char* output = call.spans.contiguous_out(begin, length);
    char* segment = output != nullptr ? output : group.incoming.get(kSegmentBytes);
    if (position == 0) {
      if (segment != call.spans.contiguous_in(begin, length)) call.spans.gather(begin, length, segment);
    } else {
      send_receive(group.wait, nullptr, nullptr, 0, link_to(position - lowest_bit), segment, length);
    }
    for (uint32_t bit = lowest_bit / 2; bit > 0; bit /= 2)
      if (position + bit < size)
        send_receive(group.wait, link_to(position + bit), segment, length, nullptr, nullptr, 0);
    if (output == nullptr) call.spans.scatter(begin, length, segment);
  }
}

}  // namespace ronde
