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
void allreduce_between_hosts(CallContext& context, const Call& call, char* common, char* results, uint64_t count) {
  uint32_t num_cross_groups = context.topology.num_cross_groups(), cross_group = context.topology.local_index;
  if (cross_group >= num_cross_groups) return;
  std::vector<uint32_t> members;
  for (const auto& local_members : context.topology.members_by_host) members.push_back(local_members[cross_group]);
  Range mine = share_of(count, cross_group, num_cross_groups, call.element_bytes());
  if (mine.size() == 0) return;
  const ReduceParams& params = call.reduce_params;
  char* partials = common + mine.begin * partial_bytes(params);
  results += mine.begin * call.element_bytes();
  uint32_t position = context.topology.my_host;
  switch (choose_allreduce_between_hosts(context.topology.num_hosts(), mine.size() * partial_bytes(params))) {
    case RD_DOUBLING:
      return recursive_doubling_allreduce_among(context, members, position, params, partials, results, mine.size());
    case RD_HALVING:
      return halving_doubling_allreduce_among(context, members, position, params, partials, results, mine.size());
    default:
      return ring_allreduce_among(context, members, position, params, {partials, Form::kPartial, partials, results},
                                  mine.size());
  }
}

void allreduce_buckets(CallContext& context, const Call& call) {
  uint32_t num_local = context.topology.num_local(), local_index = context.topology.local_index;
  uint64_t width = call.element_bytes();
  Range mine = share_of(call.spans.count(), local_index, num_local, width);
  const void* ins[RD_MAX_LOCAL_MEMBERS];
  for (uint32_t local = 0; local < num_local; ++local) ins[local] = context.bucket(local, call) + mine.begin * width;
  char* common = context.bucket(0, call);
  reduce_to_partial(call.reduce_params, ins, num_local, common + mine.begin * width, mine.size());
  context.barrier.arrive_and_wait(context.wait);
  allreduce_between_hosts(context, call, common, common, call.spans.count());
  context.barrier.arrive_and_wait(context.wait);
  if (local_index != 0) copy_bytes(context.bucket(local_index, call), common, call.spans.bytes(), false);
  context.barrier.arrive_and_wait(context.wait);  // the first member's bucket is read until then
}

// Returns the elements of a chunk: as many as fit into a staging result, with their partial results if those are wide.
uint64_t chunk_count(const CallContext& context, const Call& call) {
  const ReduceParams& params = call.reduce_params;
  if (!has_wide_partials(params)) return context.topology.slot_bytes / call.element_bytes();
  constexpr uint64_t kWholeLines = 64;  // so many elements of any width
  uint64_t count = context.topology.slot_bytes / (partial_bytes(params) + call.element_bytes());
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
  StagedRun(CallContext& context, const Call& call)
      : context_(context),
        call_(call),
        width_(call.element_bytes()),
        chunk_count_(chunk_count(context, call)),
        step_(chunk_count_ * width_),
        num_chunks_((call.spans.bytes() + step_ - 1) / step_) {}

  void run() {
    begin(TwoLevelState::kGather, 0);
    finish_local_work();
    for (uint64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      context_.barrier.wait(reduced_, context_.wait);
      begin(chunk > 0 ? TwoLevelState::kScatter : TwoLevelState::kGather, chunk + 1);
      context_.wait.while_idle([this] { return do_piece(); });
      allreduce_between_hosts(context_, call_, common(chunk), results(chunk), size(chunk) / width_);
      context_.wait.while_idle(nullptr);
      finish_local_work();
      exchanged_ = context_.barrier.arrive();
    }
    begin(TwoLevelState::kScatter, num_chunks_ + 1);
    finish_local_work();
    context_.slots_used += uint32_t(num_chunks_);
  }

 private:
  enum class TwoLevelState { kScatter, kGather, kWaitGathered, kReduce, kDone };

  uint64_t size(uint64_t chunk) const { return std::min(step_, call_.spans.bytes() - chunk * step_); }
  uint32_t which(uint64_t chunk) const { return uint32_t(context_.slots_used + chunk) & 1; }
  char* common(uint64_t chunk) const { return context_.segment->result(which(chunk)); }
  char* results(uint64_t chunk) const {
    bool is_wide = has_wide_partials(call_.reduce_params);
    return common(chunk) + (is_wide ? chunk_count_ * partial_bytes(call_.reduce_params) : 0);
  }
  // Where the data of a member of this host is, from a byte of the chunk on.
  const char* input(uint32_t local, uint64_t chunk, uint64_t byte) const {
    if (call_.in_bucket) return context_.bucket(local, call_) + chunk * step_ + byte;
    return context_.segment->slot(local, which(chunk)) + byte;
  }

  // Starts with `state` on the local work of chunk `next`, which is to be copied in, and of chunk next - 2, which is to
  // be copied out.
  void begin(TwoLevelState state, uint64_t next) {
    state_ = state;
    next_ = next;
    done_ = 0;
  }

  void finish_local_work() {
    while (state_ != TwoLevelState::kDone) {
      if (do_piece()) continue;
      context_.barrier.wait(state_ == TwoLevelState::kScatter ? exchanged_ : gathered_, context_.wait);
    }
  }

  // Does one piece of the local work. Returns false when there is none, or when other members must arrive first.
  bool do_piece() {
    switch (state_) {
      case TwoLevelState::kScatter:
        return context_.barrier.is_complete(exchanged_) && scatter();
      case TwoLevelState::kGather:
        return gather();
      case TwoLevelState::kWaitGathered:
        if (!context_.barrier.is_complete(gathered_)) return false;
        state_ = TwoLevelState::kReduce;
        return true;
      case TwoLevelState::kReduce:
        return reduce();
      default:
        return false;
    }
  }

  bool scatter() {
    uint64_t chunk = next_ - 2, piece = std::min(kPieceBytes, size(chunk) - done_);
    call_.spans.scatter(chunk * step_ + done_, piece, results(chunk) + done_);
    done_ += piece;
    if (done_ == size(chunk)) begin(TwoLevelState::kGather, next_);
    return true;
  }

  bool gather() {
    if (next_ >= num_chunks_) {
      state_ = TwoLevelState::kDone;
      return false;
    }
    if (!call_.in_bucket) {
      uint64_t piece = std::min(kPieceBytes, size(next_) - done_);
      call_.spans.gather(next_ * step_ + done_, piece,
                         context_.segment->slot(context_.topology.local_index, which(next_)) + done_);
      done_ += piece;
      if (done_ < size(next_)) return true;
    }
    gathered_ = context_.barrier.arrive();
    begin(TwoLevelState::kWaitGathered, next_);
    return true;
  }

  bool reduce() {
    uint32_t num_local = context_.topology.num_local();
    Range mine = share_of(size(next_) / width_, context_.topology.local_index, num_local, width_);
    uint64_t begin_at = mine.begin * width_ + done_, piece = std::min(kPieceBytes, mine.size() * width_ - done_);
    const void* ins[RD_MAX_LOCAL_MEMBERS];
    for (uint32_t local = 0; local < num_local; ++local) ins[local] = input(local, next_, begin_at);
    char* out = common(next_) + begin_at / width_ * partial_bytes(call_.reduce_params);
    reduce_to_partial(call_.reduce_params, ins, num_local, out, piece / width_);
    done_ += piece;
    if (done_ < mine.size() * width_) return true;
    reduced_ = context_.barrier.arrive();
    state_ = TwoLevelState::kDone;
    return true;
  }

  static constexpr uint64_t kPieceBytes = 128 * 1024;

  CallContext& context_;
  const Call& call_;
  const uint64_t width_, chunk_count_, step_, num_chunks_;
  TwoLevelState state_ = TwoLevelState::kDone;
  uint64_t next_ = 0, done_ = 0;
  uint32_t gathered_ = 0, reduced_ = 0, exchanged_ = 0;
};

// The only member of its host has nothing to do inside: its own array is the common one.
void allreduce_only_local_member(CallContext& context, const Call& call) {
  ContiguousArray array(context, call);
  uint64_t count = call.spans.count(), width = call.element_bytes(), wide = partial_bytes(call.reduce_params);
  // The same chunks as on the other hosts.
  bool whole = call.in_bucket && !has_wide_partials(call.reduce_params);
  uint64_t step = whole ? count : chunk_count(context, call);
  char* partials = array.make_partials(context);
  for (uint64_t begin = 0; begin < count; begin += step)
    allreduce_between_hosts(context, call, partials + begin * wide, array.data() + begin * width,
                            std::min(step, count - begin));
  array.copy_out();
}

}  // namespace

void two_level_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  if (context.segment == nullptr) return allreduce_only_local_member(context, call);
  if (call.in_bucket && !has_wide_partials(call.reduce_params)) return allreduce_buckets(context, call);
  StagedRun(context, call).run();
}

}  // namespace ronde
