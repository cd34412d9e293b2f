// The Python face of layers (blocks.h). What belongs to the weights is checked when a layer is added, what belongs to a
// batch with each call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/adapter.h"
#include "bindings/checks.h"
#include "bindings/embed.h"
#include "bindings/experts.h"
#include "bindings/mixers.h"
#include "bindings/weight.h"
#include "embed/embed.h"
#include "layers/blocks.h"
#include "layers/spread.h"

void bind_blocks(nb::module_& m);

namespace {

using mlxr::PythonWeight;

// Layers, and the arrays they point into; nanobind keeps the weights alive.
struct PythonLayers {
    std::vector<mlxr::Layer> layers;
    std::vector<Vector> arrays;
    std::vector<mlxr::RawBlocks> tables;
    std::vector<Matrix> matrices;
    int64_t experts = 0;                                // that the last router of this layer chooses from
    int64_t columns = 0;                                // of the stream
    std::array<int64_t, mlxr::kRegisters> widths = {};  // columns of what was last written there
    std::vector<int64_t> state_floats;                  // of each layer: how long its slots must be

    mlxr::Layer& last() {
        if (layers.empty()) refuse("layers: append_layer", "missing", "called before operators are appended");
        return layers.back();
    }

    void append_layer(int64_t own_columns) {
        experts = 0;
        if (!layers.empty()) check_size("layers: columns of the stream", own_columns, columns);
        columns = own_columns;
        state_floats.push_back(0);
        layers.emplace_back();
    }

    // The last operator keeps `floats` numbers of a sequence's state, from `at` on.
    void keep_state(int64_t at, int64_t floats) {
        if (at < 0) refuse("layers: state", std::to_string(at), "at 0 or more");
        state_floats.back() = std::max(state_floats.back(), at + floats);
    }

    // Columns of what was kept that an operator reads, from `first` on.
    void check_kept(int64_t first, int64_t count) const {
        if (first < 0 || first + count > width(mlxr::Register::kept)) {
            refuse("layers: columns that were kept", std::to_string(width(mlxr::Register::kept)),
                   std::to_string(first + count));
        }
    }

    mlxr::Operator& append(mlxr::Kind kind, const char* source = "x", const char* target = "x") {
        mlxr::Operator op{};
        op.kind = kind;
        op.source = parse_register(source);
        op.target = parse_register(target);
        return last().operators.emplace_back(op);
    }

    static bool is_of_stream(mlxr::Register place) {
        return place == mlxr::Register::stream || place == mlxr::Register::delta || place == mlxr::Register::normed;
    }

    // Columns of a register, 0 before it is written.
    int64_t width(mlxr::Register place) const {
        return is_of_stream(place) ? columns : widths[static_cast<size_t>(place)];
    }

    // An operator writes so many columns there.
    void write(const char* what, mlxr::Register place, int64_t written) {
        if (is_of_stream(place)) check_size(what, written, columns);
        widths[static_cast<size_t>(place)] = written;
    }

    const float* keep(const char* what, const Vector& array, int64_t length) {
        check_size(what, size_of(array, 0), length);
        arrays.push_back(array);
        return array.data();
    }

    const float* keep(const char* what, const OptionalVector& array, int64_t length) {
        return array ? keep(what, *array, length) : nullptr;
    }

    static mlxr::Register parse_register(const std::string& name) {
        if (name == "stream") return mlxr::Register::stream;
        if (name == "delta") return mlxr::Register::delta;
        if (name == "normed") return mlxr::Register::normed;
        if (name == "x") return mlxr::Register::x;
        if (name == "inputs") return mlxr::Register::inputs;
        if (name == "kept") return mlxr::Register::kept;
        if (name != "other") refuse("layers: register", name, "stream, delta, normed, x, kept, other or inputs");
        return mlxr::Register::other;
    }
};

// The last layer attends. Shapes of products are checked by whoever makes the blocks; here, that one operator's results
// fit the next one's input.
void append_heads(PythonLayers& self, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, int64_t window,
                  float softcap, OptionalVector sinks, int64_t rope, int64_t group) {
    if (head_dim < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
        refuse("layers: heads", std::to_string(heads), "a multiple of the " + std::to_string(kv_heads) + " key heads");
    }
    if (group < 0) refuse("layers: group", std::to_string(group), "0 or more");
    if (rope < 0) refuse("layers: rope", std::to_string(rope), "0 or more");
    check_softcap("layers: softcap", softcap);
    mlxr::Layer& layer = self.last();
    layer.heads = heads;
    layer.kv_heads = kv_heads;
    layer.head_dim = head_dim;
    layer.window = positions_seen(window);
    layer.scale = scale;
    layer.softcap = softcap;
    layer.sinks = self.keep("layers: length of sinks", sinks, heads);
    layer.rope = rope;
    layer.group = group;
}

void append_norm(PythonLayers& self, Vector weight, OptionalVector bias, float eps, bool is_layer_norm,
                 const char* source, const char* target, int64_t parts) {
    mlxr::Operator& op = self.append(mlxr::Kind::norm, source, target);
    op.columns = self.width(op.source);
    op.parts = parts;
    if (parts < 1 || op.columns % parts != 0) {
        refuse("layers: parts of a norm", std::to_string(parts), "a divisor of " + std::to_string(op.columns));
    }
    op.norm = {self.keep("layers: length of a norm", weight, op.columns / parts),
               self.keep("layers: length of a norm's bias", bias, op.columns / parts), eps, is_layer_norm};
    self.write("layers: columns that are normed", op.target, op.columns);
}

void append_product(PythonLayers& self, PythonWeight& weight, const char* source, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::product, source, target);
    check_size("layers: in_features of a product", weight.weight.in_features(), self.width(op.source));
    self.write("layers: columns of a product", op.target, weight.weight.out_features());
    op.weight = &weight.weight;
    weight.used = true;
}

mlxr::HeadNorm parse_head_norm(const std::string& name) {
    if (name == "each") return mlxr::HeadNorm::each;
    if (name == "joint") return mlxr::HeadNorm::joint;
    if (name != "layer") refuse("layers: norms of heads", name, "each, joint or layer");
    return mlxr::HeadNorm::layer;
}

void append_split_heads(PythonLayers& self, OptionalVector q_norm, OptionalVector k_norm, float eps, bool norms_values,
                        const std::string& projected, const std::string& norms) {
    const mlxr::Layer& layer = self.last();
    mlxr::Operator& op = self.append(mlxr::Kind::split_heads);
    if (q_norm.has_value() != k_norm.has_value()) refuse("layers: q_norm", "alone", "given with k_norm");
    const int64_t dim = layer.head_dim;
    op.projected = static_cast<int64_t>(projected.size());
    if (op.projected < 1 || op.projected > 3) refuse("layers: projected", projected, "qkv, qk or q");
    check_size("layers: columns of qkv", self.width(op.source),
               (layer.heads + (op.projected - 1) * layer.kv_heads) * dim);
    self.write("layers: columns of queries", op.target, layer.heads * dim);
    op.norms_heads = parse_head_norm(norms);
    const bool is_each = op.norms_heads == mlxr::HeadNorm::each;
    op.q_norm = self.keep("layers: length of q_norm", q_norm, is_each ? dim : layer.heads * dim);
    op.k_norm = self.keep("layers: length of k_norm", k_norm, is_each ? dim : layer.kv_heads * dim);
    op.norm.eps = eps;
    op.norms_values = norms_values;
}

// With `first` the inputs' columns from that one on multiply what is activated.
void append_activate(PythonLayers& self, const char* kind, int64_t features, std::optional<int64_t> first) {
    mlxr::Operator& op = self.append(mlxr::Kind::activate);
    const int64_t columns = self.width(op.source);
    op.activation = parse_activation("layers: activation", kind);
    op.features = features;
    op.gated = columns != features;
    op.first = -1;
    if (first) {
        check_size("layers: columns of a gate", columns, features);
        op.first = *first;
        op.columns = self.width(mlxr::Register::inputs);
        if (op.first < 0 || op.first + features > op.columns) {
            refuse("layers: first of the inputs", std::to_string(op.first),
                   "so that " + std::to_string(features) + " of " + std::to_string(op.columns) + " columns follow");
        }
    } else if (op.gated) {
        check_size("layers: columns of gate and up", columns, 2 * features);
    } else if (op.activation == mlxr::Activation::clamped_swiglu) {
        refuse("layers: activation", kind, "a kind without a gate");
    }
    self.write("layers: columns that are activated", op.target, features);
}

void append_scale(PythonLayers& self, float factor, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::scale, target, target);
    op.factor = factor;
    op.columns = self.width(op.target);
}

void append_join(PythonLayers& self, float factor, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::join, "other", target);
    op.factor = factor;
    op.columns = self.width(op.target);
    check_size("layers: columns that are joined", self.width(op.source), op.columns);
}

void append_route(PythonLayers& self, const mlxr::PythonRouter& router) {
    mlxr::Operator& op = self.append(mlxr::Kind::route);
    op.router = router.call;
    check_size("layers: columns of a router", self.width(op.source), op.router.experts);
    for (const OptionalVector& vector : {router.choice_bias, router.expert_scales}) {
        if (vector) self.arrays.push_back(*vector);
    }
    self.experts = op.router.experts;
}

void append_mix(PythonLayers& self, const mlxr::PythonExperts& mixture, const char* source, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::mix, source, target);
    check_size("layers: number of experts", mixture.experts.count(), self.experts);
    if (self.experts == 0) refuse("layers: experts", "before a router", "after it");
    check_size("layers: in_features of experts", mixture.experts.columns(), self.columns);
    check_size("layers: columns that experts read", self.width(op.source), self.columns);
    self.write("layers: columns of experts", op.target, self.columns);
    op.experts = &mixture.experts;
}

void append_gate_rows(PythonLayers& self, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::gate_rows, "x", target);
    check_size("layers: columns of a gate of rows", self.width(op.source), 1);
    op.columns = self.width(op.target);
}

void append_rows(PythonLayers& self, const std::string& type, mlxr::RawBlocks data, int64_t columns,
                 const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::rows, target, target);
    if (columns < 1) refuse("layers: columns of a table", std::to_string(columns), "1 or more");
    op.columns = columns;
    op.table.type = mlxr::check_table(type, data, static_cast<size_t>(columns));
    op.table.data = data.data();
    op.table.rows = static_cast<int64_t>(mlxr::count_rows(op.table.type, data, static_cast<size_t>(columns)));
    self.tables.push_back(data);
    self.write("layers: columns of a table", op.target, columns);
}

void append_gate_heads(PythonLayers& self) {
    mlxr::Operator& op = self.append(mlxr::Kind::gate_heads);
    op.kept_columns = self.width(mlxr::Register::kept);
    if (op.kept_columns < 1 || self.width(mlxr::Register::x) % op.kept_columns != 0) {
        refuse("layers: gates", std::to_string(op.kept_columns),
               "a divisor of the " + std::to_string(self.width(mlxr::Register::x)) + " columns");
    }
}

void append_gated_norm(PythonLayers& self, OptionalVector weight, int64_t width, float eps, bool gate_first,
                       int64_t first) {
    mlxr::Operator& op = self.append(mlxr::Kind::gated_norm);
    op.gated_norm = check_gated_norm(weight, self.width(mlxr::Register::x), width, eps, gate_first);
    if (weight) self.arrays.push_back(*weight);
    self.check_kept(first, self.width(mlxr::Register::x));
    op.kept_first = first;
}

void append_short_conv(PythonLayers& self, Matrix weight, OptionalVector bias, const char* kind, int64_t first,
                       int64_t at) {
    mlxr::Operator& op = self.append(mlxr::Kind::short_conv, "kept");
    op.conv = check_conv(weight, bias, kind);
    self.matrices.push_back(weight);
    if (bias) self.arrays.push_back(*bias);
    self.check_kept(first, conv_inputs(op.conv));
    op.kept_first = first;
    op.conv.states.first = at;
    self.keep_state(at, conv_state_floats(op.conv));
    self.write("layers: columns of a mixer", mlxr::Register::x, op.conv.channels);
}

// What both recurrences have in common once they are checked.
void append_recurrence(PythonLayers& self, mlxr::Kind kind, const Recurrence& rule, int64_t gates, int64_t first,
                       int64_t at) {
    mlxr::Operator& op = self.append(kind);
    op.prepare = rule.prepare;
    op.recurrence = rule.call;
    op.recurrence.states.first = at;
    op.kept_first = first;
    self.check_kept(first, gates);
    self.keep_state(at, rule.state_floats());
    self.write("layers: columns of a mixer", mlxr::Register::x, rule.out_columns());
}

void append_gated_delta(PythonLayers& self, Vector rates, Vector bias, int64_t key_heads, int64_t value_heads,
                        int64_t rows, int64_t columns, bool tiled, float eps, float scale, int64_t first, int64_t at) {
    Recurrence rule("gated_delta", key_heads, value_heads, rows, columns);
    rule.take_rates("gated_delta: length of rates and bias", rates, bias);
    rule.take_lengths(eps, scale);
    rule.call.tiled = tiled;
    check_size("layers: columns of qkv", self.width(mlxr::Register::x), rule.columns());
    self.arrays.insert(self.arrays.end(), {rates, bias});
    append_recurrence(self, mlxr::Kind::gated_delta, rule, value_heads + rule.prepare.decays, first, at);
}

void append_mamba2(PythonLayers& self, Vector rates, Vector bias, Vector skip, int64_t groups, int64_t rows,
                   int64_t columns, int64_t first, int64_t at) {
    Recurrence rule("mamba2", groups, size_of(skip, 0), rows, columns);
    check_size("mamba2: length of rates", size_of(rates, 0), size_of(skip, 0));
    rule.take_rates("mamba2: length of bias", rates, bias);
    rule.call.skip = skip.data();
    check_size("layers: columns of xbc", self.width(mlxr::Register::x), rule.columns());
    self.arrays.insert(self.arrays.end(), {rates, bias, skip});
    append_recurrence(self, mlxr::Kind::mamba2, rule, rule.prepare.decays, first, at);
}

using PythonRope = std::tuple<Matrix, Matrix, bool, OptionalVector>;  // cos, sin, interleaved, factors of queries

// What the bindings of run_layers and forward have in common: pools, and where the tokens of the batch stand.
struct Batch {
    mlxr::TokenIds token_ids;
    nb::sequence k_pools, v_pools;
    Ints positions;
    std::vector<PythonRope> ropes;
    std::vector<Ints> slots;  // of each group of layers
    Ints query_starts, context_lengths;
    std::vector<IntMatrix> page_tables;
    nb::sequence states;  // the pool of each layer, or None
    Ints state_reads, state_writes;
    PythonAdapterRows adapters;
};

// Layers that keep states get their pools, and the call the slots.
void check_states(const PythonLayers& self, const Batch& batch, int64_t tokens, std::vector<mlxr::Layer>& layers,
                  mlxr::LayersCall& call) {
    check_size("layers: number of states", static_cast<int64_t>(nb::len(batch.states)),
               static_cast<int64_t>(layers.size()));
    call.starts = batch.query_starts.data();
    call.state_reads = batch.state_reads.data();
    call.state_writes = batch.state_writes.data();
    int64_t slots = -1;  // that were checked
    for (size_t i = 0; i < layers.size(); ++i) {
        if (self.state_floats[i] == 0) continue;
        const MatrixOut pool = nb::cast<MatrixOut>(batch.states[i]);
        if (size_of(pool, 1) < self.state_floats[i]) {
            refuse("layers: floats of a state", std::to_string(size_of(pool, 1)),
                   "at least " + std::to_string(self.state_floats[i]));
        }
        if (slots != size_of(pool, 0)) {
            ::check_states("layers", pool, 0, self.state_floats[i], batch.state_reads, batch.state_writes,
                           batch.query_starts, tokens);
            slots = size_of(pool, 0);
        }
        layers[i].states = pool.data();
        layers[i].slot_floats = size_of(pool, 1);
    }
}

// A call of the layers, but for stream and delta; `layers` get the pools of the batch.
mlxr::LayersCall check_batch(const PythonLayers& self, const Batch& batch, int64_t tokens,
                             std::vector<mlxr::Layer>& layers) {
    const size_t count = self.layers.size();
    if (count == 0) refuse("layers", "empty", "at least one layer");
    check_size("layers: number of k_pools", static_cast<int64_t>(nb::len(batch.k_pools)), static_cast<int64_t>(count));
    check_size("layers: number of v_pools", static_cast<int64_t>(nb::len(batch.v_pools)), static_cast<int64_t>(count));
    mlxr::LayersCall call{};
    call.tokens = tokens;
    call.columns = self.columns;
    call.token_ids = batch.token_ids.data();
    check_size("layers: length of token_ids", static_cast<int64_t>(batch.token_ids.size()), tokens);
    call.sequences = size_of(batch.context_lengths, 0);
    call.adapters = check_adapters(batch.adapters, tokens, self.columns);
    const auto below = [](const char* what, int64_t number, size_t limit) {
        if (number >= static_cast<int64_t>(limit))
            refuse(what, std::to_string(number), "below " + std::to_string(limit));
    };
    for (const auto& [cosines, sines, interleaved, factors] : batch.ropes) {
        call.ropes.push_back(check_rope(batch.positions, cosines, sines, interleaved, tokens, mlxr::kMaxRotDim));
        if (factors) {
            check_size("rope: length of factors", size_of(*factors, 0), size_of(cosines, 0));
            call.ropes.back().factors = factors->data();
        }
    }
    layers = self.layers;
    const size_t groups = batch.slots.size();
    check_size("layers: number of page_tables", static_cast<int64_t>(batch.page_tables.size()),
               static_cast<int64_t>(groups));
    std::vector<int64_t> windows(groups, 0), pages(groups, 0);  // the longest window of each group
    for (const mlxr::Layer& layer : layers) {
        for (const mlxr::Operator& op : layer.operators) {
            if (op.kind != mlxr::Kind::rows) continue;
            check_indices("layers: token_ids", call.token_ids, tokens, op.table.rows);
        }
        if (layer.heads == 0) continue;
        below("layers: group", layer.group, groups);
        below("layers: rope", layer.rope, batch.ropes.size());
        const size_t group = static_cast<size_t>(layer.group);
        windows[group] = std::max(windows[group], layer.window);
    }
    call.groups.resize(groups);
    check_states(self, batch, tokens, layers, call);
    for (size_t i = 0; i < count; ++i) {
        if (layers[i].heads == 0) continue;
        const PoolOut k_pool = nb::cast<PoolOut>(batch.k_pools[i]), v_pool = nb::cast<PoolOut>(batch.v_pools[i]);
        mlxr::Layer& layer = layers[i];
        const size_t group = static_cast<size_t>(layer.group);
        mlxr::GroupCall& seen = call.groups[group];
        if (pages[group] == 0) {
            seen.write = check_write(k_pool, v_pool, batch.slots[group], tokens);
            seen.attend = check_attend(k_pool, v_pool, batch.query_starts, batch.context_lengths,
                                       batch.page_tables[group], tokens, layer.heads, layer.scale, windows[group]);
            pages[group] = size_of(k_pool, 0);
        }
        check_pools("layers", k_pool, v_pool);
        check_alike("layers: pools", k_pool, seen.write, pages[group]);
        check_size("layers: kv_heads of the pools", seen.write.kv_heads, layer.kv_heads);
        check_size("layers: head_dim of the pools", seen.write.head_dim, layer.head_dim);
        const int64_t rot_dim = call.ropes[static_cast<size_t>(layer.rope)].rot_dim;
        if (rot_dim > layer.head_dim) {
            refuse("layers: rot_dim of a table", std::to_string(rot_dim),
                   "at most the head_dim " + std::to_string(layer.head_dim));
        }
        layer.k_pool = k_pool.data();
        layer.v_pool = v_pool.data();
    }
    return call;
}

void run_layers(Runtime& runtime, PythonLayers& self, MatrixOut stream, MatrixOut delta, mlxr::TokenIds token_ids,
                nb::sequence k_pools, nb::sequence v_pools, Ints positions, std::vector<PythonRope> ropes,
                std::vector<Ints> slots, Ints query_starts, Ints context_lengths, std::vector<IntMatrix> page_tables,
                nb::sequence states, Ints state_reads, Ints state_writes, const PythonAdapterRows& adapters) {
    std::vector<mlxr::Layer> layers;
    mlxr::LayersCall call = check_batch(self,
                                        {token_ids, k_pools, v_pools, positions, ropes, slots, query_starts,
                                         context_lengths, page_tables, states, state_reads, state_writes, adapters},
                                        size_of(stream, 0), layers);
    call.stream = stream.data();
    call.delta = delta.data();
    check_size("layers: columns of stream", size_of(stream, 1), call.columns);
    check_size("layers: rows of delta", size_of(delta, 0), call.tokens);
    check_size("layers: columns of delta", size_of(delta, 1), call.columns);
    run_alone(runtime, [&] { mlxr::run_layers(runtime, layers.data(), static_cast<int64_t>(layers.size()), call); });
}

void forward(Runtime& runtime, PythonLayers& self, const std::string& table_type, mlxr::RawBlocks table, Vector norm,
             OptionalVector bias, float eps, bool is_layer_norm, PythonWeight& output, MatrixOut logits,
             mlxr::TokenIds token_ids, nb::sequence k_pools, nb::sequence v_pools, Ints positions,
             std::vector<PythonRope> ropes, std::vector<Ints> slots, Ints query_starts, Ints context_lengths,
             std::vector<IntMatrix> page_tables, nb::sequence states, Ints state_reads, Ints state_writes,
             const PythonAdapterRows& adapters, float embedding_scale, float logit_scale, float softcap) {
    std::vector<mlxr::Layer> layers;
    mlxr::LayersCall call = check_batch(self,
                                        {token_ids, k_pools, v_pools, positions, ropes, slots, query_starts,
                                         context_lengths, page_tables, states, state_reads, state_writes, adapters},
                                        static_cast<int64_t>(token_ids.size()), layers);
    const mlxr::Type type = mlxr::check_embed(token_ids, table_type, table, static_cast<size_t>(call.columns));
    check_size("forward: length of norm", size_of(norm, 0), call.columns);
    if (bias) check_size("forward: length of the norm's bias", size_of(*bias, 0), call.columns);
    check_size("forward: in_features of output", output.weight.in_features(), call.columns);
    check_size("forward: rows of logits", size_of(logits, 0), call.tokens);
    check_size("forward: columns of logits", size_of(logits, 1), output.weight.out_features());
    check_softcap("forward: softcap", softcap);
    output.used = true;
    run_alone(runtime, [&] {
        const size_t floats = static_cast<size_t>(call.tokens * call.columns);
        call.stream = reinterpret_cast<float*>(runtime.scratch(mlxr::Scratch::operators, 2 * floats * sizeof(float)));
        call.delta = call.stream + floats;
        mlxr::embed(runtime, type, table.data(), call.columns, token_ids.data(), call.tokens, call.stream);
        mlxr::update_embeddings(runtime, call.adapters, call.stream, call.columns);
        if (embedding_scale != 1.0f) {
            mlxr::spread_scale(runtime, {call.stream, call.stream, embedding_scale, 0.0f}, call.tokens * call.columns);
        }
        const mlxr::Head head{{norm.data(), bias ? bias->data() : nullptr, eps, is_layer_norm}, &output.weight};
        mlxr::run_model(runtime, {layers.data(), static_cast<int64_t>(layers.size()), head}, call, logits.data());
        if (logit_scale != 1.0f || softcap > 0) {
            const int64_t count = static_cast<int64_t>(logits.size());
            mlxr::spread_scale(runtime, {logits.data(), logits.data(), logit_scale, softcap}, count);
        }
    });
}

}  // namespace

void bind_blocks(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    nb::class_<PythonLayers>(m, "Layers", "Operators of layers and their weights, checked.")
        .def(nb::init<>())
        .def("append_layer", &PythonLayers::append_layer, nb::arg("columns"))
        .def("append_heads", &append_heads, nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
             nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), array("sinks").none(), nb::arg("rope"),
             nb::arg("group"))
        .def("append_norm", &append_norm, array("weight"), array("bias").none(), nb::arg("eps"),
             nb::arg("is_layer_norm"), nb::arg("source"), nb::arg("target"), nb::arg("parts"))
        .def("append_product", &append_product, nb::arg("weight"), nb::arg("source"), nb::arg("target"),
             nb::keep_alive<1, 2>())
        .def("append_split_heads", &append_split_heads, array("q_norm").none(), array("k_norm").none(), nb::arg("eps"),
             nb::arg("norms_values"), nb::arg("projected"), nb::arg("norms"))
        .def("append_attend", [](PythonLayers& self) { self.append(mlxr::Kind::attend); })
        .def("append_activate", &append_activate, nb::arg("kind"), nb::arg("features"), nb::arg("first").none())
        .def(
            "append_sum",
            [](PythonLayers& self, float factor) { self.append(mlxr::Kind::sum, "stream", "stream").factor = factor; },
            nb::arg("factor"))
        .def("append_scale", &append_scale, nb::arg("factor"), nb::arg("target"))
        .def("append_route", &append_route, nb::arg("router"))
        .def("append_mix", &append_mix, nb::arg("experts"), nb::arg("source"), nb::arg("target"),
             nb::keep_alive<1, 2>())
        .def("append_gate_rows", &append_gate_rows, nb::arg("target"))
        .def("append_join", &append_join, nb::arg("factor"), nb::arg("target"))
        .def("append_rows", &append_rows, nb::arg("type"), array("data"), nb::arg("columns"), nb::arg("target"))
        .def("append_gate_heads", &append_gate_heads)
        .def("append_gated_norm", &append_gated_norm, array("weight").none(), nb::arg("width"), nb::arg("eps"),
             nb::arg("gate_first"), nb::arg("first"))
        .def("append_short_conv", &append_short_conv, array("weight"), array("bias").none(), nb::arg("kind"),
             nb::arg("first"), nb::arg("at"))
        .def("append_gated_delta", &append_gated_delta, array("rates"), array("bias"), nb::arg("key_heads"),
             nb::arg("value_heads"), nb::arg("rows"), nb::arg("columns"), nb::arg("tiled"), nb::arg("eps"),
             nb::arg("scale"), nb::arg("first"), nb::arg("at"))
        .def("append_mamba2", &append_mamba2, array("rates"), array("bias"), array("skip"), nb::arg("groups"),
             nb::arg("rows"), nb::arg("columns"), nb::arg("first"), nb::arg("at"));
    m.def("run_layers", &run_layers, nb::arg("runtime"), nb::arg("layers"), array("stream"), array("delta"),
          array("token_ids"), nb::arg("k_pools"), nb::arg("v_pools"), array("positions"), nb::arg("ropes"),
          array("slots"), array("query_starts"), array("context_lengths"), array("page_tables"), nb::arg("states"),
          array("state_reads"), array("state_writes"), nb::arg("adapters"));
    m.def("forward", &forward, nb::arg("runtime"), nb::arg("layers"), nb::arg("table_type"), array("table"),
          array("norm"), array("bias").none(), nb::arg("eps"), nb::arg("is_layer_norm"), nb::arg("output"),
          array("logits"), array("token_ids"), nb::arg("k_pools"), nb::arg("v_pools"), array("positions"),
          nb::arg("ropes"), array("slots"), array("query_starts"), array("context_lengths"), array("page_tables"),
          nb::arg("states"), array("state_reads"), array("state_writes"), nb::arg("adapters"),
          nb::arg("embedding_scale"), nb::arg("logit_scale"), nb::arg("softcap"));
}
