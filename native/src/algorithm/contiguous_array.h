// The input of a call in one contiguous array, for the algorithms that need that: in the caller's own output when it is
// one span, otherwise in scratch memory. The result is written over it.
#pragma once

#include "algorithm/algorithm.h"

namespace ronde {

class ContiguousArray {
 public:
  ContiguousArray(CallContext& context, const Call& call) : call_(call), bytes_(call.spans.bytes()) {
    data_ = output_ = call.spans.contiguous_out(0, bytes_);
    if (data_ == nullptr) data_ = context.contiguous.get(bytes_);
    if (data_ != call.spans.contiguous_in(0, bytes_)) call.spans.gather(0, bytes_, data_);
  }

  char* data() const { return data_; }

  // Returns memory for the partial results of all elements: the array itself, unless they are wide.
  char* partials(CallContext& context) const {
    const ReduceParams& params = call_.reduce_params;
    return has_wide_partials(params) ? context.partials.get(call_.spans.count() * partial_bytes(params)) : data_;
  }
  PartialArrays partial_arrays(CallContext& context) const { return {data_, Form::kInput, partials(context), data_}; }

  // Makes partial results of the input, and returns them.
  char* make_partials(CallContext& context) const {
    char* made = partials(context);
    const void* input = data_;
    reduce_to_partial(call_.reduce_params, &input, 1, made, call_.spans.count());
    return made;
  }

  // Copies the result to the caller's outputs, unless it is there already.
  void copy_out() const {
    if (data_ != output_) call_.spans.scatter(0, bytes_, data_);
  }

 private:
  const Call& call_;
  uint64_t bytes_;
  char* output_;  // null when the output has several spans
  char* data_;
};

}  // namespace ronde
