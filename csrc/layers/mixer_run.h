// The operators of a recurrent mixer: convolutions and recurrences, which keep states of sequences, and the norm that
// is gated by what the block kept. Knows no Python.
#pragma once

#include "layers/blocks.h"
#include "layers/registers.h"
#include "mixers/mixers.h"

namespace mlxr {

class MixerRun {
  public:
    MixerRun(Runtime& runtime, const LayersCall& call, Registers& registers)
        : runtime_(runtime), call_(call), registers_(registers) {}

    void convolve(const Layer& layer, const Operator& op);
    void recur(const Layer& layer, const Operator& op);
    void scan(const Layer& layer, const Operator& op);
    void gate_and_norm(const Operator& op);

  private:
    States states_of(const Layer& layer, const States& own) const;
    const float* kept_of(const Operator& op) const { return registers_.find(Register::kept) + op.kept_first; }

    Runtime& runtime_;
    const LayersCall& call_;
    Registers& registers_;
};

}  // namespace mlxr
