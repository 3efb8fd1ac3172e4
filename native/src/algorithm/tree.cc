// Binomial tree: a broadcast over links. The root is moved to position 0; a position's parent is itself without its
// lowest bit. Large arrays go down in segments, so that all levels are busy at once.
#include <algorithm>

#include "algorithm/algorithm.h"
#include "link/link.h"

namespace ronde {

namespace {

constexpr uint64_t kSegmentBytes = 256 * 1024;

}  // namespace

void tree_broadcast(Team& team, const Job& job) {
  uint32_t size = team.topology.size, root = uint32_t(job.root);
  uint32_t position = (team.topology.member_index + size - root) % size;
  auto link_of = [&](uint32_t other) { return team.link((other + root) % size); };
  uint32_t reach = 1;  // children are position + bit for every bit below the lowest one of position
  while (reach < size && (position & reach) == 0) reach *= 2;
  uint64_t bytes = job.parts.bytes();
  for (uint64_t begin = 0; begin < bytes; begin += kSegmentBytes) {
    uint64_t length = std::min(kSegmentBytes, bytes - begin);
    char* plain = job.parts.plain_out(begin, length);
    char* segment = plain != nullptr ? plain : team.passing.room(kSegmentBytes);
    if (position == 0) {
      if (segment != job.parts.plain_in(begin, length)) job.parts.gather(begin, length, segment);
    } else {
      send_receive(team.wait, nullptr, nullptr, 0, link_of(position - reach), segment, length);
    }
    for (uint32_t bit = reach / 2; bit > 0; bit /= 2)
      if (position + bit < size) send_receive(team.wait, link_of(position + bit), segment, length, nullptr, nullptr, 0);
    if (plain == nullptr) job.parts.scatter(begin, length, segment);
  }
}

}  // namespace ronde
