// Two levels: shared memory inside a host; between hosts a ring, or for fewer bytes an algorithm of fewer steps.
//
//   1. inside   each local member reduces its share of the elements from all members of its host into a common array
//   2. between  the array is divided among the *cross groups*, as many as the smallest host has members; the i-th
//               members of all hosts allreduce the share of cross group i
//   3. inside   every member copies the result
//
// Each host sends every byte once, not once per member. The common array has partial results. For buckets it is the
// first local member's bucket; for arrays, and where partial results are wide, it is the staging result, slot by slot.
// The network should never wait for copies: while chunk c travels, each member copies chunk c - 1 out and chunk c + 1
// in, a piece at a time (StagedRun).
#include <algorithm>

#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"
#include "choose_algorithm.h"

namespace ronde {

namespace {

// `common` has the partial results of this host's members. The results may be the same memory unless those are wide.
void allreduce_between_hosts(Group& group, const Call& call, char* common, char* results, uint64_t count) {
  uint32_t num_cross_groups = group.topology.num_cross_groups(), cross_group = group.topology.local_index;
  if (cross_group >= num_cross_groups) return;
  std::vector<uint32_t> members;
  for (const auto& local_members : group.topology.members_by_host) members.push_back(local_members[cross_group]);
  Range mine = share_of(count, cross_group, num_cross_groups, call.element_bytes());
  if (mine.size() == 0) return;
  const ReduceParams& params = call.reduce_params;
  char* partials = common + mine.begin * partial_bytes(params);
  results += mine.begin * call.element_bytes();
  uint32_t position = group.topology.my_host;
  switch (choose_allreduce_between_hosts(group.topology.num_hosts(), mine.size() * partial_bytes(params))) {
    case RD_DOUBLING:
      return recursive_doubling_allreduce_among(group, members, position, params, partials, results, mine.size());
    case RD_HALVING:
      return halving_doubling_allreduce_among(group, members, position, params, partials, results, mine.size());
    default:
      return ring_allreduce_among(group, members, position, params, {partials, Form::kPartial, partials, results},
                                  mine.size());
  }
}

void allreduce_buckets(Group& group, const Call& call) {
  uint32_t num_local = group.topology.num_local(), local_index = group.topology.local_index;
  uint64_t width = call.element_bytes();
  Range mine = share_of(call.spans.count(), local_index, num_local, width);
  const void* ins[RD_MAX_LOCAL_MEMBERS];
  for (uint32_t local = 0; local < num_local; ++local) ins[local] = group.bucket(local, call) + mine.begin * width;
  char* common = group.bucket(0, call);
  reduce_to_partial(call.reduce_params, ins, num_local, common + mine.begin * width, mine.size());
  group.barrier.arrive_and_wait(group.wait);
  allreduce_between_hosts(group, call, common, common, call.spans.count());
  group.barrier.arrive_and_wait(group.wait);
  if (local_index != 0) copy_bytes(group.bucket(local_index, call), common, call.spans.bytes(), false);
  group.barrier.arrive_and_wait(group.wait);  // the first member's bucket is read until then
}

// Returns the elements of a chunk: as many as fit into a staging result, with their partial results if those are wide.
uint64_t chunk_count(const Group& group, const Call& call) {
  const ReduceParams& params = call.reduce_params;
  if (!has_wide_partials(params)) return group.topology.slot_bytes / call.element_bytes();
  constexpr uint64_t kWholeLines = 64;  // so many elements of any width
  uint64_t count = group.topology.slot_bytes / (partial_bytes(params) + call.element_bytes());
  return count < kWholeLines ? count : count / kWholeLines * kWholeLines;
}

// The phases of the barrier come in this order for every member:
//   G(0) R(0)  G(1) R(1) X(0)  G(2) R(2) X(1)  …     G: gathered into slots   R: reduced   X: reduced between hosts
// When a member writes ... then no other still needs it, because ...
//   slot[c & 1] for chunk c     all reduced c - 2 before R(c - 2), which this one awaited before sending c - 2
//   result[c & 1] for chunk c   all copied c - 2 out before G(c), which this one awaits before reducing
// Data in a bucket needs no slots: it is reduced straight out of the buckets. When a member writes the result of chunk
// c into its bucket, all others have read that part, because they reduced c before R(c).
class StagedRun {
 public:
  StagedRun(Group& group, const Call& call)
      : group_(group),
        call_(call),
        width_(call.element_bytes()),
        chunk_count_(chunk_count(group, call)),
        step_(chunk_count_ * width_),
        num_chunks_((call.spans.bytes() + step_ - 1) / step_) {}

  void run() {
    begin(State::kGather, 0);
    finish_local_work();
    for (uint64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      group_.barrier.wait(reduced_, group_.wait);
      begin(chunk > 0 ? State::kScatter : State::kGather, chunk + 1);
      group_.wait.while_idle([this] { return do_piece(); });
      allreduce_between_hosts(group_, call_, common(chunk), results(chunk), size(chunk) / width_);
      group_.wait.while_idle(nullptr);
      finish_local_work();
      exchanged_ = group_.barrier.arrive();
    }
    begin(State::kScatter, num_chunks_ + 1);
    finish_local_work();
    group_.slots_used += uint32_t(num_chunks_);
  }

 private:
  enum class State { kScatter, kGather, kWaitGathered, kReduce, kDone };

  uint64_t size(uint64_t chunk) const { return std::min(step_, call_.spans.bytes() - chunk * step_); }
  uint32_t which(uint64_t chunk) const { return uint32_t(group_.slots_used + chunk) & 1; }
  char* common(uint64_t chunk) const { return group_.segment->result(which(chunk)); }
  char* results(uint64_t chunk) const {
    bool is_wide = has_wide_partials(call_.reduce_params);
    return common(chunk) + (is_wide ? chunk_count_ * partial_bytes(call_.reduce_params) : 0);
  }
  // Where the data of a member of this host is, from a byte of the chunk on.
  const char* input(uint32_t local, uint64_t chunk, uint64_t byte) const {
    if (call_.in_bucket) return group_.bucket(local, call_) + chunk * step_ + byte;
    return group_.segment->slot(local, which(chunk)) + byte;
  }

  // Starts with `state` on the local work of chunk `next`, which is to be copied in, and of chunk next - 2, which is to
  // be copied out.
  void begin(State state, uint64_t next) {
    state_ = state;
    next_ = next;
    done_ = 0;
  }

  void finish_local_work() {
    while (state_ != State::kDone) {
      if (do_piece()) continue;
      group_.barrier.wait(state_ == State::kScatter ? exchanged_ : gathered_, group_.wait);
    }
  }

  // Does one piece of the local work. Returns false when there is none, or when other members must arrive first.
  bool do_piece() {
    switch (state_) {
      case State::kScatter:
        return group_.barrier.is_complete(exchanged_) && scatter();
      case State::kGather:
        return gather();
      case State::kWaitGathered:
        if (!group_.barrier.is_complete(gathered_)) return false;
        state_ = State::kReduce;
        return true;
      case State::kReduce:
        return reduce();
      default:
        return false;
    }
  }

  bool scatter() {
    uint64_t chunk = next_ - 2, piece = std::min(kPieceBytes, size(chunk) - done_);
    call_.spans.scatter(chunk * step_ + done_, piece, results(chunk) + done_);
    done_ += piece;
    if (done_ == size(chunk)) begin(State::kGather, next_);
    return true;
  }

  bool gather() {
    if (next_ >= num_chunks_) {
      state_ = State::kDone;
      return false;
    }
    if (!call_.in_bucket) {
      uint64_t piece = std::min(kPieceBytes, size(next_) - done_);
      call_.spans.gather(next_ * step_ + done_, piece,
                         group_.segment->slot(group_.topology.local_index, which(next_)) + done_);
      done_ += piece;
      if (done_ < size(next_)) return true;
    }
    gathered_ = group_.barrier.arrive();
    begin(State::kWaitGathered, next_);
    return true;
  }

  bool reduce() {
    uint32_t num_local = group_.topology.num_local();
    Range mine = share_of(size(next_) / width_, group_.topology.local_index, num_local, width_);
    uint64_t begin_at = mine.begin * width_ + done_, piece = std::min(kPieceBytes, mine.size() * width_ - done_);
    const void* ins[RD_MAX_LOCAL_MEMBERS];
    for (uint32_t local = 0; local < num_local; ++local) ins[local] = input(local, next_, begin_at);
    char* out = common(next_) + begin_at / width_ * partial_bytes(call_.reduce_params);
    reduce_to_partial(call_.reduce_params, ins, num_local, out, piece / width_);
    done_ += piece;
    if (done_ < mine.size() * width_) return true;
    reduced_ = group_.barrier.arrive();
    state_ = State::kDone;
    return true;
  }

  static constexpr uint64_t kPieceBytes = 128 * 1024;

  Group& group_;
  const Call& call_;
  const uint64_t width_, chunk_count_, step_, num_chunks_;
  State state_ = State::kDone;
  uint64_t next_ = 0, done_ = 0;
  uint32_t gathered_ = 0, reduced_ = 0, exchanged_ = 0;
};

// The only member of its host has nothing to do inside: its own array is the common one.
void allreduce_only_local_member(Group& group, const Call& call) {
  ContiguousArray array(group, call);
  uint64_t count = call.spans.count(), width = call.element_bytes(), wide = partial_bytes(call.reduce_params);
  // The same chunks as on the other hosts.
  bool whole = call.in_bucket && !has_wide_partials(call.reduce_params);
  uint64_t step = whole ? count : chunk_count(group, call);
  char* partials = array.make_partials(group);
  for (uint64_t begin = 0; begin < count; begin += step)
    allreduce_between_hosts(group, call, partials + begin * wide, array.data() + begin * width,
                            std::min(step, count - begin));
  array.copy_out();
}

}  // namespace

void two_level_allreduce(Group& group, const Call& call) {
  if (call.spans.bytes() == 0) return;
  if (group.segment == nullptr) return allreduce_only_local_member(group, call);
  if (call.in_bucket && !has_wide_partials(call.reduce_params)) return allreduce_buckets(group, call);
  StagedRun(group, call).run();
}

}  // namespace ronde
