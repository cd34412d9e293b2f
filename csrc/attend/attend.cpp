// See attend.h. A task is a block of rows of one KV head of one sequence; a block with a large share of the
// whole call (a long context at decode) becomes one task per chunk of positions instead, merged in a second
// section.
#include "attend/attend.h"

#include <algorithm>

namespace mlxr {

namespace {

// Below this many multiply-adds, waking the other threads costs more than it brings.
constexpr int64_t kSerialWork = 1 << 15;
// A block of rows is split when it is more than 1 / (kSharesPerThread * threads) of the whole call.
constexpr int64_t kSharesPerThread = 4;

struct PlanSize {
    int64_t tasks = 0, merges = 0, partial_floats = 0;
};

int64_t block_rows_of(const AttendCall& call) {
    return is_packed(call.type) ? kPackedBlockRows : kBlockRows;
}

int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

// Calls visit(task, work) for every block of rows; later rows first, as they see more and so should start
// early.
template <typename Visit>
void visit_blocks(const AttendCall& call, int64_t sequences, Visit&& visit) {
    const int64_t block_rows = block_rows_of(call);
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const int64_t queries = call.query_starts[sequence + 1] - call.query_starts[sequence];
        const int64_t length = call.context_lengths[sequence], first_position = length - queries;
        const int64_t rows = queries * call.group;
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            for (int64_t first = (rows - 1) / block_rows * block_rows; rows > 0 && first >= 0; first -= block_rows) {
                AttendTask task{};
                task.sequence = static_cast<int32_t>(sequence);
                task.kv_head = static_cast<int32_t>(head);
                task.row_first = first;
                task.row_last = std::min(rows, first + block_rows);
                task.low = start_of_seen(call, first_position + first / call.group + 1);
                const int64_t last = (task.row_last - 1) / call.group;
                task.high = end_of_seen(call, call.query_starts[sequence] + last, first_position + last + 1, length);
                task.chunk_first = task.low / kChunkPositions;
                task.chunk_last = (task.high - 1) / kChunkPositions + 1;
                visit(task, (task.row_last - task.row_first) * (task.high - task.low));
            }
        }
    }
}

// Chunks of one task of a block that is split: neighbours lie together in memory, so some at a time.
int64_t task_chunks(const AttendTask& task, int64_t limit) {
    constexpr int64_t kMostChunks = 16;
    const int64_t fitting = limit / ((task.row_last - task.row_first) * kChunkPositions);
    return std::clamp<int64_t>(fitting, 1, kMostChunks);
}

bool is_split(const AttendTask& task, int64_t work, int64_t limit) {
    return work > limit && task.chunk_last - task.chunk_first > 1;
}

int64_t chunk_floats(const AttendTask& task, const AttendCall& call) {
    return (task.row_last - task.row_first) * (call.padded_value + 2);
}

PlanSize measure_plan(const AttendCall& call, int64_t sequences, int64_t limit) {
    PlanSize size;
    visit_blocks(call, sequences, [&](const AttendTask& task, int64_t work) {
        if (!is_split(task, work, limit)) {
            ++size.tasks;
            return;
        }
        const int64_t chunks = task.chunk_last - task.chunk_first;
        const int64_t together = task_chunks(task, limit);
        size.tasks += (chunks + together - 1) / together;
        size.merges += 1;
        size.partial_floats += round_up(chunks * chunk_floats(task, call), 16);
    });
    return size;
}

void fill_plan(const AttendCall& call, int64_t sequences, int64_t limit, const AttendPlan& plan, float* partials) {
    AttendTask *task_end = plan.tasks, *merge_end = plan.merges;
    visit_blocks(call, sequences, [&](AttendTask task, int64_t work) {
        if (!is_split(task, work, limit)) {
            *task_end++ = task;
            return;
        }
        task.partials = partials;
        *merge_end++ = task;
        const int64_t chunks = task.chunk_last - task.chunk_first;
        const int64_t together = task_chunks(task, limit);
        for (int64_t chunk = 0; chunk < chunks; chunk += together) {
            AttendTask part = task;
            part.chunk_first = task.chunk_first + chunk;
            part.chunk_last = std::min(part.chunk_first + together, task.chunk_last);
            part.low = std::max(task.low, part.chunk_first * kChunkPositions);
            part.high = std::min(task.high, part.chunk_last * kChunkPositions);
            part.partials = partials + chunk * chunk_floats(task, call);
            *task_end++ = part;
        }
        partials += round_up(chunks * chunk_floats(task, call), 16);
    });
}

Ran describe_call(const AttendCall& call, const AttendPlan& plan) {
    const bool split = plan.merge_count > 0;
    const KernelName packed = split ? KernelName::split_packed : KernelName::packed;
    const KernelName tiles = split ? KernelName::split_tiles : KernelName::tiles;
    const int form = static_cast<int>(call.type) | (call.window < kAllPositions ? kWindow : 0) |
                     (call.softcap != 0 ? kSoftcap : 0) | (call.sinks != nullptr ? kSinks : 0) |
                     (call.values_in_keys ? kLatent : 0);
    return {OperatorName::attend, is_packed(call.type) ? packed : tiles, form};
}

// Keys and values that the queries of a sequence see are read once, its queries and results are floats.
Tally::Work measure_call(const AttendCall& call, int64_t sequences) {
    int64_t pairs = 0, positions = 0;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const int64_t queries = call.query_starts[sequence + 1] - call.query_starts[sequence];
        const int64_t length = call.context_lengths[sequence], before = length - queries;
        for (int64_t query = 0; query < queries; ++query) {
            const int64_t own = before + query + 1;
            pairs += end_of_seen(call, call.query_starts[sequence] + query, own, length) - start_of_seen(call, own);
        }
        if (queries > 0) positions += length - start_of_seen(call, before + 1);
    }
    const int64_t pools = call.values_in_keys ? 1 : 2, dims = call.head_dim + call.value_dim;
    const int64_t floats = (call.query_starts[sequences] - call.query_starts[0]) * call.heads * dims;
    return {.nanoseconds = 0,
            .bytes = pools * positions * call.kv_heads * row_bytes(call.type, call.head_dim) +
                     floats * static_cast<int64_t>(sizeof(float)),
            .macs = pairs * call.heads * dims};
}

}  // namespace

AttendPlan plan_attend(Runtime& runtime, const AttendCall& call, int64_t sequences) {
    int64_t total_work = 0;
    visit_blocks(call, sequences, [&](const AttendTask&, int64_t work) { total_work += work; });
    const int threads = runtime.pool.threads();
    const bool serial = threads == 1 || total_work * call.padded_dim < kSerialWork;
    const int64_t limit = serial ? total_work : total_work / (kSharesPerThread * threads);
    const PlanSize size = measure_plan(call, sequences, limit);
    const int64_t thread_bytes = round_up(operator_table(runtime.isa)->attend_scratch_bytes(call), 4096);
    const int64_t task_bytes = round_up(size.tasks * static_cast<int64_t>(sizeof(AttendTask)), 64);
    const int64_t merge_bytes = round_up(size.merges * static_cast<int64_t>(sizeof(AttendTask)), 64);
    const int64_t partial_bytes = round_up(size.partial_floats * static_cast<int64_t>(sizeof(float)), 64);
    std::byte* const scratch = runtime.scratch(
        Scratch::attend, static_cast<size_t>(thread_bytes * threads + partial_bytes + task_bytes + merge_bytes));
    std::byte *const partials = scratch + thread_bytes * threads, *const tasks = partials + partial_bytes;
    const AttendPlan plan{reinterpret_cast<AttendTask*>(tasks),
                          reinterpret_cast<AttendTask*>(tasks + task_bytes),
                          scratch,
                          size.tasks,
                          size.merges,
                          thread_bytes,
                          sequences,
                          serial};
    fill_plan(call, sequences, limit, plan, reinterpret_cast<float*>(partials));
    for (int64_t task = 0; task < plan.task_count; ++task) {  // threads take turns, more or less
        const int64_t next = task + (serial ? 1 : threads);
        plan.tasks[task].next = next < plan.task_count ? plan.tasks + next : nullptr;
    }
    return plan;
}

void run_attend(Runtime& runtime, const AttendCall& call, const AttendPlan& plan) {
    Counted counted(runtime.tally, describe_call(call, plan));
    counted.does([&] { return measure_call(call, plan.sequences); });
    const OperatorTable& table = *operator_table(runtime.isa);
    if (plan.serial) {
        for (int64_t task = 0; task < plan.task_count; ++task) {
            table.attend(call, plan.tasks[task], plan.thread_scratch);
        }
        return;
    }
    runtime.pool.parallel_for(static_cast<int>(plan.task_count), [&](int task, int thread) {
        table.attend(call, plan.tasks[task], plan.thread_scratch + thread * plan.thread_bytes);
    });
    if (plan.merge_count == 0) return;
    runtime.pool.parallel_for(static_cast<int>(plan.merge_count),
                              [&](int merge, int) { table.attend_merge(call, plan.merges[merge]); });
}

}  // namespace mlxr
