// Recursive halving and doubling: few steps that send few bytes, for arrays of medium size among many members.
//
// In the first half a member keeps one half of its range of elements in each step and sends the other one to the member
// whose position differs in one bit, the highest first, so after log2(n) steps it has an n-th of the elements, reduced
// over all members. In the second half ranges grow together again in the opposite order, as results. Each member sends
// about 2 arrays, as in a ring, but in 2 log2(n) steps instead of 2 (n - 1). Every element is completed by one member,
// so all get the same bits. When n is not a power of two, the members beyond it first send their arrays to a partner
// below it and receive the result at the end.
#include "algorithm/algorithm.h"
#include "algorithm/contiguous_array.h"

namespace ronde {

namespace {

class HalvingDoublingRun {
 public:
  HalvingDoublingRun(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                     const ReduceParams& params, char* partials, char* results, uint64_t count)
      : context_(context),
        members_(members),
        position_(position),
        params_(params),
        partials_(partials),
        results_(results),
        count_(count),
        partial_width_(partial_bytes(params)),
        result_width_(element_bytes(params.dtype)) {}

  void run() {
    uint32_t num = uint32_t(members_.size()), power_of_two = 1;
    while (power_of_two * 2 <= num) power_of_two *= 2;
    Range all{0, count_};
    if (position_ >= power_of_two) {
      Link* partner = link(position_ - power_of_two);
      exchange(partner, partials_, all, partial_width_, nullptr, nullptr, all);
      exchange(nullptr, nullptr, all, result_width_, partner, results_, all);
      return;
    }
    Link* extra = position_ + power_of_two < num ? link(position_ + power_of_two) : nullptr;
    if (extra != nullptr) receive_and_combine(nullptr, all, extra, all, true);
    std::vector<Range> ranges{all};  // this member's, before each step
    for (uint32_t bit = power_of_two / 2; bit > 0; bit /= 2) {
      Range range = ranges.back();
      uint64_t middle = range.begin + range.size() / 2;
      Range lower{range.begin, middle}, upper{middle, range.end};
      bool keep_lower = (position_ & bit) == 0;
      Link* partner = link(position_ ^ bit);
      receive_and_combine(partner, keep_lower ? upper : lower, partner, keep_lower ? lower : upper, keep_lower);
      ranges.push_back(keep_lower ? lower : upper);
    }
    Range own = ranges.back();
    finish_partial(params_, partials_ + own.begin * partial_width_, results_ + own.begin * result_width_, own.size());
    for (uint32_t bit = 1; bit < power_of_two; bit *= 2) {
      Range mine = ranges.back(), both = ranges[ranges.size() - 2];
      Range theirs = mine.begin == both.begin ? Range{mine.end, both.end} : Range{both.begin, mine.begin};
      Link* partner = link(position_ ^ bit);
      exchange(partner, results_, mine, result_width_, partner, results_, theirs);
      ranges.pop_back();
    }
    if (extra != nullptr) exchange(extra, results_, all, result_width_, nullptr, nullptr, all);
  }

 private:
  Link* link(uint32_t position) const { return context_.link(members_[position]); }

  // Sends one range of an array and receives another, whose elements are as wide.
  void exchange(Link* to, const char* data, Range sent, uint64_t width, Link* from, char* buffer, Range received) {
    send_receive(context_.wait, to, data + sent.begin * width, to == nullptr ? 0 : sent.size() * width, from,
                 buffer + received.begin * width, from == nullptr ? 0 : received.size() * width);
  }

  // Receives a range of partial results, while another one is sent, and combines it with this member's. The partial
  // results of the lower position are the left operand.
  void receive_and_combine(Link* to, Range sent, Link* from, Range received, bool mine_is_left) {
    char* theirs = context_.incoming.get(received.size() * partial_width_);
    char* mine = partials_ + received.begin * partial_width_;
    send_receive(context_.wait, to, partials_ + sent.begin * partial_width_,
                 to == nullptr ? 0 : sent.size() * partial_width_, from, theirs, received.size() * partial_width_);
    Operand left{mine_is_left ? mine : theirs, Form::kPartial}, right{mine_is_left ? theirs : mine, Form::kPartial};
    combine(params_, left, right, mine, Form::kPartial, received.size());
  }

  CallContext& context_;
  const std::vector<uint32_t>& members_;
  const uint32_t position_;
  const ReduceParams& params_;
  char* const partials_;
  char* const results_;
  const uint64_t count_, partial_width_, result_width_;
};

}  // namespace

void halving_doubling_allreduce_among(CallContext& context, const std::vector<uint32_t>& members, uint32_t position,
                                      const ReduceParams& params, char* partials, char* results, uint64_t count) {
  HalvingDoublingRun(context, members, position, params, partials, results, count).run();
}

void halving_doubling_allreduce(CallContext& context, const Call& call) {
  if (call.spans.bytes() == 0) return;
  ContiguousArray array(context, call);
  halving_doubling_allreduce_among(context, context.all_members(), context.topology.member_index, call.reduce_params,
                                   array.make_partials(context), array.data(), call.spans.count());
  array.copy_out();
}

}  // namespace ronde
