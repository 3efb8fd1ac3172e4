// How a call ends early. Thrown where a wait or a check fails, caught where the call began; never leaves the library.
#pragma once

#include "ronde.h"

namespace ronde {

struct Stop {
  rd_status status;
  int member = -1;  // whom it is about
  int detail = 0;   // errno
};

}  // namespace ronde
