// See tally.h.
#include "runtime/tally.h"

#include <iterator>

#include "operators/operator_table.h"

namespace mlxr {

namespace {

constexpr const char* kOperators[] = {
#define OPERATOR(name) #name,
#include "tables/operators.def"
};
constexpr const char* kKernels[] = {
#define KERNEL(name, ledger) ledger,
#include "tables/kernels.def"
};
constexpr const char* kPages[] = {"f32", "f16", "bf16", "q8"};
constexpr const char* kScales[] = {"f32", "f32+softcap", "hadamard", "inverse hadamard", "cut"};
constexpr const char* kConvolutions[] = {"plain", "silu", "gated"};
constexpr const char* kStreams[] = {"mix", "spread", "match", "balance", "blend", "level"};
constexpr const char* kActivations[] = {
#define ACTIVATION(name, parameters) #name,
#include "tables/activations.def"
};
static_assert(std::size(kPages) == static_cast<size_t>(PageType::q8) + 1);
static_assert(std::size(kActivations) <= kUngated);

constexpr int kOperatorBits = 5, kItemBits = 10;
static_assert(kOperatorBits + kItemBits * Ran::kMost <= 64);

std::string name_form(OperatorName what, int form) {
    switch (what) {
        case OperatorName::linear:
        case OperatorName::embed:
        case OperatorName::moe:
            return type_info(static_cast<Type>(form)).name;
        case OperatorName::rms_norm:
        case OperatorName::layer_norm:
            return form == kResidual ? "f32+residual" : "f32";
        case OperatorName::scale:
            return kScales[form];
        case OperatorName::gate_heads:
            return form == 1 ? "elements" : "heads";
        case OperatorName::gated_delta:
        case OperatorName::mamba2:
            return form == 1 ? "decay of each channel" : "decay of each head";
        case OperatorName::scan:
            return "decay of each number";
        case OperatorName::gated_norm:
            return form == 2 ? "gate alone" : form == 1 ? "gate first" : "norm first";
        case OperatorName::short_conv:
            return kConvolutions[form];
        case OperatorName::streams:
            return kStreams[form];
        case OperatorName::rope:
            return form == 1 ? "interleaved" : "halves";
        case OperatorName::activate:
            return std::string(kActivations[form & (kUngated - 1)]) + ((form & kUngated) != 0 ? "+ungated" : "");
        case OperatorName::sample:
            return form == 1 ? "random" : "greedy";
        case OperatorName::write_pages:
            return kPages[form];
        case OperatorName::lora:
            return kPages[form];
        case OperatorName::add:
            return form == 1 ? "f32+scale" : "f32";
        default:
            return std::string(kPages[form % kWindow]) + ((form & kWindow) != 0 ? "+window" : "") +
                   ((form & kSoftcap) != 0 ? "+softcap" : "") + ((form & kSinks) != 0 ? "+sinks" : "") +
                   ((form & kLatent) != 0 ? "+latent" : "");
    }
}

// "rows q4_k+q6_k", or where kernels differ "rows q4_k, strips q6_k".
std::string name_items(OperatorName what, uint64_t items) {
    std::string text;
    int before = -1;
    for (; items != 0; items >>= kItemBits) {
        const int item = static_cast<int>(items & ((1 << kItemBits) - 1)) - 1, kernel = item / Ran::kForms;
        const char* const name = kKernels[kernel];
        if (kernel == before) {
            text += "+";
        } else {
            text += text.empty() ? "" : ", ";
            text += name;
            text += *name == '\0' ? "" : " ";
        }
        text += name_form(what, item % Ran::kForms);
        before = kernel;
    }
    return text;
}

}  // namespace

void Ran::add(KernelName kernel, int form) {
    const uint64_t item = static_cast<uint64_t>(static_cast<int>(kernel) * kForms + form + 1);
    uint64_t items = word_ >> kOperatorBits;
    for (int i = 0; i < items_; ++i, items >>= kItemBits) {
        if ((items & ((1 << kItemBits) - 1)) == item) return;
    }
    if (items_ == kMost) return;
    word_ |= item << (kOperatorBits + kItemBits * items_);
    ++items_;
}

void Tally::Entry::add(const Work& work) {
    bump(nanoseconds_, work.nanoseconds);
    bump(bytes_, work.bytes);
    bump(macs_, work.macs);
}

Tally::Entry& Tally::find(uint64_t word) {
    uint64_t at = word * 0x9E3779B97F4A7C15u >> (64 - kBits);
    for (int i = 0; i < kEntries; ++i, at = (at + 1) % kEntries) {
        Entry& entry = entries_[at];
        const uint64_t held = entry.word_.load(std::memory_order_relaxed);
        if (held == word) return entry;
        if (held != 0) continue;
        entry.word_.store(word, std::memory_order_relaxed);
        return entry;
    }
    return entries_[kEntries];
}

std::vector<std::pair<int32_t, Tally::Row>> Tally::rows() const {
    std::vector<std::pair<int32_t, Row>> found;
    for (int32_t i = 0; i <= kEntries; ++i) {
        const Entry& entry = entries_[i];
        const int64_t calls = entry.calls_.load(std::memory_order_relaxed);
        const uint64_t word = entry.word_.load(std::memory_order_relaxed);
        if (calls == 0) continue;
        const Work work{entry.nanoseconds_.load(std::memory_order_relaxed),
                        entry.bytes_.load(std::memory_order_relaxed), entry.macs_.load(std::memory_order_relaxed)};
        if (i == kEntries) {
            found.push_back({i, {"other", "", calls, work}});
            continue;
        }
        const auto what = static_cast<OperatorName>((word & ((1 << kOperatorBits) - 1)) - 1);
        found.push_back(
            {i, {kOperators[static_cast<int>(what)], name_items(what, word >> kOperatorBits), calls, work}});
    }
    return found;
}

std::vector<std::pair<std::string, int64_t>> Tally::expert_rows() const {
    std::vector<std::pair<std::string, int64_t>> found;
    for (int kernel = 0; kernel < static_cast<int>(KernelName::count); ++kernel) {
        for (int type = 0; type < kTypeCount; ++type) {
            const int64_t rows = expert_rows_[kernel][type].load(std::memory_order_relaxed);
            if (rows > 0)
                found.emplace_back(std::string(kKernels[kernel]) + " " + name_form(OperatorName::moe, type), rows);
        }
    }
    return found;
}

void Tally::start_profile(size_t events) {
    events_.clear();
    events_.reserve(events);
    most_events_ = events;
    profiling_ = true;
}

std::vector<Tally::Event> Tally::stop_profile() {
    profiling_ = false;
    return std::move(events_);
}

void Tally::keep(const Entry& entry, int64_t start_ns, int64_t end_ns) {
    if (events_.size() >= most_events_) return;
    events_.push_back({static_cast<int32_t>(&entry - entries_), start_ns, end_ns});
}

void Counted::finish() noexcept {
    const int64_t end_ns = Tally::now_ns();
    work_.nanoseconds = end_ns - start_ns_;
    entry_.add(work_);
    tally_.keep(entry_, start_ns_, end_ns);
}

}  // namespace mlxr
