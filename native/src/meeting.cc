#include "meeting.h"

#include <algorithm>
#include <cstring>

#include "link/link.h"

namespace ronde {

void Meeting::meet(Team& team, const CallHeader& mine, bool trusted) {
  uint32_t which = count_++ & 1;
  headers_.clear();
  if (team.segment == nullptr) {
    headers_.push_back(mine);
  } else {
    team.segment->member_state(topology_.local_index).header[which] = mine;
    team.barrier.arrive_and_wait(team.wait);
    for (uint32_t local = 0; local < topology_.num_local(); ++local)
      headers_.push_back(team.segment->member_state(local).header[which]);
  }
  if (topology_.single_host() || trusted) return;
  if (topology_.is_leader()) trade_between_places(team);
  if (team.segment == nullptr) return;
  CallHeader* shared = team.segment->all_headers();
  if (topology_.is_leader()) std::copy(headers_.begin(), headers_.end(), shared);
  team.barrier.arrive_and_wait(team.wait);
  headers_.assign(shared, shared + topology_.size);
}

void Meeting::trade_between_places(Team& team) {
  uint32_t places = topology_.num_hosts(), mine = topology_.my_host;
  auto members_from = [&](uint32_t first, uint32_t num) {  // of num places, from `first` on, round and round
    size_t members = 0;
    for (uint32_t i = 0; i < num; ++i) members += topology_.members_by_host[(first + i) % places].size();
    return members;
  };
  // I hold the headers of places mine, mine + 1, …, mine + held - 1; each step about doubles that.
  std::vector<CallHeader> gathered = headers_;
  for (uint32_t held = 1; held < places;) {
    uint32_t num = std::min(held, places - held);
    uint32_t ahead = (mine + held) % places, behind = (mine + places - held) % places;
    size_t give = members_from(mine, num), take = members_from(ahead, num), have = gathered.size();
    gathered.resize(have + take);
    send_receive(team.wait, team.link(topology_.host_leader(behind)), gathered.data(), give * sizeof(CallHeader),
                 team.link(topology_.host_leader(ahead)), gathered.data() + have, take * sizeof(CallHeader));
    held += num;
  }
  headers_.resize(topology_.size);
  size_t next = 0;
  for (uint32_t i = 0; i < places; ++i)
    for (uint32_t member : topology_.members_by_host[(mine + i) % places]) headers_[member] = gathered[next++];
}

namespace {

bool same(const CallHeader& a, const CallHeader& b) {
  bool counts_may_differ = a.kind == RD_ALLGATHER || a.kind == RD_ALLTOALL;
  return a.sequence == b.sequence && a.signature == b.signature && a.kind == b.kind && a.dtype == b.dtype &&
         a.op == b.op && a.peer == b.peer && a.algorithm == b.algorithm && a.in_bucket == b.in_bucket &&
         a.bucket_offset == b.bucket_offset && a.prescale == b.prescale && a.postscale == b.postscale &&
         (counts_may_differ || a.count == b.count);
}

}  // namespace

Verdict judge(const std::vector<CallHeader>& headers, const CallHeader** asked) {
  *asked = nullptr;
  bool someone_joined = false;
  for (const CallHeader& header : headers) {
    if (header.kind == RD_JOIN) {
      someone_joined = true;
    } else if (*asked == nullptr) {
      *asked = &header;
    } else if (!same(**asked, header)) {
      return Verdict::kDiffer;
    }
  }
  if (*asked == nullptr) return Verdict::kEveryoneJoined;
  bool may_join = (*asked)->kind == RD_ALLREDUCE || (*asked)->kind == RD_BARRIER;
  return someone_joined && !may_join ? Verdict::kDiffer : Verdict::kAgreed;
}

}  // namespace ronde
