// A mixture of experts: which experts each token has, and what they make of it. Experts are feed-forward blocks; tokens
// are grouped by expert, so that the weights of each are read once, and added up token by token. The bits of a token
// depend on nothing else: not on how many tokens an expert has, nor on the kernels that multiply them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear/linear.h"
#include "operators/operator_table.h"
#include "runtime/runtime.h"

namespace mlxr {

// Feed-forward blocks of one shape, whose weights others keep.
class Experts {
  public:
    explicit Experts(Activation kind) : kind_(kind) {}

    // `up` is gate and up, or up alone, which has as many outputs as `down` inputs. Throws std::invalid_argument for
    // shapes that do not fit.
    void append(const LinearWeight& up, const LinearWeight& down);

    int64_t count() const { return static_cast<int64_t>(up_.size()); }
    int64_t columns() const { return up_[0]->in_features(); }
    int64_t features() const { return down_[0]->in_features(); }
    bool is_gated() const { return up_[0]->out_features() != features(); }
    Activation kind() const { return kind_; }
    const LinearWeight& up(int64_t expert) const { return *up_[static_cast<size_t>(expert)]; }
    const LinearWeight& down(int64_t expert) const { return *down_[static_cast<size_t>(expert)]; }

  private:
    Activation kind_;
    std::vector<const LinearWeight*> up_, down_;
};

struct MixCall {
    const float* x;         // (tokens, columns)
    const int32_t* chosen;  // (tokens, used): experts
    const float* shares;    // (tokens, used)
    int64_t tokens, used;
    float* out;  // (tokens, columns)
};

// Fills call.chosen and call.shares for `rows` rows. The caller holds the runtime's mutex.
void run_route(Runtime& runtime, const RouteCall& call, int64_t rows);

// out[t] = the sum over ranks of share * down(act(up(x[t]))) of that rank's expert, with the bits of multiply and
// activate for each token alone. There is at least one expert, and all numbers in `chosen` are those of experts. The
// caller holds the runtime's mutex. Throws std::bad_alloc, and then has written nothing.
void run_mix(Runtime& runtime, const Experts& experts, const MixCall& call);

}  // namespace mlxr
