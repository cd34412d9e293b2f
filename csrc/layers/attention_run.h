// The operators of a layer that attends: heads are taken out of a product, normed, rotated and written to the pages;
// then their queries attend. Knows no Python.
#pragma once

#include "attend/attend.h"
#include "layers/blocks.h"
#include "layers/registers.h"

namespace mlxr {

class AttentionRun {
  public:
    AttentionRun(Runtime& runtime, const LayersCall& call, Registers& registers)
        : runtime_(runtime), call_(call), registers_(registers) {}

    // Before the operators of a layer. Attention of consecutive layers alike is planned once.
    void plan(const Layer& layer);

    void rope_and_write_kv(const Layer& layer, const Operator& op);
    void rope_and_write_latent(const Layer& layer, const Operator& op);
    void attend(const Layer& layer);

  private:
    // Heads of all tokens, some columns of an array.
    struct Heads {
        float* x;
        int64_t stride, count;
    };

    Heads norm_heads(const Heads& heads, int64_t head_dim, const float* weight, HeadNorm kind, float eps);
    Heads pack(const Heads& heads, int64_t head_dim);
    void rotate(const Layer& layer, const Heads& heads, bool queries);
    WritePagesCall write_call(const Layer& layer, const Heads& heads, void* pool, bool values) const;
    AttendCall attend_call(const Layer& layer) const;

    Runtime& runtime_;
    const LayersCall& call_;
    Registers& registers_;
    const Layer* planned_ = nullptr;
    AttendPlan plan_{};
    Heads query_{};
};

}  // namespace mlxr
