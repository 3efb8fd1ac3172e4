// The exception that ends a call early. A wait or a check throws it; the code that started the call catches it. It
// never leaves the library.
#pragma once

#include "ronde.h"

namespace ronde {

struct CallError {
  rd_status status;
  int member = -1;  // the member that caused the error, or -1
  int detail = 0;   // errno, or 0
};

}  // namespace ronde
