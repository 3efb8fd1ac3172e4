// Pairwise exchange: all-to-all in n - 1 steps. In step s every member sends to the member s positions ahead and
// receives from the one s positions behind, so each member has one message in each direction at a time.
#include <cstring>

#include "algorithm/algorithm.h"

namespace ronde {

void pairwise_exchange_alltoall(Group& group, const Call& call) {
  uint32_t size = group.topology.size, me = group.topology.member_index;
  std::vector<uint64_t> send_starts = starts_of(call.splits, call.element_bytes());
  std::vector<uint64_t> receive_starts = starts_of(call.counts, call.element_bytes());
  auto send_bytes = [&](uint32_t member) { return send_starts[member + 1] - send_starts[member]; };
  auto receive_bytes = [&](uint32_t member) { return receive_starts[member + 1] - receive_starts[member]; };
  const char* input = static_cast<const char*>(call.spans[0].input);
  char* output = static_cast<char*>(call.spans[0].output);
  if (send_bytes(me) > 0) std::memcpy(output + receive_starts[me], input + send_starts[me], send_bytes(me));
  for (uint32_t step = 1; step < size; ++step) {
    uint32_t to = (me + step) % size, from = (me + size - step) % size;
    send_receive(group.wait, group.link(to), input + send_starts[to], send_bytes(to), group.link(from),
                 output + receive_starts[from], receive_bytes(from));
  }
}

}  // namespace ronde
