#include "meeting.h"

#include <algorithm>
#include <cstring>

#include "link/transfer.h"

namespace ronde {

void Meeting::meet(Team& team, const Header& mine, bool trusted) {
  uint32_t which = count_++ & 1;
  headers_.clear();
  if (team.segment == nullptr) {
    headers_.push_back(mine);
  } else {
    team.segment->line(layout_.my_local).header[which] = mine;
    team.gate.meet(team.waiter);
    for (uint32_t local = 0; local < layout_.num_locals(); ++local)
      headers_.push_back(team.segment->line(local).header[which]);
  }
  if (layout_.one_place() || trusted) return;
  if (layout_.leader()) trade_between_places(team);
  if (team.segment == nullptr) return;
  Header* shared = team.segment->everyones_headers();
  if (layout_.leader()) std::copy(headers_.begin(), headers_.end(), shared);
  team.gate.meet(team.waiter);
  headers_.assign(shared, shared + layout_.size);
}

void Meeting::trade_between_places(Team& team) {
  uint32_t places = layout_.num_places(), mine = layout_.my_place;
  auto members_from = [&](uint32_t first, uint32_t num) {  // of num places, from `first` on, round and round
    size_t members = 0;
    for (uint32_t i = 0; i < num; ++i) members += layout_.by_place[(first + i) % places].size();
    return members;
  };
  // I hold the headers of places mine, mine + 1, …, mine + held - 1; each step about doubles that.
  std::vector<Header> gathered = headers_;
  for (uint32_t held = 1; held < places;) {
    uint32_t num = std::min(held, places - held);
    uint32_t ahead = (mine + held) % places, behind = (mine + places - held) % places;
    size_t give = members_from(mine, num), take = members_from(ahead, num), have = gathered.size();
    gathered.resize(have + take);
    exchange(team.waiter, team.link(layout_.leader_of(behind)), gathered.data(), give * sizeof(Header),
             team.link(layout_.leader_of(ahead)), gathered.data() + have, take * sizeof(Header));
    held += num;
  }
  headers_.resize(layout_.size);
  size_t next = 0;
  for (uint32_t i = 0; i < places; ++i)
    for (uint32_t member : layout_.by_place[(mine + i) % places]) headers_[member] = gathered[next++];
}

namespace {

bool same(const Header& a, const Header& b) {
  bool counts_may_differ = a.kind == RD_ALLGATHER || a.kind == RD_ALLTOALL;
  return a.sequence == b.sequence && a.signature == b.signature && a.kind == b.kind && a.dtype == b.dtype &&
         a.op == b.op && a.peer == b.peer && a.algorithm == b.algorithm && a.in_bucket == b.in_bucket &&
         a.offset == b.offset && a.prescale == b.prescale && a.postscale == b.postscale &&
         (counts_may_differ || a.count == b.count);
}

}  // namespace

Verdict judge(const std::vector<Header>& headers, const Header** asked) {
  *asked = nullptr;
  bool someone_joined = false;
  for (const Header& header : headers) {
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
