// Paged attention over the thread pool: cuts a call into tasks and runs them. How the work is cut never shows
// in the result (see attend.inc for the order of the arithmetic). Knows no Python.
#pragma once

#include "operators/operator_table.h"
#include "runtime/runtime.h"

namespace mlxr {

// How a call is cut, in scratch memory of the runtime: good for calls that differ in queries, pools, scale, softcap,
// sinks and output alone, until the next plan is made.
struct AttendPlan {
    AttendTask* tasks;
    AttendTask* merges;
    std::byte* thread_scratch;
    int64_t task_count, merge_count, thread_bytes, sequences;
    bool serial;  // on the calling thread
};

// `call` must be checked: query_starts ascending, pages of every visible position inside the pools, sizes positive,
// group and padded_dim set; what a plan is good for may be missing. The caller holds runtime.mutex. Throws
// std::bad_alloc when scratch cannot grow.
AttendPlan plan_attend(Runtime& runtime, const AttendCall& call, int64_t sequences);

void run_attend(Runtime& runtime, const AttendCall& call, const AttendPlan& plan);

}  // namespace mlxr
