// Paged attention over the thread pool: cuts a call into tasks and runs them. How the work is cut never shows
// in the result (see attend.inc for the order of the arithmetic). Knows no Python.
#pragma once

#include "operator_table.h"
#include "runtime.h"

namespace mlxr {

// `call` must be checked: query_starts ascending, pages of every visible position inside the pools, sizes
// positive, group and padded_dim set. The caller holds runtime.mutex. Throws std::bad_alloc when scratch
// cannot grow.
void run_attend(Runtime& runtime, const AttendCall& call, int64_t sequences);

}  // namespace mlxr
