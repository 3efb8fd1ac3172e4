// Pairwise exchange: all-to-all in n steps. In step s everyone sends to the member s further on and receives from the
// one s before, so every link has one message each way and nobody is flooded.
#include <cstring>

#include "algorithm/algorithm.h"
#include "link/link.h"

namespace ronde {

void pairwise_alltoall(Team& team, const Job& job) {
  uint32_t size = team.topology.size, me = team.topology.member_index;
  std::vector<uint64_t> give = starts_of(job.splits, job.element_bytes());
  std::vector<uint64_t> take = starts_of(job.counts, job.element_bytes());
  const char* in = static_cast<const char*>(job.parts.pieces()[0].in);
  char* out = static_cast<char*>(job.parts.pieces()[0].out);
  if (give[me + 1] > give[me]) std::memcpy(out + take[me], in + give[me], give[me + 1] - give[me]);
  for (uint32_t step = 1; step < size; ++step) {
    uint32_t to = (me + step) % size, from = (me + size - step) % size;
    send_receive(team.wait, team.link(to), in + give[to], give[to + 1] - give[to], team.link(from), out + take[from],
                 take[from + 1] - take[from]);
  }
}

}  // namespace ronde
