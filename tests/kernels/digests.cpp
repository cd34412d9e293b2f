// What the kernels of every tier that this machine has compute of numbers made here, a digest for each case: equal bits
// on every processor, without Python. `digests FILE` compares with the file, `digests --write FILE` writes it.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "linear/repack.h"
#include "operators/operator_table.h"
#include "quants/quants.h"
#include "runtime/cpu_features.h"
#include "runtime/kernel_table.h"

namespace {

using mlxr::Isa;

template <class T>
struct Array {  // on cache lines, as the kernels' own memory
    explicit Array(size_t count) : held(count * sizeof(T) + 64), size(count) {}
    T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(held.data()) + 63) / 64 * 64); }
    T& operator[](size_t i) { return data()[i]; }
    std::vector<uint8_t> held;
    size_t size;
};

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
    float number() { return static_cast<float>(static_cast<int32_t>(next() >> 7) - (1 << 23)) * 0x1p-22f; }  // exact
    Array<float> numbers(size_t count, float scale = 1.0f) {
        Array<float> made(count);
        for (size_t i = 0; i < count; ++i) made[i] = number() * scale;
        return made;
    }
};

std::map<std::string, std::string> found;  // by case, of the first tier
bool agrees = true;

uint64_t hash_bytes(const void* data, size_t size) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
    return hash;
}

template <class T>
void note(const char* tier, const std::string& name, Array<T>& values) {
    const uint64_t hash = hash_bytes(values.data(), values.size * sizeof(T));
    char text[32];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    const auto [at, is_new] = found.emplace(name, text);
    if (is_new || at->second == text) return;
    std::printf("%s: %s is %s, not %s\n", tier, name.c_str(), text, at->second.c_str());
    agrees = false;
}

constexpr int64_t kColumns = 512, kRows = 40, kBlocks = 4;  // the last block is empty, a panel has two

// Raw blocks of random bits; with bit 6 clear no scale of any type is infinite, or not-a-number.
Array<uint8_t> make_blocks(mlxr::Type type, Random& random) {
    const mlxr::TypeInfo& info = mlxr::type_info(type);
    Array<uint8_t> raw(static_cast<size_t>(kRows * kColumns / info.block_elements * info.block_bytes));
    for (size_t i = 0; i < raw.size; ++i) raw[i] = static_cast<uint8_t>(random.next() & 0xbfu);
    return raw;
}

Array<uint8_t> repack(mlxr::Type type, Array<uint8_t>& raw) {
    const int64_t bytes = mlxr::block_bytes(type, kColumns), blocks = kBlocks * 16 / mlxr::block_rows(type);
    Array<uint8_t> made(static_cast<size_t>(bytes * blocks));
    for (int64_t block = 0; block * mlxr::block_rows(type) < kRows; ++block) {
        mlxr::repack_block(type, raw.data(), kRows, kColumns, block, made.data() + block * bytes);
    }
    return made;
}

// The activations of one tile of tokens, in all three forms.
struct Quantised {
    Quantised(Array<float>& x, int64_t tokens, void (*quantize)(const mlxr::QuantizeJob&))
        : items(static_cast<size_t>(tokens * kColumns / 32)),
          values(32 * items),
          shorts(32 * items),
          scales(items),
          scaled(items),
          short_scales(items),
          sums(items),
          half_sums(2 * items) {
        for (int z = 0; z < mlxr::kZeroPointCount; ++z) zeros.emplace_back(2 * items);
        a = {kColumns / 32,    tokens,        values.data(),      {}, scales.data(), scaled.data(), sums.data(),
             half_sums.data(), shorts.data(), short_scales.data()};
        for (int z = 0; z < mlxr::kZeroPointCount; ++z) a.zeros[z] = zeros[static_cast<size_t>(z)].data();
        const mlxr::QuantizeJob job{x.data(), kColumns, kColumns, 0, tokens, 0, kColumns / 32, &a};
        quantize(job);
    }
    size_t items;
    Array<int8_t> values;
    Array<int16_t> shorts;
    Array<float> scales, scaled, short_scales;
    Array<int16_t> sums, half_sums;
    std::vector<Array<int32_t>> zeros;
    mlxr::Activations a;
};

void multiply(const mlxr::KernelTable& table, mlxr::Type type) {
    const mlxr::QuantKernels& kernels = table.quant[static_cast<int>(type)];
    const std::string name = mlxr::type_info(type).name;
    Random random{hash_bytes(name.data(), name.size())};  // so that other types change nothing
    Array<uint8_t> raw = make_blocks(type, random), weights = repack(type, raw);
    Array<float> bias = random.numbers(kRows);
    if (kernels.decode != nullptr) {
        Array<float> decoded(kRows * kColumns);
        kernels.decode(raw.data(), kRows * kColumns / mlxr::type_info(type).block_elements, decoded.data());
        note(table.name, "decode " + name, decoded);
    }
    for (const int64_t tokens : {1, 5, 12}) {
        Array<float> x = random.numbers(static_cast<size_t>(tokens * kColumns));
        x[7] = x[200] = 0.0f;
        Quantised q(x, tokens,
                    kernels.shorts  ? table.quantize_shorts
                    : kernels.spans ? table.quantize_spans
                                    : table.quantize_groups);
        const std::string label = "linear " + name + " " + std::to_string(tokens);
        const mlxr::RowsJob job{
            weights.data(), kColumns / kernels.unit_columns, 0, (kRows + 15) / 16, kRows, &q.a, tokens, nullptr, kRows,
            bias.data()};
        for (const auto* const run : {&kernels.rows, &kernels.strips}) {
            if (run->run == nullptr || (run == &kernels.strips && tokens < kernels.strip_tokens)) continue;
            Array<float> out(static_cast<size_t>(tokens * kRows));
            mlxr::RowsJob own = job;
            own.out = out.data();
            run->run(own);
            note(table.name, label, out);
        }
        Array<float> out(static_cast<size_t>(tokens * kRows));
        for (int64_t block = 0; block * 16 < kRows; block += 2) {
            Array<uint8_t> panel(static_cast<size_t>(kernels.panel_group_bytes * kColumns / 32));
            kernels.unpack({weights.data(), kColumns / kernels.unit_columns, (kRows + 15) / 16, block, 0,
                            kColumns / kernels.unit_columns, panel.data()});
            const int64_t rows = kRows - 16 * block < 32 ? kRows - 16 * block : 32;
            kernels.panel({panel.data(), 0, kColumns / 32, &q.a, 0, tokens, out.data() + 16 * block, kRows, rows,
                           bias.data() + 16 * block});
        }
        note(table.name, label, out);
    }
}

void multiply_floats(const mlxr::KernelTable& table, const mlxr::OperatorTable& operators) {
    Random random{99};
    for (const mlxr::Type type : {mlxr::Type::f32, mlxr::Type::bf16}) {
        Array<uint8_t> raw = make_blocks(type, random), weights = repack(type, raw);
        Array<float> bias = random.numbers(kRows);
        for (const int64_t tokens : {1, 5}) {
            Array<float> x = random.numbers(static_cast<size_t>(tokens * kColumns)),
                         out(static_cast<size_t>(tokens * kRows));
            if (type == mlxr::Type::f32) {
                table.dense({weights.data(), kColumns, 0, 2, kRows, x.data(), tokens, out.data(), kRows, bias.data()});
            } else {
                Array<uint32_t> words(static_cast<size_t>(tokens * kColumns / 2 * operators.kept_words));
                operators.narrow_rows({x.data(), kColumns, kColumns, tokens, words.data()}, 0, tokens);
                operators.multiply_dense_pairs({reinterpret_cast<const uint32_t*>(weights.data()), kColumns, kRows,
                                                words.data(), tokens, out.data(), kRows, bias.data()},
                                               0, 2, 0, tokens);
            }
            note(table.name, std::string("linear ") + mlxr::type_info(type).name + " " + std::to_string(tokens), out);
        }
    }
}

void attend(const char* tier, const mlxr::OperatorTable& operators) {
    constexpr int64_t kPage = 32, kContext = 300, kPages = 10, kGroup = 4, kQueries = 3;
    const char* const names[] = {"f32", "f16", "bf16", "q8"};
    for (const int64_t dim : {64, 80}) {
        for (int kind = 0; kind < 4; ++kind) {
            // The small ones make products below the least normal number.
            for (const float size : {1.0f, 0x1p-122f}) {
                Random random{static_cast<uint64_t>(dim)};
                const auto type = static_cast<mlxr::PageType>(kind);
                const auto bytes = static_cast<size_t>(kPages * kPage * mlxr::row_bytes(type, dim));
                Array<uint8_t> pools[2] = {Array<uint8_t>(bytes), Array<uint8_t>(bytes)};
                std::vector<int32_t> slots(kContext), table(kPages);
                for (int64_t i = 0; i < kPages; ++i)
                    table[static_cast<size_t>(i)] = static_cast<int32_t>(kPages - 1 - i);
                for (int64_t i = 0; i < kContext; ++i) {
                    slots[static_cast<size_t>(i)] =
                        static_cast<int32_t>(table[static_cast<size_t>(i / kPage)] * kPage + i % kPage);
                }
                for (const int values : {0, 1}) {
                    Array<float> rows = random.numbers(static_cast<size_t>(kContext * dim), values == 1 ? size : 1.0f);
                    operators.write_pages({rows.data(), dim, kContext, 1, kPage, dim, slots.data(),
                                           pools[values].data(), type, values == 1},
                                          0);
                }
                Array<float> q = random.numbers(kQueries * kGroup * static_cast<size_t>(dim)),
                             sinks = random.numbers(kGroup);
                const int32_t starts[] = {0, kQueries}, lengths[] = {kContext};
                for (const bool plain : {true, false}) {
                    Array<float> out(kQueries * kGroup * static_cast<size_t>(dim));
                    const int64_t padded = (dim + 15) / 16 * 16, window = plain ? mlxr::kAllPositions : 77;
                    const mlxr::AttendCall call{.q = q.data(),
                                                .q_stride = kGroup * dim,
                                                .k_pool = pools[0].data(),
                                                .v_pool = pools[1].data(),
                                                .type = type,
                                                .heads = kGroup,
                                                .kv_heads = 1,
                                                .group = kGroup,
                                                .page_size = kPage,
                                                .head_dim = dim,
                                                .value_dim = dim,
                                                .values_in_keys = false,
                                                .padded_dim = padded,
                                                .padded_value = padded,
                                                .scale = 0.125f,
                                                .softcap = plain ? 0.0f : 3.0f,
                                                .sinks = plain ? nullptr : sinks.data(),
                                                .biases = nullptr,
                                                .bias_span = 0,
                                                .window = window,
                                                .symmetric = false,
                                                .query_starts = starts,
                                                .context_lengths = lengths,
                                                .page_table = table.data(),
                                                .table_stride = kPages,
                                                .ends = nullptr,
                                                .out = out.data()};
                    const int64_t low = plain ? 0 : kContext - kQueries + 1 - window;
                    const mlxr::AttendTask task{0,
                                                0,
                                                0,
                                                kQueries * kGroup,
                                                low,
                                                kContext,
                                                low / mlxr::kChunkPositions,
                                                (kContext + mlxr::kChunkPositions - 1) / mlxr::kChunkPositions,
                                                nullptr,
                                                nullptr};
                    Array<uint8_t> scratch(static_cast<size_t>(operators.attend_scratch_bytes(call)));
                    operators.attend(call, task, scratch.data());
                    note(tier,
                         std::string("attend ") + names[kind] + " " + std::to_string(dim) + (plain ? "" : " capped") +
                             (size < 1 ? " small" : ""),
                         out);
                }
            }
        }
    }
}

void run_others(const char* tier, const mlxr::OperatorTable& operators) {
    constexpr int64_t kWidth = 100, kTokens = 3, kAll = kWidth * kTokens;
    Random random{5};
    Array<float> x = random.numbers(kAll, 4.0f), other = random.numbers(kAll), weight = random.numbers(kWidth),
                 out(kAll), sum(kAll);
    operators.rms_norm({x.data(), other.data(), weight.data(), out.data(), sum.data(), kWidth, 1e-5f, 0.5f}, 0,
                       kTokens);
    note(tier, "rms_norm", out);
    operators.layer_norm({x.data(), nullptr, weight.data(), weight.data(), out.data(), sum.data(), kWidth, 1e-5f}, 0,
                         kTokens);
    note(tier, "layer_norm", out);
    for (int kind = 0; kind < static_cast<int>(sizeof mlxr::kParameterCounts / sizeof(int)); ++kind) {
        const mlxr::ActivationParameters parameters{{0.5f, 0.75f, 0.5f, -0.25f}};
        const bool is_alone = mlxr::kParameterCounts[kind] > 0;
        const int64_t columns = kWidth / 2;  // the gated kind takes both halves of x
        operators.activate({x.data(), is_alone ? nullptr : other.data(), out.data(), columns, kWidth, kWidth, kWidth,
                            static_cast<mlxr::Activation>(kind), parameters},
                           0, kTokens, 0, columns);
        note(tier, "activate " + std::to_string(kind), out);
    }
    operators.scale({x.data(), out.data(), 0.7f, 2.5f}, 0, kAll);
    note(tier, "softcap", out);
    operators.gate_heads({x.data(), other.data(), out.data(), kWidth, 10}, 0, kTokens);
    note(tier, "gate_heads", out);
    Array<float> peaks(1), terms(kAll);
    const mlxr::LogitScan scan = operators.scan_logits(x.data(), kAll, peaks.data());
    Array<double> total(1);
    total[0] = operators.sum_exponentials(x.data(), kAll, scan.peak, 1.5f, terms.data());
    note(tier, "exponentials", terms);
    note(tier, "sum of exponentials", total);
    Array<int32_t> chosen(2 * kTokens);
    Array<float> shares(2 * kTokens);
    operators.route({x.data(), kWidth, 2, mlxr::Scoring::softmax, 1, 1, true, 0.0f, 1.0f, 0.0f, nullptr, nullptr,
                     chosen.data(), shares.data()},
                    0, kTokens);
    note(tier, "route", shares);
}

}  // namespace

int main(int count, char** arguments) {
    const bool writes = count == 3 && std::strcmp(arguments[1], "--write") == 0;
    if (count != 2 && !writes) return std::printf("digests [--write] FILE\n"), 2;
    for (int i = 0; i < mlxr::kIsaCount; ++i) {
        const auto isa = static_cast<Isa>(i);
        if (!mlxr::isa_available(isa)) continue;
        const mlxr::KernelTable& table = *mlxr::kernel_table(isa);
        const mlxr::OperatorTable& operators = *mlxr::operator_table(isa);
        for (int type = 0; type < mlxr::kTypeCount; ++type) {
            if (table.quant[type].rows.run != nullptr) multiply(table, static_cast<mlxr::Type>(type));
        }
        multiply_floats(table, operators);
        attend(table.name, operators);
        run_others(table.name, operators);
        std::printf("%s: %zu cases\n", table.name, found.size());
    }
    std::FILE* const file = std::fopen(arguments[count - 1], writes ? "w" : "r");
    if (file == nullptr) return std::printf("cannot open %s\n", arguments[count - 1]), 2;
    if (writes) {
        for (const auto& [name, digest] : found) std::fprintf(file, "%s %s\n", digest.c_str(), name.c_str());
    } else {
        char digest[17], name[80];
        size_t known = 0;
        while (std::fscanf(file, "%16s %79[^\n]", digest, name) == 2) {
            ++known;
            if (found[name] == digest) continue;
            std::printf("%s is %s, of the file %s\n", name, found[name].c_str(), digest);
            agrees = false;
        }
        agrees = agrees && known == found.size();
    }
    std::fclose(file);
    std::printf(agrees ? "equal\n" : "NOT EQUAL\n");
    return agrees ? 0 : 1;
}
