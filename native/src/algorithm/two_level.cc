// Two levels: shared memory inside a host, a ring (or doubling, for little) between hosts.
//
//   1. inside  each local member reduces its share of the elements from everyone on its host into one common array
//   2. across  the array is cut into *lanes*, as many as the smallest host has members; the i-th member of every host
//              allreduces lane i with the i-th members of the others
//   3. inside  everyone copies the result
//
// Each host puts every byte on the wire once, not once per member. For buckets the common array is the first local
// member's bucket; for arrays it is the staging result, slot by slot.
#include <algorithm>

#include "algorithm/algorithm.h"
#include "algorithm/flat_array.h"

namespace ronde {

namespace {

constexpr uint64_t kDoublingBytes = 64 * 1024;

// Without the mean's division and the scaling after it, or with nothing but them.
Arithmetic inside(const Job& job) {
  Arithmetic plain = job.arithmetic;
  if (plain.op == RD_MEAN) plain.op = RD_SUM;
  plain.postscale = 1.0;
  return plain;
}

void across(Team& team, const Job& job, char* common, uint64_t count) {
  uint32_t lanes = team.layout.num_lanes(), lane = team.layout.my_local;
  if (lane >= lanes) return;
  std::vector<uint32_t> order;
  for (const auto& members : team.layout.by_place) order.push_back(members[lane]);
  Range mine = share_of(count, lane, lanes, job.element_bytes());
  if (mine.size() == 0) return;
  char* data = common + mine.begin * job.element_bytes();
  bool small = mine.size() * job.element_bytes() <= kDoublingBytes;
  (small ? doubling_allreduce_flat : ring_allreduce_flat)(team, order, team.layout.my_place, job.arithmetic, data,
                                                          mine.size());
}

void in_buckets(Team& team, const Job& job) {
  uint32_t locals = team.layout.num_locals(), me = team.layout.my_local;
  uint64_t width = job.element_bytes();
  Range mine = share_of(job.parts.count(), me, locals, width);
  const void* ins[RD_MAX_MEMBERS];
  for (uint32_t local = 0; local < locals; ++local)
    ins[local] = team.segment->bucket(local) + job.bucket_offset + mine.begin * width;
  char* common = team.segment->bucket(0) + job.bucket_offset;
  void* out = common + mine.begin * width;
  reduce_many(inside(job), ins, locals, &out, 1, mine.size(), false);
  team.gate.meet(team.waiter);
  across(team, job, common, job.parts.count());
  team.gate.meet(team.waiter);
  if (me != 0) copy_bytes(team.segment->bucket(me) + job.bucket_offset, common, job.parts.bytes(), false);
  team.gate.meet(team.waiter);  // the first member's bucket is read until here
}

void in_slots(Team& team, const Job& job) {
  uint32_t locals = team.layout.num_locals(), me = team.layout.my_local;
  uint64_t width = job.element_bytes(), bytes = job.parts.bytes();
  uint64_t step = team.layout.slot_bytes / width * width;
  for (uint64_t begin = 0; begin < bytes; begin += step, ++team.slot) {
    uint64_t size = std::min(step, bytes - begin);
    uint32_t which = team.slot & 1;
    job.parts.gather(begin, size, team.segment->slot(me, which));
    team.gate.meet(team.waiter);
    Range mine = share_of(size / width, me, locals, width);
    const void* ins[RD_MAX_MEMBERS];
    for (uint32_t local = 0; local < locals; ++local)
      ins[local] = team.segment->slot(local, which) + mine.begin * width;
    char* common = team.segment->result(which);
    void* out = common + mine.begin * width;
    reduce_many(inside(job), ins, locals, &out, 1, mine.size(), false);
    team.gate.meet(team.waiter);
    across(team, job, common, size / width);
    team.gate.meet(team.waiter);
    job.parts.scatter(begin, size, common);
  }
}

// Alone at my place, while others are not: my own array is the common one.
void by_myself(Team& team, const Job& job) {
  uint64_t width = job.element_bytes(), bytes = job.parts.bytes();
  uint64_t step = job.in_bucket ? bytes : team.layout.slot_bytes / width * width;  // the same cuts as the others make
  FlatArray array(team, job);
  for (uint64_t begin = 0; begin < bytes; begin += step)
    across(team, job, array.data() + begin, std::min(step, bytes - begin) / width);
  array.deliver();
}

}  // namespace

void two_level_allreduce(Team& team, const Job& job) {
  if (job.parts.bytes() == 0) return;
  if (team.segment == nullptr) return by_myself(team, job);
  job.in_bucket ? in_buckets(team, job) : in_slots(team, job);
}

}  // namespace ronde
