// An allreduce's array in one piece, for the algorithms that need one: the caller's own output where that is one piece,
// scratch memory otherwise. Inputs are copied and prescaled on the way in.
#pragma once

#include "team.h"

namespace ronde {

class FlatArray {
 public:
  FlatArray(Team& team, const Job& job) : job_(job), bytes_(job.parts.bytes()) {
    data_ = plain_ = job.parts.plain_out(0, bytes_);
    if (data_ == nullptr) data_ = team.flat.room(bytes_);
    if (data_ != job.parts.plain_in(0, bytes_)) job.parts.gather(0, bytes_, data_);
    scale_before(job.arithmetic, data_, data_, job.parts.count());
  }

  char* data() const { return data_; }

  // Puts the result where the caller wants it.
  void deliver() const {
    if (data_ != plain_) job_.parts.scatter(0, bytes_, data_);
  }

 private:
  const Job& job_;
  uint64_t bytes_;
  char* plain_;
  char* data_;
};

}  // namespace ronde
