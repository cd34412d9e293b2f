// See input.h.
#include "linear/input.h"

#include <algorithm>
#include <cstring>

#include "operators/operator_table.h"

namespace mlxr {

namespace {

// Hands out aligned memory from an address on.
class Places {
  public:
    explicit Places(std::byte* at) : at_(at) {}

    template <typename Value>
    Value* take(int64_t count) {
        std::byte* const taken = at_;
        at_ += align_line(count * static_cast<int64_t>(sizeof(Value)));
        return reinterpret_cast<Value*>(taken);
    }
    std::byte* end() const { return at_; }

  private:
    std::byte* at_;
};

// Items of one token and group each.
int64_t lay_out_bytes(const Needs::Bytes& bytes, const LinearInput& input, int64_t tokens, Activations& a,
                      Places& places) {
    a.groups = input.columns / kGroupColumns;
    a.tile = input.tile;
    const int64_t items = tokens * a.groups;
    a.values = places.take<int8_t>(kGroupColumns * items);
    for (int z = 0; z < kZeroPointCount; ++z) {
        a.zeros[z] = bytes.zeros[z] ? places.take<int32_t>(kZeroPoints[z].halves ? 2 * items : items) : nullptr;
    }
    return items;
}

// `count` values of each item, in tiles of one token and of a.tile; null pointers are left out.
template <typename Value>
void copy_items(const Value* from, Value* to, int64_t count, int64_t items, int64_t first, int64_t stride) {
    if (from == nullptr || to == nullptr) return;
    for (int64_t i = 0; i < items; ++i) {
        for (int64_t j = 0; j < count; ++j) to[count * (first + i * stride) + j] = from[count * i + j];
    }
}

// The same for the 32 values of each item.
template <typename Value>
void copy_values(const Value* from, Value* to, int64_t items, int64_t first, int64_t stride) {
    if (to == nullptr) return;
    for (int64_t i = 0; i < items; ++i) {
        std::memcpy(to + kGroupColumns * (first + i * stride), from + kGroupColumns * i, kGroupColumns * sizeof(Value));
    }
}

void copy_activations(const Activations& from, const Activations& to, int64_t token, bool spans) {
    if (to.groups == 0) return;
    const int64_t first = item_index(to, token, 0), items = to.groups;
    copy_values(from.values, to.values, items, first, to.tile);
    copy_values(from.shorts, to.shorts, items, first, to.tile);
    for (int z = 0; z < kZeroPointCount; ++z) {
        copy_items(from.zeros[z], to.zeros[z], kZeroPoints[z].halves ? 2 : 1, items, first, to.tile);
    }
    copy_items(from.scaled_sums, to.scaled_sums, 1, items, first, to.tile);
    copy_items(from.short_scales, to.short_scales, 1, items, first, to.tile);
    if (!spans) return copy_items(from.scales, to.scales, 1, items, first, to.tile);
    const int64_t first_span = span_index(to, token, 0), count = items / kSpanGroups;
    copy_items(from.scales, to.scales, 1, count, first_span, to.tile);
    copy_items(from.sums, to.sums, kSpanGroups, count, first_span, to.tile);
    copy_items(from.half_sums, to.half_sums, 2 * kSpanGroups, count, first_span, to.tile);
}

}  // namespace

void Needs::add(const Runtime& runtime, const LinearWeight& weight) {
    for (const LinearWeight::Part& part : weight.parts()) {
        pairs |= part.type == Type::bf16;
        floats |= part.type == Type::f32;
        if (is_dense(part.type)) continue;
        const QuantKernels& kernels = runtime.kernels->quant[static_cast<int>(part.type)];
        shorts |= kernels.shorts;
        if (kernels.shorts) continue;
        Bytes& bytes = kernels.spans ? spans : groups;
        bytes.any = true;
        bytes.sums |= kernels.min_columns == 32;
        bytes.half_sums |= kernels.min_columns == 16;
        if (kernels.zero_point >= 0) bytes.zeros[kernels.zero_point] = true;
    }
}

std::byte* lay_out(const Runtime& runtime, const Needs& needs, LinearInput& input, std::byte* at) {
    Places places(at);
    const int64_t tokens = (input.tokens + input.tile - 1) / input.tile * input.tile;
    if (needs.pairs) {
        input.pair_words = operator_table(runtime.isa)->kept_words;
        input.pairs = places.take<uint32_t>(tokens * ((input.columns + 1) / 2) * input.pair_words);
    }
    if (needs.groups.any) {
        Activations& a = input.groups;
        const int64_t items = lay_out_bytes(needs.groups, input, tokens, a, places);
        a.scales = places.take<float>(items);
        a.scaled_sums = places.take<float>(items);
    }
    if (needs.spans.any) {
        Activations& a = input.spans;
        const int64_t items = lay_out_bytes(needs.spans, input, tokens, a, places);
        a.scales = places.take<float>(items / kSpanGroups);
        if (needs.spans.sums) a.sums = places.take<int16_t>(items);
        if (needs.spans.half_sums) a.half_sums = places.take<int16_t>(2 * items);
    }
    if (needs.shorts) {
        Activations& a = input.shorts;
        const int64_t unit_columns = runtime.kernels->quant[static_cast<int>(Type::f16)].unit_columns;
        a.groups = units_of(runtime, Type::f16, input.columns) * unit_columns / kGroupColumns;
        a.tile = input.tile;
        const int64_t items = tokens * a.groups;
        a.shorts = places.take<int16_t>(kGroupColumns * items);
        a.short_scales = places.take<float>(items);
    }
    return places.end();
}

int64_t measure_input(const Runtime& runtime, const Needs& needs, LinearInput input) {
    const std::byte* const nothing = nullptr;
    return lay_out(runtime, needs, input, nullptr) - nothing;
}

void quantize(const Runtime& runtime, const LinearInput& input, const QuantizeJob& job) {
    const KernelTable& kernels = *runtime.kernels;
    const auto convert = [&](const Activations& to, void (*kernel)(const QuantizeJob&)) {
        if (to.groups == 0) return;
        QuantizeJob own = job;
        own.last_group = std::min(job.last_group, to.groups);
        own.activations = &to;
        kernel(own);
    };
    convert(input.groups, kernels.quantize_groups);
    convert(input.spans, kernels.quantize_spans);
    convert(input.shorts, kernels.quantize_shorts);
}

void convert_tokens(const Runtime& runtime, const LinearInput& input, int64_t first, int64_t last) {
    constexpr int64_t kAllGroups = int64_t{1} << 40;
    if (input.pairs != nullptr) {
        operator_table(runtime.isa)
            ->narrow_rows({input.x, input.columns, input.stride(), input.tile, input.pairs}, first, last);
    }
    quantize(runtime, input,
             {.x = input.x + first * input.stride(),
              .x_stride = input.stride(),
              .columns = input.columns,
              .first_token = first,
              .last_token = last,
              .first_group = 0,
              .last_group = kAllGroups,
              .activations = nullptr});
}

void copy_token(const LinearInput& from, const LinearInput& to, int64_t token, float* floats) {
    copy_activations(from.groups, to.groups, token, false);
    copy_activations(from.spans, to.spans, token, true);
    copy_activations(from.shorts, to.shorts, token, false);
    if (to.pairs != nullptr) {
        const int64_t pairs = (to.columns + 1) / 2, words = to.pair_words;
        const int64_t first = token / to.tile * pairs * to.tile + token % to.tile;
        for (int64_t i = 0; i < pairs; ++i) {
            std::copy_n(from.pairs + i * words, words, to.pairs + (first + i * to.tile) * words);
        }
    }
    if (floats != nullptr) std::copy_n(from.x, to.columns, floats + token * to.columns);
}

}  // namespace mlxr
