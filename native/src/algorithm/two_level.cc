// Two levels: shared memory inside a host, a ring (or doubling, for little) between hosts.
//
//   1. inside  each local member reduces its share of the elements from everyone on its host into one common array
//   2. across  the array is cut into *lanes*, as many as the smallest host has members; the i-th member of every host
//              allreduces lane i with the i-th members of the others
//   3. inside  everyone copies the result
//
// Each host puts every byte on the wire once, not once per member. For buckets the common array is the first local
// member's bucket; for arrays it is the staging result, slot by slot. The wire should never wait for copying: while
// chunk c travels, each member copies chunk c - 1 out and brings chunk c + 1 in, a piece at a time (StagedRun).
#include <algorithm>

#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

namespace {

constexpr uint64_t kDoublingBytes = 64 * 1024;

// Without the mean's division and the scaling after it, or with nothing but them.
ReduceParams inside(const Call& call) {
  ReduceParams plain = call.reduce_params;
  if (plain.op == RD_MEAN) plain.op = RD_SUM;
  plain.postscale = 1.0;
  return plain;
}

void across(Group& group, const Call& call, char* common, uint64_t count) {
  uint32_t lanes = group.topology.num_cross_groups(), lane = group.topology.local_index;
  if (lane >= lanes) return;
  std::vector<uint32_t> order;
  for (const auto& members : group.topology.members_by_host) order.push_back(members[lane]);
  Range mine = share_of(count, lane, lanes, call.element_bytes());
  if (mine.size() == 0) return;
  char* data = common + mine.begin * call.element_bytes();
  bool small = mine.size() * call.element_bytes() <= kDoublingBytes;
  (small ? recursive_doubling_allreduce_among : ring_allreduce_among)(group, order, group.topology.my_host,
                                                                      call.reduce_params, data, mine.size());
}

void in_buckets(Group& group, const Call& call) {
  uint32_t locals = group.topology.num_local(), me = group.topology.local_index;
  uint64_t width = call.element_bytes();
  Range mine = share_of(call.spans.count(), me, locals, width);
  const void* ins[RD_MAX_MEMBERS];
  for (uint32_t local = 0; local < locals; ++local)
    ins[local] = group.segment->bucket(local) + call.bucket_offset + mine.begin * width;
  char* common = group.segment->bucket(0) + call.bucket_offset;
  void* out = common + mine.begin * width;
  reduce_many(inside(call), ins, locals, &out, 1, mine.size(), false);
  group.barrier.arrive_and_wait(group.wait);
  across(group, call, common, call.spans.count());
  group.barrier.arrive_and_wait(group.wait);
  if (me != 0) copy_bytes(group.segment->bucket(me) + call.bucket_offset, common, call.spans.bytes(), false);
  group.barrier.arrive_and_wait(group.wait);  // the first member's bucket is read until here
}

// The phases of the gate come in this order for every member:
//   G(0) R(0)  G(1) R(1) X(0)  G(2) R(2) X(1)  …      G: gathered into slots   R: reduced   X: back from across
// When I write ... then nobody still needs it, because ...
//   slot[c & 1] for chunk c     everyone reduced c - 2 before R(c - 2), which I waited for before going across with it
//   result[c & 1] for chunk c   everyone copied c - 2 out before G(c), which I wait for before reducing
class StagedRun {
 public:
  StagedRun(Group& group, const Call& call)
      : group_(group),
        call_(call),
        width_(call.element_bytes()),
        step_(group.topology.slot_bytes / width_ * width_),
        num_chunks_((call.spans.bytes() + step_ - 1) / step_) {}

  void run() {
    begin(State::kGather, 0);
    finish();
    for (uint64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      group_.barrier.wait(reduced_, group_.wait);
      begin(chunk > 0 ? State::kScatter : State::kGather, chunk + 1);
      group_.wait.while_idle([this] { return work_a_little(); });
      across(group_, call_, common(chunk), size(chunk) / width_);
      group_.wait.while_idle(nullptr);
      finish();
      back_ = group_.barrier.arrive();
    }
    begin(State::kScatter, num_chunks_ + 1);
    finish();
  }

 private:
  enum class State { kScatter, kGather, kMeet, kReduce, kDone };

  uint64_t size(uint64_t chunk) const { return std::min(step_, call_.spans.bytes() - chunk * step_); }
  uint32_t which(uint64_t chunk) const { return uint32_t(group_.slots_used + chunk) & 1; }
  char* common(uint64_t chunk) const { return group_.segment->result(which(chunk)); }

  // `next` is the chunk to bring in; the one two before it is to be copied out.
  void begin(State state, uint64_t next) {
    state_ = state;
    next_ = next;
    done_ = 0;
  }

  void finish() {
    while (state_ != State::kDone) {
      if (work_a_little()) continue;
      group_.barrier.wait(state_ == State::kScatter ? back_ : gathered_, group_.wait);
    }
  }

  // One piece of what is to be done; false when there is nothing, or others must come first.
  bool work_a_little() {
    switch (state_) {
      case State::kScatter:
        return group_.barrier.is_complete(back_) && scatter();
      case State::kGather:
        return gather();
      case State::kMeet:
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
    call_.spans.scatter(chunk * step_ + done_, piece, common(chunk) + done_);
    done_ += piece;
    if (done_ == size(chunk)) begin(State::kGather, next_);
    return true;
  }

  bool gather() {
    if (next_ >= num_chunks_) {
      state_ = State::kDone;
      return false;
    }
    uint64_t piece = std::min(kPieceBytes, size(next_) - done_);
    call_.spans.gather(next_ * step_ + done_, piece,
                       group_.segment->slot(group_.topology.local_index, which(next_)) + done_);
    done_ += piece;
    if (done_ < size(next_)) return true;
    gathered_ = group_.barrier.arrive();
    begin(State::kMeet, next_);
    return true;
  }

  bool reduce() {
    uint32_t locals = group_.topology.num_local();
    Range mine = share_of(size(next_) / width_, group_.topology.local_index, locals, width_);
    uint64_t begin_at = mine.begin * width_ + done_, piece = std::min(kPieceBytes, mine.size() * width_ - done_);
    const void* ins[RD_MAX_MEMBERS];
    for (uint32_t local = 0; local < locals; ++local) ins[local] = group_.segment->slot(local, which(next_)) + begin_at;
    void* out = common(next_) + begin_at;
    reduce_many(inside(call_), ins, locals, &out, 1, piece / width_, false);
    done_ += piece;
    if (done_ < mine.size() * width_) return true;
    reduced_ = group_.barrier.arrive();
    state_ = State::kDone;
    return true;
  }

  static constexpr uint64_t kPieceBytes = 128 * 1024;

  Group& group_;
  const Call& call_;
  const uint64_t width_, step_, num_chunks_;
  State state_ = State::kDone;
  uint64_t next_ = 0, done_ = 0;
  uint32_t gathered_ = 0, reduced_ = 0, back_ = 0;
};

void in_slots(Group& group, const Call& call) {
  StagedRun run(group, call);
  run.run();
  uint64_t step = group.topology.slot_bytes / call.element_bytes() * call.element_bytes();
  group.slots_used += uint32_t((call.spans.bytes() + step - 1) / step);
}

// Alone at my place, while others are not: my own array is the common one.
void by_myself(Group& group, const Call& call) {
  uint64_t width = call.element_bytes(), bytes = call.spans.bytes();
  uint64_t step =
      call.in_bucket ? bytes : group.topology.slot_bytes / width * width;  // the same cuts as the others make
  ContiguousArray array(group, call);
  for (uint64_t begin = 0; begin < bytes; begin += step)
    across(group, call, array.data() + begin, std::min(step, bytes - begin) / width);
  array.copy_out();
}

}  // namespace

void two_level_allreduce(Group& group, const Call& call) {
  if (call.spans.bytes() == 0) return;
  if (group.segment == nullptr) return by_myself(group, call);
  call.in_bucket ? in_buckets(group, call) : in_slots(group, call);
}

}  // namespace ronde
