// The element-wise operators over the thread pool: how a call is cut for the threads, which never shows in the
// result. `call` must be checked; the caller holds runtime.mutex. Knows no Python.
#pragma once

#include <cstdint>

#include "linear/linear.h"
#include "operators/operator_table.h"
#include "runtime/runtime.h"

namespace mlxr {

void spread_rms_norm(Runtime& runtime, const RmsNormCall& call, int64_t rows);
void spread_layer_norm(Runtime& runtime, const LayerNormCall& call, int64_t rows);
void spread_rope(Runtime& runtime, const RopeCall& call, int64_t tokens);
void spread_activate(Runtime& runtime, const ActivateCall& call, int64_t rows);
void spread_scale(Runtime& runtime, const ScaleCall& call, int64_t count);
void spread_add(Runtime& runtime, const AddCall& call, int64_t count);
void spread_gate_heads(Runtime& runtime, const GateHeadsCall& call, int64_t rows);
void run_streams(Runtime& runtime, const MixStreamsCall& call, int64_t rows);
void run_streams(Runtime& runtime, const SpreadStreamsCall& call, int64_t rows);
void run_streams(Runtime& runtime, const MatchStreamsCall& call, int64_t rows);
void run_streams(Runtime& runtime, const BalanceStreamsCall& call, int64_t rows);
void run_streams(Runtime& runtime, const BlendStreamsCall& call, int64_t rows);
void run_streams(Runtime& runtime, const LevelStreamsCall& call, int64_t rows);
void spread_cut_gates(Runtime& runtime, const CutGatesCall& call, int64_t rows);
// Keys and values of the same tokens; `values` is null where they are in keys.
void spread_write_pages(Runtime& runtime, const WritePagesCall& keys, const WritePagesCall* values);

// The same on the way into a product, which makes the rows that it needs and whose time it is part of.
MakeRows fuse_rms_norm(Runtime& runtime, const RmsNormCall& call);
MakeRows fuse_layer_norm(Runtime& runtime, const LayerNormCall& call);
MakeRows fuse_activate(Runtime& runtime, const ActivateCall& call);

}  // namespace mlxr
