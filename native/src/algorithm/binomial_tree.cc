// Binomial tree: collectives with a root, over links. Positions are counted from the root, which is position 0; the
// parent of a position is the position without its lowest bit, and its subtree is as many positions from it on as that
// bit says. Large arrays travel in segments, so that all levels of the tree work at the same time.
#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"

namespace ronde {

namespace {

constexpr uint64_t kSegmentBytes = 256 * 1024;

class Tree {
 public:
  Tree(CallContext& context, const Call& call)
      : context_(context), size_(context.topology.size), root_(uint32_t(call.peer)) {
    position = (context.topology.member_index + size_ - root_) % size_;
    while (lowest_bit < size_ && (position & lowest_bit) == 0) lowest_bit *= 2;
    end = std::min(position + lowest_bit, size_);
  }

  uint32_t member_at(uint32_t other) const { return (other + root_) % size_; }
  // The child in whose subtree a position is.
  uint32_t child_of(uint32_t other) const {
    uint32_t bit = 1;
    while (bit * 2 <= other - position) bit *= 2;
    return position + bit;
  }

  void send(uint32_t to, const char* data, uint64_t bytes) const {
    send_receive(context_.wait, context_.link(member_at(to)), data, bytes, nullptr, nullptr, 0);
  }
  void receive(uint32_t from, char* buffer, uint64_t bytes) const {
    send_receive(context_.wait, nullptr, nullptr, 0, context_.link(member_at(from)), buffer, bytes);
  }
  void send_to_parent(const char* data, uint64_t bytes) const { send(position - lowest_bit, data, bytes); }
  void receive_from_parent(char* buffer, uint64_t bytes) const { receive(position - lowest_bit, buffer, bytes); }

  uint32_t position;
  uint32_t lowest_bit = 1;  // of the position; its children are position + bit for every lower bit
  uint32_t end;             // of the subtree of this position

 private:
  CallContext& context_;
  uint32_t size_, root_;
};

// Calls visit(begin, length) for every segment.
template <class Visit>
void for_segments(uint64_t bytes, Visit visit) {
  for (uint64_t begin = 0; begin < bytes; begin += kSegmentBytes) visit(begin, std::min(kSegmentBytes, bytes - begin));
}

}  // namespace

void binomial_tree_broadcast(CallContext& context, const Call& call) {
  Tree tree(context, call);
  for_segments(call.spans.bytes(), [&](uint64_t begin, uint64_t length) {
    char* output = call.spans.contiguous_out(begin, length);
    char* segment = output != nullptr ? output : context.incoming.get(kSegmentBytes);
    if (tree.position == 0) {
      if (segment != call.spans.contiguous_in(begin, length)) call.spans.gather(begin, length, segment);
    } else {
      tree.receive_from_parent(segment, length);
    }
    for (uint32_t bit = tree.lowest_bit / 2; bit > 0; bit /= 2)
      if (tree.position + bit < tree.end) tree.send(tree.position + bit, segment, length);
    if (output == nullptr) call.spans.scatter(begin, length, segment);
  });
}

// A member combines what it has with what its children send, and sends that to its parent: partial results.
void binomial_tree_reduce(CallContext& context, const Call& call) {
  Tree tree(context, call);
  const ReduceParams& params = call.reduce_params;
  uint64_t width = call.element_bytes(), wide = partial_bytes(params);
  for_segments(call.spans.bytes(), [&](uint64_t begin, uint64_t length) {
    uint64_t count = length / width;
    const char* input = call.spans.contiguous_in(begin, length);
    if (input == nullptr) {
      char* gathered = context.contiguous.get(kSegmentBytes);
      call.spans.gather(begin, length, gathered);
      input = gathered;
    }
    char* partials = context.partials.get(kSegmentBytes / width * wide);
    char* incoming = context.incoming.get(kSegmentBytes / width * wide);
    const void* own = input;
    reduce_to_partial(params, &own, 1, partials, count);
    for (uint32_t bit = 1; bit < tree.lowest_bit; bit *= 2) {
      if (tree.position + bit >= tree.end) break;
      tree.receive(tree.position + bit, incoming, count * wide);
      combine(params, {partials, Form::kPartial}, {incoming, Form::kPartial}, partials, Form::kPartial, count);
    }
    if (tree.position != 0) return tree.send_to_parent(partials, count * wide);
    char* output = call.spans.contiguous_out(begin, length);
    char* results = output != nullptr ? output : context.contiguous.get(kSegmentBytes);
    finish_partial(params, partials, results, count);
    if (output == nullptr) call.spans.scatter(begin, length, results);
  });
}

// A member sends its own data to its parent, then that of its subtree, in the order of the positions.
void binomial_tree_gather(CallContext& context, const Call& call) {
  Tree tree(context, call);
  std::vector<uint64_t> starts = starts_of(call.counts, call.element_bytes());
  for (uint32_t other = tree.position; other < tree.end; ++other) {
    uint32_t member = tree.member_at(other);
    for_segments(starts[member + 1] - starts[member], [&](uint64_t begin, uint64_t length) {
      bool is_own = other == tree.position, is_root = tree.position == 0;
      const char* own = static_cast<const char*>(call.spans[0].input);
      char* output = static_cast<char*>(call.spans[0].output);
      char* segment = is_root ? output + starts[member] + begin : context.incoming.get(kSegmentBytes);
      if (!is_own) tree.receive(tree.child_of(other), segment, length);
      if (!is_root) {
        tree.send_to_parent(is_own ? own + begin : segment, length);
      } else if (is_own) {
        std::memmove(segment, own + begin, length);
      }
    });
  }
}

// The reverse of the gather.
void binomial_tree_scatter(CallContext& context, const Call& call) {
  Tree tree(context, call);
  std::vector<uint64_t> starts = starts_of(call.counts, call.element_bytes());
  for (uint32_t other = tree.position; other < tree.end; ++other) {
    uint32_t member = tree.member_at(other);
    for_segments(starts[member + 1] - starts[member], [&](uint64_t begin, uint64_t length) {
      bool is_own = other == tree.position, is_root = tree.position == 0;
      const char* input = static_cast<const char*>(call.spans[0].input);
      char* output = static_cast<char*>(call.spans[0].output);
      char* segment = is_own ? output + begin : context.incoming.get(kSegmentBytes);
      if (!is_root) {
        tree.receive_from_parent(segment, length);
      } else if (is_own) {
        std::memmove(segment, input + starts[member] + begin, length);
      }
      if (!is_own) tree.send(tree.child_of(other), is_root ? input + starts[member] + begin : segment, length);
    });
  }
}

}  // namespace ronde
