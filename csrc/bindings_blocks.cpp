// The Python face of layers (blocks.h). What belongs to the weights is checked when a layer is added, what belongs to a
// batch with each call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings_checks.h"
#include "bindings_embed.h"
#include "bindings_weight.h"
#include "blocks.h"
#include "embed.h"
#include "spread.h"

void bind_blocks(nb::module_& m);

namespace {

using mlxr::PythonWeight;
using OptionalVector = std::optional<Vector>;

// Layers, and the arrays they point into; nanobind keeps the weights alive.
struct PythonLayers {
    std::vector<mlxr::Layer> layers;
    std::vector<Vector> norms;
    bool half = false;  // the last layer has no feed-forward block yet

    const float* keep(const char* what, const Vector& norm, int64_t length) {
        check_size(what, size_of(norm, 0), length);
        norms.push_back(norm);
        return norm.data();
    }
};

void append_attention(PythonLayers& self, Vector norm, float eps, PythonWeight& qkv, OptionalVector q_norm,
                      OptionalVector k_norm, PythonWeight& output, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      float scale, int64_t window, int64_t group) {
    if (self.half) refuse("layers: append_attention", "called twice", "followed by append_feed_forward");
    if (head_dim < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
        refuse("layers: heads", std::to_string(heads), "a multiple of the " + std::to_string(kv_heads) + " key heads");
    }
    check_size("layers: columns of qkv", qkv.weight.out_features(), (heads + 2 * kv_heads) * head_dim);
    check_size("layers: in_features of output", output.weight.in_features(), heads * head_dim);
    check_size("layers: columns of output", output.weight.out_features(), qkv.weight.in_features());
    if (q_norm.has_value() != k_norm.has_value()) refuse("layers: q_norm", "alone", "given with k_norm");
    if (!self.layers.empty()) {
        const mlxr::AttentionBlock& first = self.layers[0].attention;
        check_size("layers: columns of the stream", qkv.weight.in_features(), first.qkv->in_features());
        check_size("layers: heads", heads, first.heads);
        check_size("layers: key heads", kv_heads, first.kv_heads);
        check_size("layers: head_dim", head_dim, first.head_dim);
    }
    mlxr::Layer layer{};
    layer.attention = {self.keep("layers: length of a norm", norm, qkv.weight.in_features()),
                       eps,
                       &qkv.weight,
                       q_norm ? self.keep("layers: length of q_norm", *q_norm, head_dim) : nullptr,
                       k_norm ? self.keep("layers: length of k_norm", *k_norm, head_dim) : nullptr,
                       &output.weight,
                       heads,
                       kv_heads,
                       head_dim};
    layer.window = positions_seen(window);
    layer.scale = scale;
    if (group < 0) refuse("layers: group", std::to_string(group), "0 or more");
    layer.group = group;
    qkv.used = output.used = self.half = true;
    self.layers.push_back(layer);
}

void append_feed_forward(PythonLayers& self, Vector norm, float eps, PythonWeight& gate_up, PythonWeight& down,
                         const char* kind) {
    if (!self.half) refuse("layers: append_feed_forward", "called first", "after append_attention");
    const int64_t columns = self.layers.back().attention.qkv->in_features();
    check_size("layers: in_features of gate_up", gate_up.weight.in_features(), columns);
    check_size("layers: columns of gate_up", gate_up.weight.out_features(), 2 * down.weight.in_features());
    check_size("layers: columns of down", down.weight.out_features(), columns);
    self.layers.back().feed_forward = {self.keep("layers: length of a norm", norm, columns), eps, &gate_up.weight,
                                       &down.weight, parse_activation("layers: activation", kind)};
    gate_up.used = down.used = true;
    self.half = false;
}

// What the bindings of run_layers and forward have in common: pools, and where the tokens of the batch stand.
struct Batch {
    nb::sequence k_pools, v_pools;
    Ints positions;
    Matrix cosines, sines;
    bool interleaved;
    std::vector<Ints> slots;  // of each group of layers
    Ints query_starts, context_lengths;
    std::vector<IntMatrix> page_tables;
};

// A call of the layers, but for stream and delta; `layers` get the pools of the batch.
mlxr::LayersCall check_batch(const PythonLayers& self, const Batch& batch, int64_t tokens,
                             std::vector<mlxr::Layer>& layers) {
    const size_t count = self.layers.size();
    if (count == 0 || self.half) refuse("layers", "not complete", "at least one whole layer");
    check_size("layers: number of k_pools", static_cast<int64_t>(nb::len(batch.k_pools)), static_cast<int64_t>(count));
    check_size("layers: number of v_pools", static_cast<int64_t>(nb::len(batch.v_pools)), static_cast<int64_t>(count));
    const mlxr::AttentionBlock& first = self.layers[0].attention;
    mlxr::LayersCall call{};
    call.tokens = tokens;
    call.columns = first.qkv->in_features();
    call.sequences = size_of(batch.context_lengths, 0);
    call.rope = check_rope(batch.positions, batch.cosines, batch.sines, batch.interleaved, tokens, first.head_dim);
    layers = self.layers;
    const size_t groups = batch.slots.size();
    check_size("layers: number of page_tables", static_cast<int64_t>(batch.page_tables.size()),
               static_cast<int64_t>(groups));
    std::vector<int64_t> windows(groups, 0), pages(groups, 0);  // the longest window of each group
    for (const mlxr::Layer& layer : layers) {
        if (layer.group >= static_cast<int64_t>(groups)) {
            refuse("layers: group", std::to_string(layer.group), "below " + std::to_string(groups));
        }
        windows[layer.group] = std::max(windows[layer.group], layer.window);
    }
    for (size_t i = 0; i < count; ++i) {
        const PoolOut k_pool = nb::cast<PoolOut>(batch.k_pools[i]), v_pool = nb::cast<PoolOut>(batch.v_pools[i]);
        const size_t group = static_cast<size_t>(layers[i].group);
        if (pages[group] == 0) {
            const mlxr::WritePagesCall write = check_write(k_pool, v_pool, batch.slots[group], tokens);
            const mlxr::AttendCall attend =
                check_attend(k_pool, v_pool, batch.query_starts, batch.context_lengths, batch.page_tables[group],
                             tokens, first.heads, layers[i].scale, windows[group]);
            pages[group] = size_of(k_pool, 0);
            if (i == 0) {
                call.write = write;
                call.attend = attend;
                check_size("layers: kv_heads of the pools", call.write.kv_heads, first.kv_heads);
                check_size("layers: head_dim of the pools", call.write.head_dim, first.head_dim);
            }
        }
        check_pools("layers", k_pool, v_pool);
        check_alike("layers: pools", k_pool, call.write, pages[group]);
        layers[i].k_pool = k_pool.data();
        layers[i].v_pool = v_pool.data();
        layers[i].slots = batch.slots[group].data();
        layers[i].page_table = batch.page_tables[group].data();
        layers[i].table_stride = size_of(batch.page_tables[group], 1);
    }
    return call;
}

void run_layers(Runtime& runtime, PythonLayers& self, MatrixOut stream, MatrixOut delta, nb::sequence k_pools,
                nb::sequence v_pools, Ints positions, Matrix cosines, Matrix sines, bool interleaved,
                std::vector<Ints> slots, Ints query_starts, Ints context_lengths, std::vector<IntMatrix> page_tables) {
    std::vector<mlxr::Layer> layers;
    mlxr::LayersCall call = check_batch(
        self,
        {k_pools, v_pools, positions, cosines, sines, interleaved, slots, query_starts, context_lengths, page_tables},
        size_of(stream, 0), layers);
    call.stream = stream.data();
    call.delta = delta.data();
    check_size("layers: columns of stream", size_of(stream, 1), call.columns);
    check_size("layers: rows of delta", size_of(delta, 0), call.tokens);
    check_size("layers: columns of delta", size_of(delta, 1), call.columns);
    run_alone(runtime, [&] { mlxr::run_layers(runtime, layers.data(), static_cast<int64_t>(layers.size()), call); });
}

void forward(Runtime& runtime, PythonLayers& self, mlxr::TokenIds token_ids, const std::string& table_type,
             mlxr::RawBlocks table, Vector norm, float eps, PythonWeight& output, MatrixOut logits,
             nb::sequence k_pools, nb::sequence v_pools, Ints positions, Matrix cosines, Matrix sines, bool interleaved,
             std::vector<Ints> slots, Ints query_starts, Ints context_lengths, std::vector<IntMatrix> page_tables,
             float embedding_scale, float logit_scale, float softcap) {
    std::vector<mlxr::Layer> layers;
    mlxr::LayersCall call = check_batch(
        self,
        {k_pools, v_pools, positions, cosines, sines, interleaved, slots, query_starts, context_lengths, page_tables},
        static_cast<int64_t>(token_ids.size()), layers);
    const mlxr::Type type = mlxr::check_embed(token_ids, table_type, table, static_cast<size_t>(call.columns));
    check_size("forward: length of norm", size_of(norm, 0), call.columns);
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
        if (embedding_scale != 1.0f) {
            mlxr::spread_scale(runtime, {call.stream, call.stream, embedding_scale, 0.0f}, call.tokens * call.columns);
        }
        const mlxr::Head head{norm.data(), eps, &output.weight};
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
    nb::class_<PythonLayers>(m, "Layers", "Weights of layers, checked.")
        .def(nb::init<>())
        .def("append_attention", &append_attention, array("norm"), nb::arg("eps"), nb::arg("qkv"),
             array("q_norm").none(), array("k_norm").none(), nb::arg("output"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("scale"), nb::arg("window"), nb::arg("group"), nb::keep_alive<1, 4>(),
             nb::keep_alive<1, 7>())
        .def("append_feed_forward", &append_feed_forward, array("norm"), nb::arg("eps"), nb::arg("gate_up"),
             nb::arg("down"), nb::arg("activation"), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
    m.def("run_layers", &run_layers, nb::arg("runtime"), nb::arg("layers"), array("stream"), array("delta"),
          nb::arg("k_pools"), nb::arg("v_pools"), array("positions"), array("cos"), array("sin"),
          nb::arg("interleaved"), array("slots"), array("query_starts"), array("context_lengths"),
          array("page_tables"));
    m.def("forward", &forward, nb::arg("runtime"), nb::arg("layers"), array("token_ids"), nb::arg("table_type"),
          array("table"), array("norm"), nb::arg("eps"), nb::arg("output"), array("logits"), nb::arg("k_pools"),
          nb::arg("v_pools"), array("positions"), array("cos"), array("sin"), nb::arg("interleaved"), array("slots"),
          array("query_starts"), array("context_lengths"), array("page_tables"), nb::arg("embedding_scale") = 1.0f,
          nb::arg("logit_scale") = 1.0f, nb::arg("softcap") = 0.0f);
}
