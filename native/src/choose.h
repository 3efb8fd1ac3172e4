// Which algorithm runs a job: a table to read, by kind, where the members sit, and size.
#pragma once

#include "layout.h"

namespace ronde {

// The same answer on every member for the same job. Throws CallError{RD_BAD_CALL} when `wanted` cannot run here.
rd_algorithm choose(const Layout& layout, rd_kind kind, rd_op op, uint64_t bytes, rd_algorithm wanted);

}  // namespace ronde
