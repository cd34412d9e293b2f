// The Python face of layers while they are put together (blocks.h): what belongs to the weights is checked here, what
// belongs to a batch with each call (blocks.cpp).
#include "bindings/layers.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/experts.h"
#include "bindings/mixers.h"
#include "bindings/parts.h"

void bind_layers(nb::module_& m);

namespace {

using mlxr::PythonLayers;
using mlxr::PythonWeight;

// The last layer attends. Shapes of products are checked by whoever makes the blocks; here, that one operator's results
// fit the next one's input.
void append_heads(PythonLayers& self, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, int64_t window,
                  bool symmetric, float softcap, OptionalVector sinks, int64_t rope, int64_t group, int64_t value_dim,
                  bool whole_pictures, OptionalVector biases, bool chunked) {
    if (head_dim < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
        refuse("layers: heads", std::to_string(heads), "a multiple of the " + std::to_string(kv_heads) + " key heads");
    }
    if (value_dim < 0 || value_dim > head_dim) {
        refuse("layers: value_dim", std::to_string(value_dim), "at most the head_dim " + std::to_string(head_dim));
    }
    if (group < 0) refuse("layers: group", std::to_string(group), "0 or more");
    if (rope < 0) refuse("layers: rope", std::to_string(rope), "0 or more");
    check_softcap("layers: softcap", softcap);
    mlxr::Layer& layer = self.last();
    layer.heads = heads;
    layer.kv_heads = kv_heads;
    layer.head_dim = head_dim;
    layer.value_dim = value_dim;
    layer.window = positions_seen(window);
    layer.symmetric = symmetric;
    layer.chunked = chunked;
    layer.whole_pictures = whole_pictures;
    layer.scale = scale;
    layer.softcap = softcap;
    layer.sinks = self.keep("layers: length of sinks", sinks, heads);
    layer.bias_span = check_biases("layers: length of biases", biases, heads);
    layer.biases = self.keep("layers: length of biases", biases, heads * (2 * layer.bias_span + 1));
    layer.rope = rope;
    layer.group = group;
}

void append_norm(PythonLayers& self, Vector weight, OptionalVector bias, float eps, bool is_layer_norm,
                 const char* source, const char* target, int64_t parts) {
    mlxr::Operator& op = self.append(mlxr::Kind::norm, source, target);
    op.columns = self.width(op.source);
    op.cuts = parts;
    if (parts < 1 || op.columns % parts != 0) {
        refuse("layers: parts of a norm", std::to_string(parts), "a divisor of " + std::to_string(op.columns));
    }
    const int64_t own = size_of(weight, 0) == op.columns && !is_layer_norm ? parts : 1;  // weights of each part
    op.weight_rows = own;
    op.norm = {self.keep("layers: length of a norm", weight, op.columns / parts * own),
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
    if (name == "turned") return mlxr::HeadNorm::turned;
    if (name != "layer") refuse("layers: norms of heads", name, "each, joint, layer or turned");
    return mlxr::HeadNorm::layer;
}

void append_rope_and_write_kv(PythonLayers& self, OptionalVector q_norm, OptionalVector k_norm, float eps,
                              bool norms_values, const std::string& projected, const std::string& norms) {
    const mlxr::Layer& layer = self.last();
    mlxr::Operator& op = self.append(mlxr::Kind::rope_and_write_kv);
    if (q_norm.has_value() != k_norm.has_value()) refuse("layers: q_norm", "alone", "given with k_norm");
    const int64_t dim = layer.head_dim;
    op.projected = static_cast<int64_t>(projected.size());
    if (op.projected < 1 || op.projected > 3) refuse("layers: projected", projected, "qkv, qk or q");
    check_size("layers: columns of qkv", self.width(op.source),
               (layer.heads + (op.projected - 1) * layer.kv_heads) * dim);
    self.write("layers: columns of queries", op.target, layer.heads * dim);
    op.norms_heads = parse_head_norm(norms);
    const bool is_each = op.norms_heads == mlxr::HeadNorm::each || op.norms_heads == mlxr::HeadNorm::turned;
    op.q_norm = self.keep("layers: length of q_norm", q_norm, is_each ? dim : layer.heads * dim);
    op.k_norm = self.keep("layers: length of k_norm", k_norm, is_each ? dim : layer.kv_heads * dim);
    op.norm.eps = eps;
    op.norms_values = norms_values;
}

void append_project_parts(PythonLayers& self, const nb::tuple& weights, int64_t passed, const char* source,
                          const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::project_parts, source, target);
    op.parts = mlxr::check_parts(weights, passed, self.width(op.source));
    op.passed = passed;
    const int64_t columns = static_cast<int64_t>(op.parts.size()) * (passed + op.parts[0]->out_features());
    self.write("layers: columns of parts", op.target, columns);
}

void append_rope_and_write_latent(PythonLayers& self, Vector norm, float eps) {
    const mlxr::Layer& layer = self.last();
    mlxr::Operator& op = self.append(mlxr::Kind::rope_and_write_latent);
    if (layer.value_dim == 0) refuse("layers: value_dim", "0", "the length of a latent vector");
    check_size("layers: kv_heads of latent vectors", layer.kv_heads, 1);
    check_size("layers: columns of queries", self.width(op.source), layer.heads * layer.head_dim);
    check_size("layers: columns of latent vectors", self.width(mlxr::Register::kept), layer.head_dim);
    op.norm = {self.keep("layers: length of a latent norm", norm, layer.value_dim), nullptr, eps, false};
}

void append_attend(PythonLayers& self) {
    self.append(mlxr::Kind::attend);
    const mlxr::Layer& layer = self.last();
    const int64_t value_dim = layer.value_dim != 0 ? layer.value_dim : layer.head_dim;
    self.write("layers: columns of what attends", mlxr::Register::x, layer.heads * value_dim);
}

// With `first` the inputs' columns from that one on multiply what is activated.
void append_activate(PythonLayers& self, const char* kind, int64_t features, std::optional<int64_t> first,
                     const std::vector<float>& parameters) {
    mlxr::Operator& op = self.append(mlxr::Kind::activate);
    const int64_t columns = self.width(op.source);
    op.activation = parse_activation("layers: activation", kind);
    op.parameters = check_parameters("layers: parameters of the activation", op.activation, parameters);
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

void append_scale(PythonLayers& self, float factor, float softcap, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::scale, target, target);
    op.factor = factor;
    op.softcap = check_softcap("layers: softcap of numbers", softcap);
    op.columns = self.width(op.target);
}

void append_join(PythonLayers& self, float factor, const char* target, const char* source) {
    mlxr::Operator& op = self.append(mlxr::Kind::join, source, target);
    op.factor = factor;
    op.columns = self.width(op.target);
    check_size("layers: columns that are joined", self.width(op.source), op.columns);
}

// Parts of a register, each as wide as the stream.
void check_streams(const PythonLayers& self, mlxr::Register place, int64_t streams) {
    if (streams < 1) refuse("layers: streams", std::to_string(streams), "1 or more");
    check_size("layers: columns of streams", self.width(place), streams * self.columns);
}

void append_mix_streams(PythonLayers& self, int64_t streams, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::mix_streams, "kept", target);
    check_streams(self, mlxr::Register::kept, streams);
    check_streams(self, mlxr::Register::x, streams);
    op.cuts = streams;
    op.columns = self.columns;
    self.write("layers: columns of mixed streams", op.target, self.columns);
}

void append_spread_streams(PythonLayers& self, int64_t streams, float factor, float gate_scale, bool has_gains,
                           bool adds, const char* source, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::spread_streams, source, target);
    check_size("layers: columns that are spread", self.width(op.source), self.columns);
    if (has_gains) check_size("layers: number of gains", self.width(mlxr::Register::gains), streams);
    if (adds) check_streams(self, op.target, streams);
    op.cuts = streams;
    op.columns = self.columns;
    op.factor = factor;
    op.gate_scale = gate_scale;
    op.has_gains = has_gains;
    op.adds = adds;
    self.write("layers: columns of streams", op.target, streams * self.columns);
}

void append_match_streams(PythonLayers& self, int64_t streams, float scale) {
    mlxr::Operator& op = self.append(mlxr::Kind::match_streams, "x", "gains");
    check_streams(self, mlxr::Register::kept, streams);
    check_streams(self, mlxr::Register::x, streams);
    op.cuts = streams;
    op.columns = self.columns;
    op.gate_scale = scale;
    self.write("layers: number of gains", op.target, streams);
}

void append_balance_streams(PythonLayers& self, int64_t streams, Vector scale, Vector base, int64_t turns, float eps) {
    mlxr::Operator& op = self.append(mlxr::Kind::balance_streams, "x", "gains");
    op.balance = check_balance("layers: balance_streams", streams, scale, base, turns, eps);
    op.columns = op.balance.columns * streams;
    check_size("layers: columns of gains", self.width(op.source), op.columns);
    self.arrays.insert(self.arrays.end(), {scale, base});
    self.write("layers: number of gains", op.target, op.columns);
}

// Into `target`; with `adds` what a block gave is added to the streams.
void append_blend_streams(PythonLayers& self, int64_t streams, bool has_gains, bool adds, const char* target,
                          const char* source) {
    mlxr::Operator& op = self.append(mlxr::Kind::blend_streams, adds ? source : "streams", adds ? "streams" : target);
    check_between("layers: streams", streams, 1, mlxr::kMostStreams);
    check_streams(self, mlxr::Register::streams, streams);
    if (has_gains || adds) {
        check_size("layers: number of gains", self.width(mlxr::Register::gains), (2 + streams) * streams);
    }
    if (adds) check_size("layers: columns that are added", self.width(op.source), self.columns);
    op.cuts = streams;
    op.columns = self.columns;
    op.has_gains = has_gains || adds;
    op.adds = adds;
    self.write("layers: columns of streams", op.target, adds ? streams * self.columns : self.columns);
}

void append_level_streams(PythonLayers& self, int64_t streams) {
    mlxr::Operator& op = self.append(mlxr::Kind::level_streams, "x", "streams");
    check_streams(self, mlxr::Register::x, streams);
    op.cuts = streams;
    op.columns = self.columns;
    self.write("layers: columns of streams", op.target, streams * self.columns);
}

void append_cut_gates(PythonLayers& self, int64_t features, float factor) {
    mlxr::Operator& op = self.append(mlxr::Kind::cut_gates);
    check_between("layers: columns that are cut", features, 1, self.width(op.source));
    op.features = features;
    op.factor = factor;
}

void append_ngrams(PythonLayers& self, const std::string& type, mlxr::RawBlocks data, int64_t columns, int64_t end,
                   const std::vector<uint64_t>& multipliers, const std::vector<uint64_t>& sizes,
                   const std::vector<uint64_t>& offsets, int64_t at, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::ngrams, target, target);
    op.table.type = mlxr::check_table(type, data, static_cast<size_t>(columns));
    op.table.data = data.data();
    op.columns = columns;
    const size_t rows = mlxr::count_rows(op.table.type, data, static_cast<size_t>(columns));
    op.ngrams = mlxr::check_ngrams(end, multipliers, sizes, offsets, rows);
    op.ngrams.states.first = at;
    self.keep_state(at, op.ngrams.state_floats());
    self.tables.push_back(data);
    self.write("layers: columns of rows of n-grams", op.target, op.ngrams.heads() * columns);
}

void append_hadamard(PythonLayers& self, OptionalVector signs, std::optional<Ints> order, int64_t block,
                     const char* source, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::hadamard, source, target);
    op.hadamard = mlxr::check_hadamard(self.width(op.source), signs, order, block, false);
    if (signs) self.arrays.push_back(*signs);
    if (order) self.orders.push_back(*order);
    self.write("layers: columns that are transformed", op.target, op.hadamard.columns);
}

void append_route(PythonLayers& self, const mlxr::PythonRouter& router) {
    mlxr::Operator& op = self.append(mlxr::Kind::route);
    op.router = router.call;
    check_size("layers: columns of a router", self.width(op.source), op.router.experts);
    for (const OptionalVector& vector : {router.choice_bias, router.expert_scales}) {
        if (vector) self.arrays.push_back(*vector);
    }
    self.experts = op.router.experts;
    self.used = op.router.used;
}

void append_mix(PythonLayers& self, const mlxr::PythonExperts& mixture, const char* source, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::mix, source, target);
    check_size("layers: number of experts", mixture.experts.count(), self.experts);
    if (self.experts == 0) refuse("layers: experts", "before a router", "after it");
    check_size("layers: columns that experts read", self.width(op.source), mixture.experts.columns());
    self.write("layers: columns of experts", op.target, mixture.experts.columns());
    op.experts = &mixture.experts;
}

void append_gate_rows(PythonLayers& self, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::gate_rows, "x", target);
    check_size("layers: columns of a gate of rows", self.width(op.source), 1);
    op.columns = self.width(op.target);
}

void append_take_shares(PythonLayers& self, const char* source, const char* target) {
    mlxr::Operator& op = self.append(mlxr::Kind::take_shares, source, target);
    if (self.used != 1) refuse("layers: experts of a token", std::to_string(self.used), "one, of which the share is");
    op.columns = self.width(op.source);
    self.write("layers: columns times shares", op.target, op.columns);
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

void append_gate_heads(PythonLayers& self, bool softplus) {
    mlxr::Operator& op = self.append(mlxr::Kind::gate_heads);
    op.softplus = softplus;
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
                        int64_t rows, int64_t columns, bool tiled, float eps, float scale, float bound, int64_t first,
                        int64_t at) {
    Recurrence rule("gated_delta", key_heads, value_heads, rows, columns);
    rule.take_rates("gated_delta: length of rates and bias", rates, bias);
    rule.take_lengths(eps, scale, bound);
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

void append_scan(PythonLayers& self, Matrix rates, Vector skip, int64_t at) {
    mlxr::Operator& op = self.append(mlxr::Kind::scan);
    op.scan = check_scan(rates, skip);
    check_size("layers: columns of a scan", self.width(mlxr::Register::x), op.scan.channels);
    check_size("layers: steps of a scan", self.width(mlxr::Register::steps), op.scan.channels);
    check_size("layers: rows of a scan", self.width(mlxr::Register::other), 2 * op.scan.rows);
    op.scan.states.first = at;
    self.keep_state(at, op.scan.rows * op.scan.channels);
    self.matrices.push_back(rates);
    self.arrays.push_back(skip);
}

}  // namespace

void bind_layers(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    nb::class_<PythonLayers>(m, "Layers", "Operators of layers and their weights, checked.")
        .def(nb::init<>())
        .def("append_layer", &PythonLayers::append_layer, nb::arg("columns"))
        .def("append_heads", &append_heads, nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
             nb::arg("scale"), nb::arg("window"), nb::arg("symmetric"), nb::arg("softcap"), array("sinks").none(),
             nb::arg("rope"), nb::arg("group"), nb::arg("value_dim"), nb::arg("whole_pictures"), array("biases").none(),
             nb::arg("chunked"))
        .def("append_norm", &append_norm, array("weight"), array("bias").none(), nb::arg("eps"),
             nb::arg("is_layer_norm"), nb::arg("source"), nb::arg("target"), nb::arg("parts"))
        .def("append_product", &append_product, nb::arg("weight"), nb::arg("source"), nb::arg("target"),
             nb::keep_alive<1, 2>())
        .def("append_rope_and_write_kv", &append_rope_and_write_kv, array("q_norm").none(), array("k_norm").none(),
             nb::arg("eps"), nb::arg("norms_values"), nb::arg("projected"), nb::arg("norms"))
        .def("append_rope_and_write_latent", &append_rope_and_write_latent, array("norm"), nb::arg("eps"))
        .def("append_project_parts", &append_project_parts, nb::arg("weights"), nb::arg("passed"), nb::arg("source"),
             nb::arg("target"), nb::keep_alive<1, 2>())
        .def("append_attend", &append_attend)
        .def("append_activate", &append_activate, nb::arg("kind"), nb::arg("features"), nb::arg("first").none(),
             nb::arg("parameters"))
        .def(
            "append_sum",
            [](PythonLayers& self, float factor) { self.append(mlxr::Kind::sum, "stream", "stream").factor = factor; },
            nb::arg("factor"))
        .def("append_scale", &append_scale, nb::arg("factor"), nb::arg("softcap"), nb::arg("target"))
        .def("append_hadamard", &append_hadamard, array("signs").none(), array("order").none(), nb::arg("block"),
             nb::arg("source"), nb::arg("target"))
        .def("append_route", &append_route, nb::arg("router"))
        .def("append_mix", &append_mix, nb::arg("experts"), nb::arg("source"), nb::arg("target"),
             nb::keep_alive<1, 2>())
        .def("append_gate_rows", &append_gate_rows, nb::arg("target"))
        .def("append_join", &append_join, nb::arg("factor"), nb::arg("target"), nb::arg("source"))
        .def("append_mix_streams", &append_mix_streams, nb::arg("streams"), nb::arg("target"))
        .def("append_spread_streams", &append_spread_streams, nb::arg("streams"), nb::arg("factor"),
             nb::arg("gate_scale"), nb::arg("has_gains"), nb::arg("adds"), nb::arg("source"), nb::arg("target"))
        .def("append_match_streams", &append_match_streams, nb::arg("streams"), nb::arg("scale"))
        .def("append_balance_streams", &append_balance_streams, nb::arg("streams"), array("scale"), array("base"),
             nb::arg("turns"), nb::arg("eps"))
        .def("append_blend_streams", &append_blend_streams, nb::arg("streams"), nb::arg("has_gains"), nb::arg("adds"),
             nb::arg("target"), nb::arg("source"))
        .def("append_level_streams", &append_level_streams, nb::arg("streams"))
        .def("append_cut_gates", &append_cut_gates, nb::arg("features"), nb::arg("factor"))
        .def("append_ngrams", &append_ngrams, nb::arg("type_name"), array("data"), nb::arg("columns"), nb::arg("end"),
             nb::arg("multipliers"), nb::arg("sizes"), nb::arg("offsets"), nb::arg("at"), nb::arg("target"))
        .def("append_rows", &append_rows, nb::arg("type"), array("data"), nb::arg("columns"), nb::arg("target"))
        .def("append_take_shares", &append_take_shares, nb::arg("source"), nb::arg("target"))
        .def("append_gate_heads", &append_gate_heads, nb::arg("softplus"))
        .def("append_gated_norm", &append_gated_norm, array("weight").none(), nb::arg("width"), nb::arg("eps"),
             nb::arg("gate_first"), nb::arg("first"))
        .def("append_short_conv", &append_short_conv, array("weight"), array("bias").none(), nb::arg("kind"),
             nb::arg("first"), nb::arg("at"))
        .def("append_gated_delta", &append_gated_delta, array("rates"), array("bias"), nb::arg("key_heads"),
             nb::arg("value_heads"), nb::arg("rows"), nb::arg("columns"), nb::arg("tiled"), nb::arg("eps"),
             nb::arg("scale"), nb::arg("bound"), nb::arg("first"), nb::arg("at"))
        .def("append_mamba2", &append_mamba2, array("rates"), array("bias"), array("skip"), nb::arg("groups"),
             nb::arg("rows"), nb::arg("columns"), nb::arg("first"), nb::arg("at"))
        .def("append_scan", &append_scan, array("rates"), array("skip"), nb::arg("at"));
}
