// Shared-memory direct reduce: members of one host reduce straight out of each other's memory.
//
// Three ways, by where the data is and how much there is:
//   bucket  the data lives in shared memory. Everyone reduces its share of the elements from all buckets and writes the
//           result into all of them. Nothing is copied.
//   flat    a small array. Everyone copies its array into its slot; after the meeting everyone reduces all slots by
//           itself, in the same order, so all get the same bits. One meeting in all.
//   staged  a large array, in chunks that stay in the cache. Chunk by chunk: copy in, meet (A), reduce my share into
//   the
//           common result, meet (B), copy the others' shares out. The next chunk is copied in before waiting for B.
//
// Two slots and two results suffice. When I write ... then nobody still reads it, because ...
//   slot[c & 1] for chunk c      its readers reduced chunk c - 2 before they arrived at B(c - 2), which I waited for
//   result[c & 1] for chunk c    its readers copied c - 2 out before they arrived at A(c), which I waited for
// The count of chunks goes on from call to call, and every call begins with a meeting, so this holds across calls too.
#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"

namespace ronde {

namespace {

constexpr uint64_t kFlatBytes = 64 * 1024;  // all members' arrays together, for the flat way

bool is_flat(const Team& team, const Job& job) { return job.parts.bytes() * team.topology.num_local() <= kFlatBytes; }

uint32_t me(const Team& team) { return team.topology.local_index; }

// Chunks of the staged way.
struct Chunks {
  Chunks(const Team& team, const Job& job)
      : bytes(job.parts.bytes()), step(team.topology.chunk_bytes / job.element_bytes() * job.element_bytes()) {}
  uint64_t num() const { return (bytes + step - 1) / step; }
  uint64_t begin(uint64_t chunk) const { return chunk * step; }
  uint64_t size(uint64_t chunk) const { return std::min(step, bytes - chunk * step); }

  uint64_t bytes, step;
};

Range bytes_of_share(const Team& team, const Job& job, uint64_t chunk_bytes, uint32_t who) {
  uint64_t width = job.element_bytes();
  Range share = share_of(chunk_bytes / width, who, team.topology.num_local(), width);
  return {share.begin * width, share.end * width};
}

// Into my slot, all but my own share, which I read where it is (when it is in one piece).
void copy_in(Team& team, const Job& job, const Chunks& chunks, uint64_t chunk, uint32_t which) {
  char* slot = team.segment->slot(me(team), which);
  uint64_t begin = chunks.begin(chunk), size = chunks.size(chunk);
  Range mine = bytes_of_share(team, job, size, me(team));
  job.parts.gather(begin, mine.begin, slot);
  if (job.parts.plain_in(begin + mine.begin, mine.size()) == nullptr)
    job.parts.gather(begin + mine.begin, mine.size(), slot + mine.begin);
  job.parts.gather(begin + mine.end, size - mine.end, slot + mine.end);
}

void reduce_share(Team& team, const Job& job, const Chunks& chunks, uint64_t chunk, uint32_t which) {
  Range mine = bytes_of_share(team, job, chunks.size(chunk), me(team));
  if (mine.size() == 0) return;
  uint64_t begin = chunks.begin(chunk) + mine.begin;
  const void* ins[RD_MAX_MEMBERS];
  for (uint32_t local = 0; local < team.topology.num_local(); ++local)
    ins[local] = team.segment->slot(local, which) + mine.begin;
  if (const char* plain = job.parts.plain_in(begin, mine.size())) ins[me(team)] = plain;
  char* result = team.segment->result(which) + mine.begin;
  char* target = job.parts.plain_out(begin, mine.size());
  void* outs[2] = {result, target};
  reduce_many(job.arithmetic, ins, team.topology.num_local(), outs, target != nullptr ? 2 : 1,
              mine.size() / job.element_bytes(), false);
  if (target == nullptr) job.parts.scatter(begin, mine.size(), result);
}

void copy_out(Team& team, const Job& job, const Chunks& chunks, uint64_t chunk, uint32_t which) {
  const char* result = team.segment->result(which);
  uint64_t begin = chunks.begin(chunk), size = chunks.size(chunk);
  Range mine = bytes_of_share(team, job, size, me(team));
  job.parts.scatter(begin, mine.begin, result);
  job.parts.scatter(begin + mine.end, size - mine.end, result + mine.end);
}

void staged_allreduce(Team& team, const Job& job) {
  Chunks chunks(team, job);
  for (uint64_t chunk = 0; chunk < chunks.num(); ++chunk, ++team.slot) {
    bool more = chunk + 1 < chunks.num();
    reduce_share(team, job, chunks, chunk, team.slot & 1);
    uint32_t reduced = team.barrier.arrive(), staged = 0;
    if (more) {
      copy_in(team, job, chunks, chunk + 1, (team.slot + 1) & 1);
      staged = team.barrier.arrive();
    }
    team.barrier.wait(reduced, team.wait);
    copy_out(team, job, chunks, chunk, team.slot & 1);
    if (more) team.barrier.wait(staged, team.wait);
  }
}

void flat_allreduce(Team& team, const Job& job) {
  const void* ins[RD_MAX_MEMBERS];
  for (uint32_t local = 0; local < team.topology.num_local(); ++local)
    ins[local] = team.segment->slot(local, team.slot & 1);
  char* plain = job.parts.plain_out(0, job.parts.bytes());
  void* out = plain != nullptr ? plain : team.flat.room(job.parts.bytes());
  reduce_many(job.arithmetic, ins, team.topology.num_local(), &out, 1, job.parts.count(), false);
  if (plain == nullptr) job.parts.scatter(0, job.parts.bytes(), static_cast<char*>(out));
  ++team.slot;
}

void bucket_allreduce(Team& team, const Job& job) {
  uint32_t locals = team.topology.num_local();
  uint64_t width = job.element_bytes();
  Range mine = share_of(job.parts.count(), me(team), locals, width);
  void* buckets[RD_MAX_MEMBERS];
  for (uint32_t local = 0; local < locals; ++local)
    buckets[local] = team.segment->bucket(local) + job.bucket_offset + mine.begin * width;
  reduce_many(job.arithmetic, buckets, locals, buckets, locals, mine.size(), false);
  team.barrier.arrive_and_wait(team.wait);
}

// The collectives that only pass slots on: `fill` puts chunk c into my slot, `use` reads everybody's.
// Chunk 0 was filled before the meeting that began the call.
template <class Fill, class Use>
void pass_slots(Team& team, uint64_t num_chunks, Fill fill, Use use) {
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk, ++team.slot) {
    use(chunk, team.slot & 1);
    if (chunk + 1 == num_chunks) continue;
    fill(chunk + 1, (team.slot + 1) & 1);
    team.barrier.arrive_and_wait(team.wait);
  }
}

uint64_t num_chunks(uint64_t bytes, uint64_t step) { return (bytes + step - 1) / step; }

void fill_broadcast(Team& team, const Job& job, uint64_t chunk, uint32_t which) {
  if (uint32_t(job.root) != team.topology.member_index) return;
  uint64_t step = team.topology.chunk_bytes, begin = chunk * step;
  if (begin >= job.parts.bytes()) return;
  job.parts.gather(begin, std::min(step, job.parts.bytes() - begin), team.segment->slot(me(team), which));
}

void fill_allgather(Team& team, const Job& job, uint64_t chunk, uint32_t which) {
  uint64_t step = team.topology.chunk_bytes, begin = chunk * step;
  uint64_t bytes = job.counts[team.topology.member_index] * job.element_bytes();
  if (begin >= bytes) return;
  copy_bytes(team.segment->slot(me(team), which), static_cast<const char*>(job.parts.pieces()[0].in) + begin,
             std::min(step, bytes - begin), false);
}

// A chunk of a reduce-scatter holds an equal piece of every member's share, so that all have work in every chunk.
struct ScatterPlan {
  ScatterPlan(const Team& team, const Job& job) : width(job.element_bytes()) {
    step = std::max<uint64_t>(1, team.topology.chunk_bytes / width / team.topology.num_local());
    starts.push_back(0);
    for (uint64_t count : job.counts) {
      starts.push_back(starts.back() + count);
      longest = std::max(longest, count);
    }
  }
  Range piece(uint32_t member, uint64_t chunk) const {  // elements, counted from the start of its share
    uint64_t count = starts[member + 1] - starts[member];
    return {std::min(count, chunk * step), std::min(count, (chunk + 1) * step)};
  }
  uint64_t num() const { return num_chunks(longest, step); }

  uint64_t width, step, longest = 0;
  std::vector<uint64_t> starts;
};

void fill_reduce_scatter(Team& team, const Job& job, const ScatterPlan& plan, uint64_t chunk, uint32_t which) {
  char* slot = team.segment->slot(me(team), which);
  for (uint32_t member = 0; member < team.topology.size; ++member) {
    Range piece = plan.piece(member, chunk);
    job.parts.gather((plan.starts[member] + piece.begin) * plan.width, piece.size() * plan.width,
                     slot + member * plan.step * plan.width);
  }
}

}  // namespace

void direct_prepare(Team& team, const Job& job) {
  uint32_t which = team.slot & 1;
  if (job.in_bucket || job.parts.bytes() == 0) {
    if (job.kind != RD_ALLGATHER) return;
  }
  switch (job.kind) {
    case RD_ALLREDUCE:
      if (is_flat(team, job)) {
        job.parts.gather(0, job.parts.bytes(), team.segment->slot(me(team), which));
      } else {
        copy_in(team, job, Chunks(team, job), 0, which);
      }
      break;
    case RD_BROADCAST:
      fill_broadcast(team, job, 0, which);
      break;
    case RD_ALLGATHER:
      fill_allgather(team, job, 0, which);
      break;
    case RD_REDUCE_SCATTER:
      fill_reduce_scatter(team, job, ScatterPlan(team, job), 0, which);
      break;
    default:
      break;
  }
}

void direct_prepare_zeros(Team& team) {
  std::memset(team.segment->slot(me(team), team.slot & 1), 0, std::max(team.topology.chunk_bytes, kFlatBytes));
}

void direct_allreduce(Team& team, const Job& job) {
  if (job.parts.bytes() == 0) return;
  if (job.in_bucket) return bucket_allreduce(team, job);
  if (is_flat(team, job)) return flat_allreduce(team, job);
  staged_allreduce(team, job);
}

void direct_broadcast(Team& team, const Job& job) {
  uint64_t step = team.topology.chunk_bytes, bytes = job.parts.bytes();
  uint32_t root = uint32_t(job.root);
  bool mine = root == team.topology.member_index;
  pass_slots(
      team, num_chunks(bytes, step), [&](uint64_t chunk, uint32_t which) { fill_broadcast(team, job, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        // On one host a member's index is its local index.
        if (!mine)
          job.parts.scatter(chunk * step, std::min(step, bytes - chunk * step), team.segment->slot(root, which));
      });
  if (!mine) return;
  for (const rd_part& part : job.parts.pieces()) copy_bytes(part.out, part.in, part.count * job.element_bytes(), false);
}

void direct_allgather(Team& team, const Job& job) {
  uint64_t step = team.topology.chunk_bytes, width = job.element_bytes(), longest = 0;
  for (uint64_t count : job.counts) longest = std::max(longest, count * width);
  char* out = static_cast<char*>(job.parts.pieces()[0].out);
  pass_slots(
      team, num_chunks(longest, step), [&](uint64_t chunk, uint32_t which) { fill_allgather(team, job, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        uint64_t start = 0;
        for (uint32_t member = 0; member < team.topology.size; ++member) {
          uint64_t bytes = job.counts[member] * width, begin = std::min(bytes, chunk * step);
          copy_bytes(out + start + begin, team.segment->slot(member, which), std::min(step, bytes - begin), false);
          start += bytes;
        }
      });
}

void direct_reduce_scatter(Team& team, const Job& job) {
  ScatterPlan plan(team, job);
  uint32_t mine = team.topology.member_index;
  char* out = static_cast<char*>(job.parts.pieces()[0].out);
  pass_slots(
      team, plan.num(), [&](uint64_t chunk, uint32_t which) { fill_reduce_scatter(team, job, plan, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        Range piece = plan.piece(mine, chunk);
        const void* ins[RD_MAX_MEMBERS];
        for (uint32_t local = 0; local < team.topology.num_local(); ++local)
          ins[local] = team.segment->slot(local, which) + mine * plan.step * plan.width;
        void* target = out + piece.begin * plan.width;
        reduce_many(job.arithmetic, ins, team.topology.num_local(), &target, 1, piece.size(), false);
      });
}

}  // namespace ronde
