// See adapter.h.
#include "layers/adapter.h"

#include <algorithm>

#include "runtime/ranges.h"

namespace mlxr {

namespace {

constexpr int64_t kColumns = 16;      // of one rank that follow one another
constexpr int64_t kShareRows = 64;    // that a thread takes with a block
constexpr int64_t kFewElements = 96;  // what a call costs beside its numbers

int64_t whole(int64_t count, int64_t step) {
    return (count + step - 1) / step * step;
}

int64_t number_bytes(LoraType type) {
    return type == LoraType::f32 ? 4 : 2;
}

// Numbers as they are, to their places in tiles.
template <typename Number>
void pack_a(const LowRank& update, const void* a) {
    const auto* const from = static_cast<const Number*>(a);
    auto* const to = reinterpret_cast<Number*>(update.a.data());
    const int64_t padded = whole(update.columns, kColumns);
    for (int64_t rank = 0; rank < update.rank; ++rank) {
        Number* const block = to + rank / kLoraRanks * kLoraRanks * padded + rank % kLoraRanks * kColumns;
        for (int64_t i = 0; i < update.columns; ++i) {
            block[i / kColumns * kLoraRanks * kColumns + i % kColumns] = from[rank * update.columns + i];
        }
    }
}

template <typename Number>
void pack_b(const LowRank& update, const void* b) {
    const auto* const from = static_cast<const Number*>(b);
    auto* const to = reinterpret_cast<Number*>(update.b.data());
    for (int64_t rank = 0; rank < update.rank; ++rank) {
        for (int64_t i = 0; i < update.made; ++i) {
            Number* const block = to + i / kLoraColumns * kLoraColumns * update.rank;
            block[rank * kLoraColumns + i % kLoraColumns] = from[rank * update.made + i];
        }
    }
}

// One half of the updates: blocks of a, or of b, of so many numbers each, times rows.
struct Work {
    const LoraCall* call;
    int64_t blocks, shares, cost;  // cost: of a block and share
};

using Run = void (*)(const LoraCall&, int64_t, int64_t, int64_t, int64_t);

// Threads share out blocks by what they cost, one after another, each with some rows.
void spread(Runtime& runtime, const std::vector<Work>& works, Run run) {
    int64_t all = 0;
    for (const Work& work : works) all += work.blocks * work.shares * work.cost;
    const auto run_some = [&](int64_t from, int64_t to) {
        int64_t begin = 0;
        for (const Work& work : works) {
            const int64_t tasks = work.blocks * work.shares;
            const auto task_at = [&](int64_t at) {
                return std::clamp<int64_t>((at - begin + work.cost - 1) / work.cost, 0, tasks);
            };
            for (int64_t task = task_at(from), last = task_at(to); task < last;) {
                const int64_t share = task / work.blocks, block = task % work.blocks;
                const int64_t end = std::min(work.blocks, block + last - task);
                run(*work.call, block, end, share * kShareRows, std::min(work.call->count, (share + 1) * kShareRows));
                task += end - block;
            }
            begin += tasks * work.cost;
        }
    };
    const int threads = all < kSerialElements ? 1 : runtime.pool.threads();
    if (threads == 1) return run_some(0, all);
    runtime.pool.parallel_for_near(threads,
                                   [&](int part, int) { run_some(all * part / threads, all * (part + 1) / threads); });
}

Work plan(const LoraCall& call, int64_t blocks, int64_t numbers) {
    return {&call, blocks, (call.count + kShareRows - 1) / kShareRows,
            numbers * std::min(call.count, kShareRows) + kFewElements};
}

// `calls` may have no row and column of `out` in common.
void run_calls(Runtime& runtime, const std::vector<LoraCall>& calls, bool reduces) {
    Counted counted(runtime.tally, {OperatorName::lora, KernelName::plain, static_cast<int>(calls.front().type)});
    counted.does([&] {
        Tally::Work work{};
        for (const LoraCall& call : calls) {
            const int64_t numbers = call.rank * ((reduces ? call.columns : 0) + call.made);
            work.bytes += numbers * number_bytes(call.type) + 4 * call.count * (call.columns + 2 * call.made);
            work.macs += numbers * call.count;
        }
        return work;
    });
    const OperatorTable& table = *operator_table(runtime.isa);
    std::vector<Work> first, second;
    for (const LoraCall& call : calls) {
        const int64_t padded = whole(call.columns, kColumns);
        first.push_back(plan(call, (call.rank + kLoraRanks - 1) / kLoraRanks, kLoraRanks * padded));
        second.push_back(plan(call, (call.made + kLoraColumns - 1) / kLoraColumns, kLoraColumns * call.rank));
    }
    if (reduces) spread(runtime, first, table.lora_reduce);
    spread(runtime, second, table.lora_expand);
}

}  // namespace

void Adapter::append(const LinearWeight* weight, LowRank update, const void* a, const void* b) {
    const bool is_wide = update.type == LoraType::f32;
    if (a != nullptr) {
        const int64_t numbers = whole(update.rank, kLoraRanks) * whole(update.columns, kColumns);
        update.a = memory_.take(static_cast<size_t>(numbers * number_bytes(update.type)));
        is_wide ? pack_a<uint32_t>(update, a) : pack_a<uint16_t>(update, a);
    }
    const int64_t numbers = update.rank * whole(update.made, kLoraColumns);
    update.b = memory_.take(static_cast<size_t>(numbers * number_bytes(update.type)));
    is_wide ? pack_b<uint32_t>(update, b) : pack_b<uint16_t>(update, b);
    bytes_ += static_cast<int64_t>(update.a.bytes() + update.b.bytes());
    updates_[weight].push_back(std::move(update));
}

std::span<const LowRank> Adapter::find(const LinearWeight* weight) const {
    const auto found = updates_.find(weight);
    if (found == updates_.end()) return {};
    return found->second;
}

namespace {

// What a makes of x, and what is looked up instead of it, for each call.
void reserve_reduced(Runtime& runtime, std::vector<LoraCall>& calls) {
    int64_t floats = 0;
    for (const LoraCall& call : calls) floats += call.count * call.reduced_stride;
    auto* next =
        reinterpret_cast<float*>(runtime.scratch(Scratch::adapters, static_cast<size_t>(floats) * sizeof(float)));
    for (LoraCall& call : calls) {
        call.reduced = next;
        next += call.count * call.reduced_stride;
    }
}

std::vector<LoraCall> list_calls(std::span<const AdapterRows> adapters, const LinearWeight* weight, const float* x,
                                 float* out, int64_t out_stride) {
    std::vector<LoraCall> calls;
    for (const AdapterRows& adapter : adapters) {
        for (const LowRank& update : adapter.adapter->find(weight)) {
            calls.push_back({x, out, update.columns, out_stride, update.first_column, adapter.rows, adapter.count,
                             update.a.data(), update.b.data(), update.type, update.rank, update.made, update.scale,
                             nullptr, whole(update.rank, kLoraRanks)});
        }
    }
    return calls;
}

}  // namespace

void update_product(Runtime& runtime, const LinearWeight& weight, std::span<const AdapterRows> adapters, const float* x,
                    float* out) {
    std::vector<LoraCall> calls = list_calls(adapters, &weight, x, out, weight.out_features());
    if (calls.empty()) return;
    reserve_reduced(runtime, calls);
    run_calls(runtime, calls, true);
}

void update_embeddings(Runtime& runtime, std::span<const AdapterRows> adapters, float* out, int64_t columns) {
    std::vector<LoraCall> calls;
    for (const AdapterRows& adapter : adapters) {
        if (adapter.looked_up == nullptr) continue;
        calls = list_calls({&adapter, 1}, nullptr, nullptr, out, columns);
        reserve_reduced(runtime, calls);
        for (const LoraCall& call : calls) {
            for (int64_t row = 0; row < call.count; ++row) {
                std::copy_n(adapter.looked_up + row * call.rank, call.rank, call.reduced + row * call.reduced_stride);
            }
        }
        if (!calls.empty()) run_calls(runtime, calls, false);
    }
}

}  // namespace mlxr
