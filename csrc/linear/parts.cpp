// Products of parts of rows, each with a weight of its own, as those of experts are: with few tokens all weights are
// one stream, with many they are one list of tasks.
#include <algorithm>
#include <vector>

#include "linear/call.h"

namespace mlxr {

namespace {

class PartsRun {
  public:
    PartsRun(Runtime& runtime, const PartsProduct& product)
        : runtime_(runtime), product_(product), in_(product.weights[0]->in_features()) {
        parts_ = static_cast<int64_t>(product.weights.size());
        const std::byte* const nothing = nullptr;
        const int64_t bytes = lay_out_all(nullptr) - nothing;
        lay_out_all(runtime.scratch(Scratch::parts, static_cast<size_t>(bytes)));
    }

    void run() {
        Ran ran(OperatorName::linear);
        for (const LinearCall& call : calls_) describe_call(call, false, ran);
        Counted counted(runtime_.tally, ran);
        counted.does([&] { return measure(); });
        const int64_t tokens = product_.tokens;
        const bool alone = parts_ * tokens * in_ < kAloneValues || runtime_.pool.threads() == 1;
        if (!alone) prepare_together();
        if (tokens < kSomeTokens) {
            const Prepare prepare = [&] {
                for (int64_t part = 0; part < parts_; ++part) prepare_part(part, 0, tokens);
            };
            return multiply_few(runtime_, calls_, alone ? prepare : nullptr);
        }
        if (alone) prepare_together();
        const PieceTasks tasks(calls_, runtime_.pool.threads());
        std::byte* const scratch =
            runtime_.scratch(Scratch::panels, static_cast<size_t>(tasks.scratch_bytes() * runtime_.pool.threads()));
        runtime_.pool.parallel_for_near(tasks.count(), [&](int task, int thread) {
            tasks.run(task, task + 1, scratch + tasks.scratch_bytes() * thread);
        });
    }

  private:
    // All inputs from `at` on, or from null on, and the products that read them; returns the end.
    std::byte* lay_out_all(std::byte* at) {
        calls_.clear();
        const int64_t out = product_.passed + product_.weights[0]->out_features();
        for (int64_t part = 0; part < parts_; ++part) {
            const LinearWeight& weight = *product_.weights[static_cast<size_t>(part)];
            LinearInput input{.x = source(part),
                              .tokens = product_.tokens,
                              .columns = in_,
                              .tile = tile_of(product_.tokens),
                              .x_stride = parts_ * (in_ + product_.passed)};
            Needs needs;
            needs.add(runtime_, weight);
            if (needs.floats) {  // which are read one token after another
                input.x = reinterpret_cast<const float*>(at);
                input.x_stride = 0;
                at += align_line(product_.tokens * in_ * static_cast<int64_t>(sizeof(float)));
            }
            at = lay_out(runtime_, needs, input, at);
            calls_.push_back({runtime_, weight, input, product_.out + part * out + product_.passed, parts_ * out});
        }
        return at;
    }

    const float* source(int64_t part) const { return product_.x + part * (in_ + product_.passed); }

    // The input of tokens [first, last) of a part in the forms that its weight needs, and what passes.
    void prepare_part(int64_t part, int64_t first, int64_t last) {
        const LinearCall& call = calls_[static_cast<size_t>(part)];
        const int64_t stride = parts_ * (in_ + product_.passed), passed = product_.passed;
        for (int64_t token = first; token < last; ++token) {
            const float* const from = source(part) + token * stride;
            std::copy_n(from + in_, passed, call.out + token * call.stride() - passed);
            if (call.input.x_stride == 0) std::copy_n(from, in_, const_cast<float*>(call.input.x) + token * in_);
        }
        convert_tokens(runtime_, call.input, first, last);
    }

    void prepare_together() {
        const int64_t tiles = (product_.tokens + kTileTokens - 1) / kTileTokens;
        runtime_.pool.parallel_for_near(static_cast<int>(parts_ * tiles), [&](int task, int) {
            const int64_t first = task % tiles * kTileTokens;
            prepare_part(task / tiles, first, std::min(first + kTileTokens, product_.tokens));
        });
    }

    Tally::Work measure() const {
        Tally::Work work;
        for (const LinearCall& call : calls_) {
            const Tally::Work part = measure_call(call);
            work.bytes += part.bytes;
            work.macs += part.macs;
        }
        return work;
    }

    Runtime& runtime_;
    const PartsProduct& product_;
    int64_t in_, parts_;
    std::vector<LinearCall> calls_;
};

}  // namespace

void multiply_parts(Runtime& runtime, const PartsProduct& product) {
    if (product.tokens == 0 || product.weights.empty()) return;
    PartsRun(runtime, product).run();
}

}  // namespace mlxr
