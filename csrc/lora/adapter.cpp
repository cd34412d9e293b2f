// See adapter.h.
#include "lora/adapter.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/ranges.h"

namespace mlxr {

namespace {

constexpr int64_t kShareRows = 64;    // that a thread takes with a block
constexpr int64_t kFewElements = 96;  // what a call costs beside its numbers

int64_t whole(int64_t count, int64_t step) {
    return (count + step - 1) / step * step;
}

int64_t number_bytes(LoraType type) {
    return type == LoraType::f32 ? 4 : 2;
}

// Some columns of one rank, of a group at most, to their places in it.
template <typename Number>
void pack_group(const Number* from, int64_t columns, bool pairs, Number* to) {
    constexpr int64_t kHalf = kLoraGroup / 2;
    if (!pairs) {
        std::copy_n(from, columns, to);
    } else {
        for (int64_t i = 0; i < columns; ++i) to[i % kHalf * 2 + i / kHalf] = from[i];
    }
}

// Numbers as they are, to their places in tiles.
template <typename Number>
void pack_a(const LowRank& update, const void* a) {
    const auto* from = static_cast<const Number*>(a);
    const int64_t padded = whole(update.columns, kLoraGroup);
    const bool pairs = update.type == LoraType::bf16;
    for (int64_t rank = 0; rank < update.rank; ++rank, from += update.columns) {
        Number* to = reinterpret_cast<Number*>(update.a.data()) + rank / kLoraRanks * kLoraRanks * padded +
                     rank % kLoraRanks * kLoraGroup;
        for (int64_t i = 0; i < update.columns; i += kLoraGroup, to += kLoraRanks * kLoraGroup) {
            pack_group(from + i, std::min(kLoraGroup, update.columns - i), pairs, to);
        }
    }
}

template <typename Number>
void pack_b(const LowRank& update, const void* b) {
    const auto* from = static_cast<const Number*>(b);
    const bool pairs = update.type == LoraType::bf16;
    for (int64_t rank = 0; rank < update.rank; ++rank, from += update.made) {
        auto* const to = reinterpret_cast<Number*>(update.b.data()) + rank * kLoraColumns;
        for (int64_t i = 0; i < update.made; i += kLoraGroup) {
            Number* const block = to + i / kLoraColumns * kLoraColumns * update.rank + i % kLoraColumns;
            pack_group(from + i, std::min(kLoraGroup, update.made - i), pairs, block);
        }
    }
}

}  // namespace

void LoraHalf::add(const LoraCall& call, int64_t blocks, int64_t numbers) {
    const int64_t cost = numbers * std::min(call.count, kShareRows) + kFewElements;
    const int64_t shares = (call.count + kShareRows - 1) / kShareRows;
    works_.push_back({&call, blocks, shares, cost});
    cost_ += blocks * shares * cost;
}

int LoraHalf::count_parts(int threads) const {
    return cost_ < kSerialElements ? 1 : threads;
}

void LoraHalf::run(Run run, int part, int parts) const {
    const int64_t from = cost_ * part / parts, to = cost_ * (part + 1) / parts;
    int64_t begin = 0;
    for (const Work& work : works_) {
        const int64_t tasks = work.blocks * work.shares, end_cost = begin + tasks * work.cost;
        if (begin >= to) return;
        if (end_cost <= from) {
            begin = end_cost;
            continue;
        }
        const auto task_at = [&](int64_t at) {
            return std::clamp<int64_t>((at - begin + work.cost - 1) / work.cost, 0, tasks);
        };
        for (int64_t task = task_at(from), last = task_at(to); task < last;) {
            const int64_t share = task / work.blocks, block = task % work.blocks;
            const int64_t end = std::min(work.blocks, block + last - task);
            run(*work.call, block, end, share * kShareRows, std::min(work.call->count, (share + 1) * kShareRows));
            task += end - block;
        }
        begin = end_cost;
    }
}

void Adapter::append(const LinearWeight* weight, LowRank update, const void* a, const void* b) {
    const bool is_wide = update.type == LoraType::f32;
    if (a != nullptr) {
        const int64_t numbers = whole(update.rank, kLoraRanks) * whole(update.columns, kLoraGroup);
        update.a = memory_.take(static_cast<size_t>(numbers * number_bytes(update.type)));
        is_wide ? pack_a<uint32_t>(update, a) : pack_a<uint16_t>(update, a);
    }
    const int64_t numbers = update.rank * whole(update.made, kLoraColumns);
    update.b = memory_.take(static_cast<size_t>(numbers * number_bytes(update.type)));
    is_wide ? pack_b<uint32_t>(update, b) : pack_b<uint16_t>(update, b);
    bytes_ += static_cast<int64_t>(update.a.bytes() + update.b.bytes());
    if (weight == nullptr) return table_.push_back(std::move(update));
    if (places_.empty()) first_number_ = weight->number();
    if (weight->number() < first_number_) {
        places_.insert(places_.begin(), static_cast<size_t>(first_number_ - weight->number()), Place{0, 0});
        first_number_ = weight->number();
    }
    const auto index = static_cast<size_t>(weight->number() - first_number_);
    if (index >= places_.size()) places_.resize(index + 1, Place{0, 0});
    Place& place = places_[index];
    const auto count = static_cast<int32_t>(updates_.size());
    if (place.count == 0) place.first = count;
    if (place.first + place.count != count) throw std::invalid_argument("lora: updates of a weight stand apart");
    ++place.count;
    updates_.push_back(std::move(update));
}

std::span<const LowRank> Adapter::find(const LinearWeight* weight) const {
    if (weight == nullptr) return table_;
    const int64_t index = weight->number() - first_number_;
    if (index < 0 || index >= static_cast<int64_t>(places_.size())) return {};
    const Place place = places_[static_cast<size_t>(index)];
    return std::span(updates_).subspan(static_cast<size_t>(place.first), static_cast<size_t>(place.count));
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

Ran describe(const std::vector<LoraCall>& calls) {
    return {OperatorName::lora, KernelName::plain, static_cast<int>(calls.front().type)};
}

// The second half of calls, by rounds, of which each has no row and column of `out` twice.
void expand(Runtime& runtime, std::span<const LoraHalf> rounds) {
    const OperatorTable& table = *operator_table(runtime.isa);
    for (const LoraHalf& round : rounds) {
        const int parts = round.count_parts(runtime.pool.threads());
        runtime.pool.parallel_for_near(parts, [&](int part, int) { round.run(table.lora_expand, part, parts); });
    }
}

// The same, counted with the first half.
void expand_counted(Runtime& runtime, const std::vector<LoraCall>& calls, std::span<const LoraHalf> rounds) {
    Counted counted(runtime.tally, describe(calls));
    counted.does([&] {
        Tally::Work work{};
        for (const LoraCall& call : calls) {
            const int64_t numbers = call.rank * (call.columns + call.made);
            work.bytes += numbers * number_bytes(call.type) + 4 * call.count * (call.columns + 2 * call.made);
            work.macs += numbers * call.count;
        }
        return work;
    });
    expand(runtime, rounds);
}

void add_expand(const LoraCall& call, LoraHalf& expands) {
    expands.add(call, (call.made + kLoraColumns - 1) / kLoraColumns, kLoraColumns * call.rank);
}

void add_calls(const LinearWeight* weight, const AdapterRows& adapter, const int32_t* out_rows, const float* x,
               float* out, int64_t out_stride, LoraCalls& to) {
    for (const LowRank& update : adapter.adapter->find(weight)) {
        to.calls.push_back({x, out, update.columns, out_stride, update.first_column, adapter.rows, out_rows,
                            adapter.count, update.a.data(), update.b.data(), update.type, update.rank, update.made,
                            update.scale * adapter.factor, nullptr, whole(update.rank, kLoraRanks)});
        to.rounds.push_back(adapter.round);
    }
}

}  // namespace

ProductUpdates::ProductUpdates(Runtime& runtime, std::span<const AdapterRows> adapters)
    : runtime_(runtime), table_(*operator_table(runtime.isa)), adapters_(adapters) {
    int rounds = 0;
    for (const AdapterRows& adapter : adapters) rounds = std::max(rounds, adapter.round + 1);
    expands_.resize(static_cast<size_t>(rounds));
    beside_.run = [this](int part) { reduces_.run(table_.lora_reduce, part, beside_.shares); };
}

const Beside* ProductUpdates::begin(const LinearWeight& weight, const float* x, float* out) {
    clear();
    for (const AdapterRows& adapter : adapters_) add(weight, adapter, adapter.rows, x, out);
    return start();
}

void ProductUpdates::clear() {
    calls_.calls.clear();
    calls_.rounds.clear();
}

void ProductUpdates::add(const LinearWeight& weight, const AdapterRows& adapter, const int32_t* out_rows,
                         const float* x, float* out) {
    add_calls(&weight, adapter, out_rows, x, out, weight.out_features(), calls_);
}

const Beside* ProductUpdates::start() {
    if (calls_.calls.empty()) return nullptr;
    reserve_reduced(runtime_, calls_.calls);
    reduces_.clear();
    for (LoraHalf& round : expands_) round.clear();
    for (size_t i = 0; i < calls_.calls.size(); ++i) {
        const LoraCall& call = calls_.calls[i];
        const int64_t blocks = (call.rank + kLoraRanks - 1) / kLoraRanks;
        reduces_.add(call, blocks, kLoraRanks * whole(call.columns, kLoraGroup));
        add_expand(call, expands_[static_cast<size_t>(calls_.rounds[i])]);
    }
    beside_.shares = reduces_.count_parts(runtime_.pool.threads());
    return &beside_;
}

void ProductUpdates::finish() {
    if (!calls_.calls.empty()) expand_counted(runtime_, calls_.calls, expands_);
}

void ProductUpdates::finish_within() {
    if (calls_.calls.empty()) return;
    runtime_.tally.count(describe(calls_.calls));
    expand(runtime_, expands_);
}

void update_product(Runtime& runtime, const LinearWeight& weight, std::span<const AdapterRows> adapters, const float* x,
                    float* out) {
    ProductUpdates updates(runtime, adapters);
    const Beside* const beside = updates.begin(weight, x, out);
    if (beside == nullptr) return;
    runtime.pool.parallel_for_near(beside->shares, [&](int share, int) { beside->run(share); });
    updates.finish();
}

void update_embeddings(Runtime& runtime, std::span<const AdapterRows> adapters, float* out, int64_t columns) {
    for (const AdapterRows& adapter : adapters) {
        if (adapter.looked_up == nullptr) continue;
        LoraCalls found;
        add_calls(nullptr, adapter, adapter.rows, nullptr, out, columns, found);
        reserve_reduced(runtime, found.calls);
        LoraHalf expands;
        for (const LoraCall& call : found.calls) {
            for (int64_t row = 0; row < call.count; ++row) {
                std::copy_n(adapter.looked_up + row * call.rank, call.rank, call.reduced + row * call.reduced_stride);
            }
            add_expand(call, expands);
        }
        if (!found.calls.empty()) expand_counted(runtime, found.calls, {&expands, 1});
    }
}

}  // namespace mlxr
