// The mixture: tokens sorted by expert, gate and up of all experts, activation, down of all experts, and the sum.
//
// A token's input is quantised once and copied to each of its experts, whose tokens lie side by side as those of any
// product do. Between the two products threads meet once, not once for each expert: with few tokens the weights of all
// experts are one stream (multiply_few), with many they are one list of tasks.
#include <algorithm>
#include <iterator>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "linear/call.h"
#include "moe/expert_rows.h"
#include "moe/experts.h"

namespace mlxr {

namespace {

class MixRun {
  public:
    MixRun(Runtime& runtime, const Experts& experts, const MixCall& call)
        : runtime_(runtime),
          experts_(experts),
          call_(call),
          table_(*operator_table(runtime.isa)),
          updates_(runtime, call.adapters) {
        sort_tokens();
        adapted_.emplace(experts, call.adapters, call.used, groups_, places_, owners_);
        for (size_t i = 0; i < groups_.size(); ++i) groups_[i].gated &= adapted_->of(i).empty();
        experts.use().add_step(std::ssize(groups_));
        for (const ExpertGroup& group : groups_) {
            experts.use().add_rows(group.expert, group.rows);
            source_needs_.add(runtime, experts.up(group.expert));
            few_ &= group.rows < kSomeTokens;
        }
        lay_out_all(nullptr);
        const std::byte* const nothing = nullptr;
        const int64_t bytes = end_ - nothing;
        lay_out_all(runtime.scratch(Scratch::experts, static_cast<size_t>(bytes)));
    }

    void run() {
        Counted counted(runtime_.tally, describe());
        counted.does([&] { return measure(); });
        count_rows();
        if (!is_alone()) {
            spread(call_.tokens, [&](int64_t first, int64_t last, int thread) { prepare_tokens(first, last, thread); });
        }
        if (experts_.slots() == nullptr) {
            multiply_groups(0, groups_.size());
        } else {
            multiply_in_turns(*experts_.slots());
        }
        add_up();
    }

  private:
    int64_t pairs() const { return call_.tokens * call_.used; }

    // As many groups at a time as there are slots. Rows of groups do not depend on each other, and are added up when
    // all are there.
    void multiply_in_turns(ExpertSlots& slots) {
        std::vector<int64_t> needed;
        for (const ExpertGroup& group : groups_) needed.push_back(group.expert);
        const auto size = static_cast<size_t>(slots.count());
        const size_t turns = (groups_.size() + size - 1) / size;
        const bool backwards = turns > 1 && slots.turn();
        for (size_t i = 0; i < turns; ++i) {
            const size_t turn = backwards ? turns - 1 - i : i, first = turn * size,
                         last = std::min(groups_.size(), first + size);
            slots.hold(runtime_, std::span<const int64_t>(needed).subspan(first, last - first));
            multiply_groups(first, last);
        }
    }

    // What the experts of groups [first, last) make of their rows.
    void multiply_groups(size_t first, size_t last) {
        multiply_up(first, last);
        multiply_down(first, last);
    }

    // Stable, so that the tokens of an expert are in their order.
    void sort_tokens() {
        const int64_t count = experts_.count();
        std::vector<int64_t> next(static_cast<size_t>(count), 0);
        for (int64_t i = 0; i < pairs(); ++i) ++next[static_cast<size_t>(call_.chosen[i])];
        int64_t first = 0;
        for (int64_t expert = 0; expert < count; ++expert) {
            int64_t& rows = next[static_cast<size_t>(expert)];
            if (rows > 0) {
                groups_.push_back({expert, first, rows, can_gate(experts_.up(expert), experts_.down(expert), rows)});
            }
            first += rows;
            rows = first - rows;
        }
        places_.resize(static_cast<size_t>(pairs()));
        owners_.resize(static_cast<size_t>(pairs()));
        for (int64_t i = 0; i < pairs(); ++i) {
            const int64_t place = next[static_cast<size_t>(call_.chosen[i])]++;
            places_[static_cast<size_t>(i)] = static_cast<int32_t>(place);
        }
        for (size_t group = 0; group < groups_.size(); ++group) {
            std::fill_n(owners_.begin() + groups_[group].first, groups_[group].rows, static_cast<int32_t>(group));
        }
    }

    template <typename Value>
    Value* take(int64_t count) {
        std::byte* const taken = end_;
        end_ += align_line(count * static_cast<int64_t>(sizeof(Value)));
        return reinterpret_cast<Value*>(taken);
    }

    LinearInput lay_out_input(const LinearWeight& weight, const float* x, int64_t rows) {
        LinearInput input{.x = x, .tokens = rows, .columns = weight.in_features(), .tile = tile_of(rows)};
        Needs needs;
        needs.add(runtime_, weight);
        end_ = lay_out(runtime_, needs, input, end_);
        return input;
    }

    // All arrays from `at` on, or from null on, and the products that read and write them.
    void lay_out_all(std::byte* at) {
        end_ = at;
        up_.clear();
        down_.clear();
        sources_.clear();
        const int64_t columns = experts_.columns(), features = experts_.features();
        const int64_t made = experts_.is_gated() ? 2 * features : features;
        const int threads = is_alone() ? 1 : runtime_.pool.threads();
        for (int thread = 0; thread < threads; ++thread) {
            LinearInput source{.x = nullptr, .tokens = 1, .columns = columns, .tile = 1};
            end_ = lay_out(runtime_, source_needs_, source, end_);
            sources_.push_back(source);
        }
        made_ = take<float>(pairs() * columns);
        for (ExpertGroup& group : groups_) {
            const LinearWeight &up = experts_.up(group.expert), &down = experts_.down(group.expert);
            float* const projected = group.gated ? nullptr : take<float>(group.rows * made);
            up_.push_back({runtime_, up, lay_out_x(up, group), projected});
            if (!group.gated) group.activated = take<float>(group.rows * features);
            down_.push_back(
                {runtime_, down, lay_out_input(down, group.activated, group.rows), made_ + group.first * columns});
        }
    }

    // The input of gate and up: that of the token if there is but one.
    LinearInput lay_out_x(const LinearWeight& up, ExpertGroup& group) {
        if (is_alone()) {
            LinearInput input = sources_[0];
            input.x = call_.x;
            return input;
        }
        Needs needs;
        needs.add(runtime_, up);
        group.x = needs.floats ? take<float>(group.rows * up.in_features()) : nullptr;
        return lay_out_input(up, group.x, group.rows);
    }

    // One token, whose experts all read the same: the calling thread makes it.
    bool is_alone() const { return call_.tokens == 1 && std::ssize(groups_) == call_.used; }

    // Quantises tokens [first, last), each to all of its experts.
    void prepare_tokens(int64_t first, int64_t last, int thread) {
        const int64_t columns = experts_.columns();
        LinearInput source = sources_[static_cast<size_t>(thread)];
        for (int64_t token = first; token < last; ++token) {
            source.x = call_.x + token * columns;
            convert_tokens(runtime_, source, 0, 1);
            if (is_alone()) return;
            for (int64_t rank = 0; rank < call_.used; ++rank) {
                const auto place = static_cast<size_t>(places_[static_cast<size_t>(token * call_.used + rank)]);
                const auto owner = static_cast<size_t>(owners_[place]);
                const ExpertGroup& group = groups_[owner];
                copy_token(source, up_[owner].input, static_cast<int64_t>(place) - group.first, group.x);
            }
        }
    }

    // Activates and quantises the rows [first, last) of all experts' tokens, where that is left to do.
    void activate_rows(int64_t first, int64_t last) {
        const int64_t features = experts_.features();
        for (int64_t at = first; at < last;) {
            const auto owner = static_cast<size_t>(owners_[static_cast<size_t>(at)]);
            const ExpertGroup& group = groups_[owner];
            const int64_t begin = at - group.first, end = std::min(last - group.first, group.rows);
            at = group.first + end;
            if (group.gated) continue;
            const LinearInput& input = down_[owner].input;
            const float* const projected = up_[owner].out;
            const int64_t made = up_[owner].weight.out_features();
            const ActivateCall activate{.x = projected,
                                        .up = experts_.is_gated() ? projected + features : nullptr,
                                        .out = group.activated,
                                        .columns = features,
                                        .x_stride = made,
                                        .up_stride = made,
                                        .out_stride = features,
                                        .kind = experts_.kind(),
                                        .parameters = experts_.parameters()};
            table_.activate(activate, begin, end, 0, features);
            convert_tokens(runtime_, input, begin, end);
        }
    }

    // Runs body(first, last, thread) over [0, count), a few at a time.
    template <typename Body>
    void spread(int64_t count, const Body& body) {
        constexpr int64_t kShares = 8;
        const int64_t tasks = std::min(count, kShares * runtime_.pool.threads());
        runtime_.pool.parallel_for_near(static_cast<int>(tasks), [&](int task, int thread) {
            body(count * task / tasks, count * (task + 1) / tasks, thread);
        });
    }

    // What adapters add to gate and up of groups [first, last), or to down: see ProductUpdates::begin.
    const Beside* begin_updates(size_t first, size_t last, bool down) {
        updates_.clear();
        for (size_t i = first; i < last; ++i) {
            const LinearCall& call = down ? down_[i] : up_[i];
            const float* const x = down ? groups_[i].activated : call_.x;
            for (const auto& [by_token, by_place] : adapted_->of(i)) {
                updates_.add(call.weight, down ? by_place : by_token, by_place.rows, x, call.out);
            }
        }
        return updates_.start();
    }

    void run_beside(const Beside* beside) {
        if (beside == nullptr) return;
        runtime_.pool.parallel_for_near(beside->shares, [&](int share, int) { beside->run(share); });
    }

    void multiply_up(size_t first, size_t last) {
        const Beside* const beside = begin_updates(first, last, false);
        if (few_) {
            const Prepare prepare = [&] { prepare_tokens(0, 1, 0); };
            multiply_few(runtime_, std::span<const LinearCall>(up_).subspan(first, last - first),
                         is_alone() ? prepare : nullptr, beside);
        } else {
            multiply_many_up(first, last);
            run_beside(beside);
        }
        updates_.finish_within();
    }

    void multiply_many_up(size_t first, size_t last) {
        std::vector<GatedCall> gated;
        std::vector<LinearCall> others;
        for (size_t i = first; i < last; ++i) {
            if (groups_[i].gated) {
                gated.push_back({up_[i], down_[i], experts_.kind(), experts_.parameters()});
            } else {
                others.push_back(up_[i]);
            }
        }
        run_tasks(GatedTasks(std::move(gated), runtime_.pool.threads()), PieceTasks(others, runtime_.pool.threads()));
    }

    void run_tasks(const GatedTasks& gated, const PieceTasks& pieces) {
        const int64_t bytes = std::max(gated.scratch_bytes(), pieces.scratch_bytes());
        std::byte* const scratch =
            runtime_.scratch(Scratch::panels, static_cast<size_t>(bytes * runtime_.pool.threads()));
        runtime_.pool.parallel_for_near(gated.count() + pieces.count(), [&](int task, int thread) {
            std::byte* const own = scratch + bytes * thread;
            if (task < gated.count()) return gated.run(task, task + 1, own);
            pieces.run(task - gated.count(), task - gated.count() + 1, own);
        });
    }

    void multiply_down(size_t first, size_t last) {
        const std::span<const LinearCall> calls = std::span<const LinearCall>(down_).subspan(first, last - first);
        const int64_t begin = groups_[first].first, rows = groups_[last - 1].first + groups_[last - 1].rows - begin;
        const bool alone = few_ && rows * experts_.features() < kAloneValues;
        if (!alone) spread(rows, [&](int64_t from, int64_t to, int) { activate_rows(begin + from, begin + to); });
        const Beside* const beside = begin_updates(first, last, true);
        if (few_) {
            const Prepare prepare = [&] { activate_rows(begin, begin + rows); };
            multiply_few(runtime_, calls, alone ? prepare : nullptr, beside);
        } else {
            run_tasks(GatedTasks({}, 1), PieceTasks(calls, runtime_.pool.threads()));
            run_beside(beside);
        }
        updates_.finish_within();
    }

    void add_up() {
        constexpr int64_t kStrip = 1024;  // columns of a token that one thread adds up
        const int64_t columns = experts_.columns(), strips = (columns + kStrip - 1) / kStrip;
        const MixRowsCall call{made_, columns, call_.used, places_.data(), call_.shares, call_.out};
        const auto add = [&](int64_t first, int64_t last, int) {
            for (int64_t i = first; i < last; ++i) {
                const int64_t start = i % strips * kStrip;
                table_.mix_rows(call, i / strips, i / strips + 1, start, std::min(columns, start + kStrip));
            }
        };
        if (pairs() * columns < kAloneValues) return add(0, call_.tokens * strips, 0);
        spread(call_.tokens * strips, add);
    }

    Ran describe() const {
        Ran ran(OperatorName::moe);
        for (size_t i = 0; i < groups_.size(); ++i) describe_call(up_[i], groups_[i].gated, ran);
        for (const LinearCall& call : down_) describe_call(call, false, ran);
        return ran;
    }

    // Rows by the kernel that multiplies them, for the ledger: an expert of many rows may have another one than the
    // next.
    void count_rows() const {
        const auto count = [&](const LinearCall& call, bool gated) {
            for (const LinearWeight::Part& part : call.weight.parts()) {
                runtime_.tally.add_expert_rows(name_kernel(call, part, gated), part.type, call.tokens());
            }
        };
        for (size_t i = 0; i < groups_.size(); ++i) {
            count(up_[i], groups_[i].gated);
            count(down_[i], false);
        }
    }

    // The weights of those experts that have tokens.
    Tally::Work measure() const {
        const int64_t columns = experts_.columns();
        Tally::Work work{
            .nanoseconds = 0, .bytes = 2 * call_.tokens * columns * static_cast<int64_t>(sizeof(float)), .macs = 0};
        for (const std::vector<LinearCall>* calls : {&up_, &down_}) {
            for (const LinearCall& call : *calls) {
                work.bytes += call.weight.bytes();
                work.macs += call.tokens() * call.weight.in_features() * call.weight.out_features();
            }
        }
        return work;
    }

    Runtime& runtime_;
    const Experts& experts_;
    const MixCall& call_;
    const OperatorTable& table_;
    ProductUpdates updates_;
    std::vector<ExpertGroup> groups_;
    std::optional<ExpertRows> adapted_;
    std::vector<int32_t> places_;  // of each token and rank: where its row is, sorted by expert
    std::vector<int32_t> owners_;  // of each row: its group
    Needs source_needs_;
    bool few_ = true;
    std::byte* end_ = nullptr;
    std::vector<LinearInput> sources_;  // one token, of each thread
    std::vector<LinearCall> up_, down_;
    float* made_ = nullptr;  // rows of what the experts make
};

}  // namespace

void run_mix(Runtime& runtime, const Experts& experts, const MixCall& call) {
    if (call.tokens == 0) return;
    MixRun(runtime, experts, call).run();
}

}  // namespace mlxr
