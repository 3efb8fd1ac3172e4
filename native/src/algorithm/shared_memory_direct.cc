// Direct: the members of one host reduce straight out of each other's shared memory.
//
// An allreduce has three variants, by where the data is and how much there is:
//   bucket  The data is in shared memory. Every member reduces its share of the elements from all buckets and writes
//           the result into all of them. Nothing is copied.
//   small   Every member copies its array into its slot before the headers are matched. After the match every member
//           reduces all slots by itself, in the same order, so all get the same bits.
//   staged  A large array goes in chunks that stay in the cache. For each chunk the members copy it into their slots,
//           wait at the barrier (A), reduce their shares into the common result, wait at the barrier (B), and copy the
//           others' shares out. The next chunk is copied in before the wait at B.
//
// Two slots and two results suffice. When a member writes ... then no other still reads it, because ...
//   slot[c & 1] for chunk c      its readers reduced chunk c - 2 before they arrived at B(c - 2), which this one
//   awaited result[c & 1] for chunk c    its readers copied c - 2 out before they arrived at A(c), which this one
//   awaited
// slots_used goes on from call to call, and every call begins with a match, so this holds across calls too.
//
// The other collectives go through the slots in chunks, too, or without any copy when the data is in buckets: then
// every member reads what it needs out of the others' buckets, writes only what no other reads, and waits at the
// barrier until all have read.
//   reduce-scatter   reads its own share of all buckets and writes that of its own
//   allgather        reads each member's share in that member's bucket and writes the others' shares in its own
//   broadcast        reads the root's bucket, which nobody writes
#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"

namespace ronde {

namespace {

constexpr uint64_t kSmallBytes = 64 * 1024;  // the arrays of all members together, for the small variant

bool is_root(const CallContext& context, const Call& call) {
  return uint32_t(call.peer) == context.topology.member_index;
}

// Whether this member gets the result of a reduction.
bool gets_result(const CallContext& context, const Call& call) {
  return call.kind != RD_REDUCE || is_root(context, call);
}

bool is_small(const CallContext& context, const Call& call) {
  uint64_t limit = std::min(kSmallBytes / context.topology.num_local(), context.topology.slot_bytes);
  return call.spans.bytes() <= limit;
}

uint32_t local_index(const CallContext& context) { return context.topology.local_index; }

// The chunks of the staged variant.
struct Chunks {
  Chunks(const CallContext& context, const Call& call)
      : bytes(call.spans.bytes()), step(context.topology.chunk_bytes / call.element_bytes() * call.element_bytes()) {}
  uint64_t num() const { return (bytes + step - 1) / step; }
  uint64_t begin(uint64_t chunk) const { return chunk * step; }
  uint64_t size(uint64_t chunk) const { return std::min(step, bytes - chunk * step); }

  uint64_t bytes, step;
};

Range bytes_of_share(const CallContext& context, const Call& call, uint64_t chunk_bytes, uint32_t who) {
  uint64_t width = call.element_bytes();
  Range share = share_of(chunk_bytes / width, who, context.topology.num_local(), width);
  return {share.begin * width, share.end * width};
}

// Copies a chunk into this member's slot. Its own share is read in place when it is contiguous, and not copied.
void copy_in(CallContext& context, const Call& call, const Chunks& chunks, uint64_t chunk, uint32_t which) {
  char* slot = context.segment->slot(local_index(context), which);
  uint64_t begin = chunks.begin(chunk), size = chunks.size(chunk);
  Range mine = bytes_of_share(context, call, size, local_index(context));
  call.spans.gather(begin, mine.begin, slot);
  if (call.spans.contiguous_in(begin + mine.begin, mine.size()) == nullptr)
    call.spans.gather(begin + mine.begin, mine.size(), slot + mine.begin);
  call.spans.gather(begin + mine.end, size - mine.end, slot + mine.end);
}

void reduce_share(CallContext& context, const Call& call, const Chunks& chunks, uint64_t chunk, uint32_t which) {
  Range mine = bytes_of_share(context, call, chunks.size(chunk), local_index(context));
  if (mine.size() == 0) return;
  uint64_t begin = chunks.begin(chunk) + mine.begin;
  const void* ins[RD_MAX_LOCAL_MEMBERS];
  for (uint32_t local = 0; local < context.topology.num_local(); ++local)
    ins[local] = context.segment->slot(local, which) + mine.begin;
  if (const char* own = call.spans.contiguous_in(begin, mine.size())) ins[local_index(context)] = own;
  char* result = context.segment->result(which) + mine.begin;
  char* output = gets_result(context, call) ? call.spans.contiguous_out(begin, mine.size()) : nullptr;
  void* outs[2] = {result, output};
  reduce_many(call.reduce_params, ins, context.topology.num_local(), outs, output != nullptr ? 2 : 1,
              mine.size() / call.element_bytes(), false);
  if (output == nullptr && gets_result(context, call)) call.spans.scatter(begin, mine.size(), result);
}

void copy_out(CallContext& context, const Call& call, const Chunks& chunks, uint64_t chunk, uint32_t which) {
  if (!gets_result(context, call)) return;
  const char* result = context.segment->result(which);
  uint64_t begin = chunks.begin(chunk), size = chunks.size(chunk);
  Range mine = bytes_of_share(context, call, size, local_index(context));
  call.spans.scatter(begin, mine.begin, result);
  call.spans.scatter(begin + mine.end, size - mine.end, result + mine.end);
}

void staged_allreduce(CallContext& context, const Call& call) {
  Chunks chunks(context, call);
  for (uint64_t chunk = 0; chunk < chunks.num(); ++chunk, ++context.slots_used) {
    bool more = chunk + 1 < chunks.num();
    reduce_share(context, call, chunks, chunk, context.slots_used & 1);
    uint32_t reduced = context.barrier.arrive(), staged = 0;
    if (more) {
      copy_in(context, call, chunks, chunk + 1, (context.slots_used + 1) & 1);
      staged = context.barrier.arrive();
    }
    context.barrier.wait(reduced, context.wait);
    copy_out(context, call, chunks, chunk, context.slots_used & 1);
    if (more) context.barrier.wait(staged, context.wait);
  }
}

void small_allreduce(CallContext& context, const Call& call) {
  uint32_t which = context.slots_used++ & 1;
  if (!gets_result(context, call)) return;
  const void* ins[RD_MAX_LOCAL_MEMBERS];
  for (uint32_t local = 0; local < context.topology.num_local(); ++local)
    ins[local] = context.segment->slot(local, which);
  char* output = call.spans.contiguous_out(0, call.spans.bytes());
  void* out = output != nullptr ? output : context.contiguous.get(call.spans.bytes());
  reduce_many(call.reduce_params, ins, context.topology.num_local(), &out, 1, call.spans.count(), false);
  if (output == nullptr) call.spans.scatter(0, call.spans.bytes(), static_cast<char*>(out));
}

void bucket_allreduce(CallContext& context, const Call& call) {
  uint32_t num_local = context.topology.num_local();
  uint64_t width = call.element_bytes();
  Range mine = share_of(call.spans.count(), local_index(context), num_local, width);
  void* buckets[RD_MAX_LOCAL_MEMBERS];
  for (uint32_t local = 0; local < num_local; ++local)
    buckets[local] = context.bucket(local, call) + mine.begin * width;
  reduce_many(call.reduce_params, buckets, num_local, buckets, num_local, mine.size(), false);
  context.barrier.arrive_and_wait(context.wait);
}

void bucket_reduce_scatter(CallContext& context, const Call& call) {
  uint32_t me = local_index(context);  // on one host a member's index is also its local index
  uint64_t begin = starts_of(call.counts, call.element_bytes())[me];
  const void* ins[RD_MAX_LOCAL_MEMBERS];
  for (uint32_t local = 0; local < context.topology.num_local(); ++local)
    ins[local] = context.bucket(local, call) + begin;
  void* out = context.bucket(me, call) + begin;
  reduce_many(call.reduce_params, ins, context.topology.num_local(), &out, 1, call.counts[me], false);
  context.barrier.arrive_and_wait(context.wait);
}

void bucket_allgather(CallContext& context, const Call& call) {
  std::vector<uint64_t> starts = starts_of(call.counts, call.element_bytes());
  char* own = context.bucket(local_index(context), call);
  for (uint32_t local = 0; local < context.topology.num_local(); ++local)
    copy_bytes(own + starts[local], context.bucket(local, call) + starts[local], starts[local + 1] - starts[local],
               false);
  context.barrier.arrive_and_wait(context.wait);
}

void bucket_broadcast(CallContext& context, const Call& call) {
  copy_bytes(context.bucket(local_index(context), call), context.bucket(uint32_t(call.peer), call), call.spans.bytes(),
             false);
  context.barrier.arrive_and_wait(context.wait);
}

// Runs a collective chunk by chunk: `fill` writes a chunk into this member's slot, `use` reads the slots of all. Chunk
// 0 was filled before the headers were matched.
template <class Fill, class Use>
void exchange_slots(CallContext& context, uint64_t num_chunks, Fill fill, Use use) {
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk, ++context.slots_used) {
    use(chunk, context.slots_used & 1);
    if (chunk + 1 == num_chunks) continue;
    fill(chunk + 1, (context.slots_used + 1) & 1);
    context.barrier.arrive_and_wait(context.wait);
  }
}

uint64_t num_chunks(uint64_t bytes, uint64_t step) { return (bytes + step - 1) / step; }

void fill_broadcast(CallContext& context, const Call& call, uint64_t chunk, uint32_t which) {
  if (!is_root(context, call)) return;
  uint64_t step = context.topology.chunk_bytes, begin = chunk * step;
  if (begin >= call.spans.bytes()) return;
  call.spans.gather(begin, std::min(step, call.spans.bytes() - begin),
                    context.segment->slot(local_index(context), which));
}

// Of an allgather and of a gather.
void fill_gather(CallContext& context, const Call& call, uint64_t chunk, uint32_t which) {
  uint64_t step = context.topology.chunk_bytes, begin = chunk * step;
  uint64_t bytes = call.counts[context.topology.member_index] * call.element_bytes();
  if (begin >= bytes) return;
  copy_bytes(context.segment->slot(local_index(context), which), static_cast<const char*>(call.spans[0].input) + begin,
             std::min(step, bytes - begin), false);
}

// Copies one chunk of every member to its place in the result.
void use_gather(CallContext& context, const Call& call, uint64_t chunk, uint32_t which) {
  uint64_t step = context.topology.chunk_bytes;
  char* out = static_cast<char*>(call.spans[0].output);
  for (uint32_t member = 0; member < context.topology.size; ++member) {
    uint64_t bytes = call.counts[member] * call.element_bytes(), begin = std::min(bytes, chunk * step);
    copy_bytes(out + begin, context.segment->slot(member, which), std::min(step, bytes - begin), false);
    out += bytes;
  }
}

uint64_t num_gather_chunks(const CallContext& context, const Call& call) {
  uint64_t longest = *std::max_element(call.counts.begin(), call.counts.end());
  return num_chunks(longest * call.element_bytes(), context.topology.chunk_bytes);
}

// A chunk of a reduce-scatter or scatter has an equal piece of every member's share, so that all work in every chunk.
struct ScatterPlan {
  ScatterPlan(const CallContext& context, const Call& call) : width(call.element_bytes()) {
    step = std::max<uint64_t>(1, context.topology.chunk_bytes / width / context.topology.num_local());
    starts.push_back(0);
    for (uint64_t count : call.counts) {
      starts.push_back(starts.back() + count);
      longest = std::max(longest, count);
    }
  }
  Range piece(uint32_t member, uint64_t chunk) const {  // elements, counted from the start of the member's share
    uint64_t count = starts[member + 1] - starts[member];
    return {std::min(count, chunk * step), std::min(count, (chunk + 1) * step)};
  }
  uint64_t num() const { return num_chunks(longest, step); }

  uint64_t width, step, longest = 0;
  std::vector<uint64_t> starts;
};

// Of a reduce-scatter and of a scatter.
void fill_scatter(CallContext& context, const Call& call, const ScatterPlan& plan, uint64_t chunk, uint32_t which) {
  if (call.kind == RD_SCATTER && !is_root(context, call)) return;
  const char* input = static_cast<const char*>(call.spans[0].input);
  char* slot = context.segment->slot(local_index(context), which);
  for (uint32_t member = 0; member < context.topology.size; ++member) {
    Range piece = plan.piece(member, chunk);
    copy_bytes(slot + member * plan.step * plan.width, input + (plan.starts[member] + piece.begin) * plan.width,
               piece.size() * plan.width, false);
  }
}

}  // namespace

void direct_prepare(CallContext& context, const Call& call) {
  uint32_t which = context.slots_used & 1;
  if (call.in_bucket) return;
  switch (call.kind) {
    case RD_ALLREDUCE:
    case RD_REDUCE:
      if (call.spans.bytes() == 0) return;
      if (is_small(context, call)) {
        call.spans.gather(0, call.spans.bytes(), context.segment->slot(local_index(context), which));
      } else {
        copy_in(context, call, Chunks(context, call), 0, which);
      }
      break;
    case RD_BROADCAST:
      fill_broadcast(context, call, 0, which);
      break;
    case RD_ALLGATHER:
    case RD_GATHER:
      fill_gather(context, call, 0, which);
      break;
    case RD_REDUCE_SCATTER:
    case RD_SCATTER:
      fill_scatter(context, call, ScatterPlan(context, call), 0, which);
      break;
    default:
      break;
  }
}

void direct_prepare_zeros(CallContext& context) {
  std::memset(context.segment->slot(local_index(context), context.slots_used & 1), 0,
              std::min(context.topology.slot_bytes, std::max(context.topology.chunk_bytes, kSmallBytes)));
}

void direct_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  if (call.in_bucket) return bucket_allreduce(context, call);
  if (is_small(context, call)) return small_allreduce(context, call);
  staged_allreduce(context, call);
}

// An allreduce whose result only the root copies.
void direct_reduce(CallContext& context, const Call& call) { direct_allreduce(context, call); }

void direct_broadcast(CallContext& context, const Call& call) {
  if (call.in_bucket) return bucket_broadcast(context, call);
  uint64_t step = context.topology.chunk_bytes, bytes = call.spans.bytes();
  uint32_t root = uint32_t(call.peer);
  bool mine = root == context.topology.member_index;
  exchange_slots(
      context, num_chunks(bytes, step),
      [&](uint64_t chunk, uint32_t which) { fill_broadcast(context, call, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        // On one host a member's index is also its local index.
        if (!mine)
          call.spans.scatter(chunk * step, std::min(step, bytes - chunk * step), context.segment->slot(root, which));
      });
  if (!mine) return;
  for (const rd_span& span : call.spans) copy_bytes(span.output, span.input, span.count * call.element_bytes(), false);
}

void direct_allgather(CallContext& context, const Call& call) {
  if (call.in_bucket) return bucket_allgather(context, call);
  exchange_slots(
      context, num_gather_chunks(context, call),
      [&](uint64_t chunk, uint32_t which) { fill_gather(context, call, chunk, which); },
      [&](uint64_t chunk, uint32_t which) { use_gather(context, call, chunk, which); });
}

void direct_gather(CallContext& context, const Call& call) {
  exchange_slots(
      context, num_gather_chunks(context, call),
      [&](uint64_t chunk, uint32_t which) { fill_gather(context, call, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        if (is_root(context, call)) use_gather(context, call, chunk, which);
      });
}

void direct_reduce_scatter(CallContext& context, const Call& call) {
  if (call.in_bucket) return bucket_reduce_scatter(context, call);
  ScatterPlan plan(context, call);
  uint32_t mine = context.topology.member_index;
  char* out = static_cast<char*>(call.spans[0].output);
  exchange_slots(
      context, plan.num(), [&](uint64_t chunk, uint32_t which) { fill_scatter(context, call, plan, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        Range piece = plan.piece(mine, chunk);
        const void* ins[RD_MAX_LOCAL_MEMBERS];
        for (uint32_t local = 0; local < context.topology.num_local(); ++local)
          ins[local] = context.segment->slot(local, which) + mine * plan.step * plan.width;
        void* result = out + piece.begin * plan.width;
        reduce_many(call.reduce_params, ins, context.topology.num_local(), &result, 1, piece.size(), false);
      });
}

void direct_scatter(CallContext& context, const Call& call) {
  ScatterPlan plan(context, call);
  uint32_t mine = context.topology.member_index, root = uint32_t(call.peer);
  char* out = static_cast<char*>(call.spans[0].output);
  exchange_slots(
      context, plan.num(), [&](uint64_t chunk, uint32_t which) { fill_scatter(context, call, plan, chunk, which); },
      [&](uint64_t chunk, uint32_t which) {
        Range piece = plan.piece(mine, chunk);
        copy_bytes(out + piece.begin * plan.width, context.segment->slot(root, which) + mine * plan.step * plan.width,
                   piece.size() * plan.width, false);
      });
}

}  // namespace ronde
