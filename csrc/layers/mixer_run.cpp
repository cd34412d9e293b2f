// See mixer_run.h.
#include "layers/mixer_run.h"

#include "mixers/spread_mixers.h"

namespace mlxr {

States MixerRun::states_of(const Layer& layer, const States& own) const {
    return {layer.states,       layer.slot_floats, own.first,      call_.state_reads,
            call_.state_writes, call_.starts,      call_.sequences};
}

void MixerRun::convolve(const Layer& layer, const Operator& op) {
    ShortConvCall conv = op.conv;
    conv.x = kept_of(op);
    conv.x_stride = registers_.columns(Register::kept);
    conv.out = registers_.write(Register::x, conv.channels);
    conv.states = states_of(layer, conv.states);
    spread_short_conv(runtime_, conv);
}

void MixerRun::recur(const Layer& layer, const Operator& op) {
    PrepareRecurrenceCall prepare = op.prepare;
    RecurrenceCall recurrence = op.recurrence;
    const float *const source = registers_.find(Register::x), *const gates = kept_of(op);
    const int64_t stride = registers_.columns(Register::x), keys = recurrence.key_heads * recurrence.rows;
    const int64_t values = recurrence.value_heads * recurrence.columns;
    recurrence.states = states_of(layer, recurrence.states);
    recurrence.v_stride = recurrence.k_stride = recurrence.q_stride = prepare.heads_stride = stride;
    prepare.steps = gates;
    prepare.steps_stride = prepare.betas_stride = registers_.columns(Register::kept);
    recurrence.out = registers_.write(Register::x, values);
    if (op.kind == Kind::mamba2) {
        recurrence.v = source;
        recurrence.k = source + values;
        recurrence.q = recurrence.k + keys;
        return spread_mamba2(runtime_, prepare, recurrence);
    }
    recurrence.v = source + 2 * keys;
    prepare.heads = source;
    prepare.betas = gates;
    prepare.steps = gates + recurrence.value_heads;
    spread_gated_delta(runtime_, prepare, recurrence);
}

void MixerRun::scan(const Layer& layer, const Operator& op) {
    ScanCall scan = op.scan;
    scan.u = registers_.find(Register::x);
    scan.steps = registers_.find(Register::steps);
    scan.b = registers_.find(Register::other);
    scan.c = scan.b + scan.rows;
    scan.bc_stride = 2 * scan.rows;
    scan.states = states_of(layer, scan.states);
    scan.out = registers_.write(Register::x, scan.channels);
    spread_scan(runtime_, scan);
}

void MixerRun::gate_and_norm(const Operator& op) {
    GatedNormCall norm = op.gated_norm;
    norm.x = registers_.find(Register::x);
    norm.gate = kept_of(op);
    norm.gate_stride = registers_.columns(Register::kept);
    norm.out = registers_.write(Register::x, norm.columns);
    spread_gated_norm(runtime_, norm, call_.tokens);
}

}  // namespace mlxr
