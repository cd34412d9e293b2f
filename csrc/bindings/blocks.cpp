// The Python face of calls of layers (blocks.h). What belongs to a batch is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/adapter.h"
#include "bindings/checks.h"
#include "bindings/embed.h"
#include "bindings/layers.h"
#include "bindings/states.h"
#include "bindings/weight.h"
#include "embed/embed.h"
#include "layers/blocks.h"
#include "layers/spread.h"

void bind_blocks(nb::module_& m);

namespace {

using mlxr::PythonLayers;
using mlxr::PythonWeight;

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
    Ints ends;  // of what tokens see, or empty
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

void check_below(const char* what, int64_t number, size_t limit) {
    if (number >= static_cast<int64_t>(limit)) refuse(what, std::to_string(number), "below " + std::to_string(limit));
}

std::vector<mlxr::RopeCall> check_ropes(const Batch& batch, int64_t tokens) {
    std::vector<mlxr::RopeCall> calls;
    for (const auto& [cosines, sines, interleaved, factors] : batch.ropes) {
        calls.push_back(check_rope(batch.positions, cosines, sines, interleaved, tokens, mlxr::kMaxRotDim));
        if (factors) {
            check_size("rope: length of factors", size_of(*factors, 0), size_of(cosines, 0));
            calls.back().factors = factors->data();
        }
    }
    return calls;
}

// What layers look up is there: token ids in their tables, the numbers of groups and of rotations.
void check_numbers(const std::vector<mlxr::Layer>& layers, const mlxr::LayersCall& call) {
    for (const mlxr::Layer& layer : layers) {
        for (const mlxr::Operator& op : layer.operators) {
            if (op.kind != mlxr::Kind::rows) continue;
            check_indices("layers: token_ids", call.token_ids, call.tokens, op.table.rows);
        }
        if (layer.heads == 0) continue;
        check_below("layers: group", layer.group, call.groups.size());
        check_below("layers: rope", layer.rope, call.ropes.size());
    }
}

// The pools of each group are alike; the first ones make the group's call.
void check_groups(const Batch& batch, std::vector<mlxr::Layer>& layers, mlxr::LayersCall& call) {
    const size_t groups = call.groups.size();
    std::vector<int64_t> windows(groups, 0), pages(groups, 0);  // the longest window of each group
    for (const mlxr::Layer& layer : layers) {
        if (layer.heads == 0) continue;
        int64_t& window = windows[static_cast<size_t>(layer.group)];
        window = std::max(window, layer.window);
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        if (layers[i].heads == 0) continue;
        const PoolOut k_pool = nb::cast<PoolOut>(batch.k_pools[i]), v_pool = nb::cast<PoolOut>(batch.v_pools[i]);
        mlxr::Layer& layer = layers[i];
        const size_t group = static_cast<size_t>(layer.group);
        mlxr::GroupCall& seen = call.groups[group];
        if (pages[group] == 0) {
            seen.write = check_write(k_pool, v_pool, batch.slots[group], call.tokens);
            seen.attend =
                check_attend(k_pool, v_pool, batch.query_starts, batch.context_lengths, batch.page_tables[group],
                             call.tokens, layer.heads, layer.scale, windows[group], layer.value_dim);
            pages[group] = size_of(k_pool, 0);
        }
        check_pools("layers", k_pool, v_pool);
        check_alike("layers: pools", k_pool, seen.write, pages[group]);
        check_size("layers: kv_heads of the pools", seen.write.kv_heads, layer.kv_heads);
        check_size("layers: head_dim of the pools", seen.write.head_dim, layer.head_dim);
        check_size("layers: value_dim of a group", layer.value_dim,
                   seen.attend.values_in_keys ? seen.attend.value_dim : 0);
        const int64_t rot_dim = call.ropes[static_cast<size_t>(layer.rope)].rot_dim;
        if (rot_dim > layer.head_dim) {
            refuse("layers: rot_dim of a table", std::to_string(rot_dim),
                   "at most the head_dim " + std::to_string(layer.head_dim));
        }
        layer.k_pool = k_pool.data();
        layer.v_pool = v_pool.data();
    }
}

// A call of the layers, but for stream and delta; `layers` get the pools of the batch.
mlxr::LayersCall check_batch(const PythonLayers& self, const Batch& batch, int64_t tokens,
                             std::vector<mlxr::Layer>& layers) {
    const int64_t count = static_cast<int64_t>(self.layers.size());
    if (count == 0) refuse("layers", "empty", "at least one layer");
    check_size("layers: number of k_pools", static_cast<int64_t>(nb::len(batch.k_pools)), count);
    check_size("layers: number of v_pools", static_cast<int64_t>(nb::len(batch.v_pools)), count);
    check_size("layers: length of token_ids", static_cast<int64_t>(batch.token_ids.size()), tokens);
    check_size("layers: number of page_tables", static_cast<int64_t>(batch.page_tables.size()),
               static_cast<int64_t>(batch.slots.size()));
    mlxr::LayersCall call{};
    call.tokens = tokens;
    call.columns = self.columns;
    call.token_ids = batch.token_ids.data();
    call.sequences = size_of(batch.context_lengths, 0);
    call.adapters = check_adapters(batch.adapters, tokens, self.columns);
    call.ropes = check_ropes(batch, tokens);
    call.groups.resize(batch.slots.size());
    layers = self.layers;
    check_numbers(layers, call);
    check_states(self, batch, tokens, layers, call);
    check_groups(batch, layers, call);
    const auto sees_whole = [](const mlxr::Layer& layer) { return layer.heads != 0 && layer.whole_pictures; };
    if (std::any_of(layers.begin(), layers.end(), sees_whole)) {
        call.ends = check_ends(batch.ends, batch.query_starts, batch.context_lengths);
    }
    return call;
}

void run_layers(Runtime& runtime, PythonLayers& self, MatrixOut stream, MatrixOut delta, mlxr::TokenIds token_ids,
                nb::sequence k_pools, nb::sequence v_pools, Ints positions, std::vector<PythonRope> ropes,
                std::vector<Ints> slots, Ints query_starts, Ints context_lengths, std::vector<IntMatrix> page_tables,
                nb::sequence states, Ints state_reads, Ints state_writes, const PythonAdapterRows& adapters,
                Ints ends) {
    std::vector<mlxr::Layer> layers;
    mlxr::LayersCall call =
        check_batch(self,
                    {token_ids, k_pools, v_pools, positions, ropes, slots, query_starts, context_lengths, page_tables,
                     states, state_reads, state_writes, adapters, ends},
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
             const PythonAdapterRows& adapters, Ints ends, float embedding_scale, float logit_scale, float softcap) {
    std::vector<mlxr::Layer> layers;
    mlxr::LayersCall call =
        check_batch(self,
                    {token_ids, k_pools, v_pools, positions, ropes, slots, query_starts, context_lengths, page_tables,
                     states, state_reads, state_writes, adapters, ends},
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
    m.def("run_layers", &run_layers, nb::arg("runtime"), nb::arg("layers"), array("stream"), array("delta"),
          array("token_ids"), nb::arg("k_pools"), nb::arg("v_pools"), array("positions"), nb::arg("ropes"),
          array("slots"), array("query_starts"), array("context_lengths"), array("page_tables"), nb::arg("states"),
          array("state_reads"), array("state_writes"), nb::arg("adapters"), array("ends"));
    m.def("forward", &forward, nb::arg("runtime"), nb::arg("layers"), nb::arg("table_type"), array("table"),
          array("norm"), array("bias").none(), nb::arg("eps"), nb::arg("is_layer_norm"), nb::arg("output"),
          array("logits"), array("token_ids"), nb::arg("k_pools"), nb::arg("v_pools"), array("positions"),
          nb::arg("ropes"), array("slots"), array("query_starts"), array("context_lengths"), array("page_tables"),
          nb::arg("states"), array("state_reads"), array("state_writes"), nb::arg("adapters"), array("ends"),
          nb::arg("embedding_scale"), nb::arg("logit_scale"), nb::arg("softcap"));
}
