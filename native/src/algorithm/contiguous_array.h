// The input of a call in one contiguous array, prescaled, for the algorithms that need that: in the caller's own output
// when it is one span, otherwise in scratch memory.
#pragma once

#include "group.h"

namespace ronde {

class ContiguousArray {
 public:
  ContiguousArray(Group& group, const Call& call) : call_(call), bytes_(call.spans.bytes()) {
    data_ = output_ = call.spans.contiguous_out(0, bytes_);
    if (data_ == nullptr) data_ = group.contiguous.get(bytes_);
    if (data_ != call.spans.contiguous_in(0, bytes_)) call.spans.gather(0, bytes_, data_);
    apply_prescale(call.reduce_params, data_, data_, call.spans.count());
  }

  char* data() const { return data_; }

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
