// The pool. See thread_pool.h.
//
// A section is published by raising `generation`; each worker works, then lowers `running`; the caller waits
// for zero. Both waits spin first and then sleep on a condition variable. Sleeping is announced (`sleepers`,
// `caller_sleeps`) with sequentially consistent order before the last look at the awaited word, so a wake-up
// cannot be missed.
#include "runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/errands.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(MLXR_X86)
#include <immintrin.h>
#endif

namespace mlxr {

namespace {

// A wait spins for so long, then also lets others have the processor, then sleeps. The second time covers what the
// caller does between the steps of a model.
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr auto kYield = std::chrono::microseconds(400);

inline void pause_cpu() {
#if defined(MLXR_X86)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until ready() or until the times above have passed; returns ready(). Calls crowded() once in between, and
// pass() again and again.
template <typename Ready, typename Crowded, typename Pass>
bool spin_until(const Ready& ready, const Crowded& crowded, const Pass& pass) {
    if (ready()) return true;
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pass();
        }
    } while (std::chrono::steady_clock::now() - start < kSpin);
    crowded();
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pass();
        }
        std::this_thread::yield();
    } while (std::chrono::steady_clock::now() - start < kYield);
    return ready();
}

// Counts fork() on the child's side: a pool made before the fork has lost its threads.
std::atomic<unsigned>& fork_count() {
    static std::atomic<unsigned> count{0};
#if defined(__unix__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
    (void)registered;
#endif
    return count;
}

}  // namespace

#if defined(__linux__)
// The processor each thread of a pool was last seen on. A woken thread is often put on the processor of the one that
// woke it, where both then wait for each other until the scheduler notices: ten times as long as a short section takes.
class ThreadPlaces {
  public:
    explicit ThreadPlaces(int threads) : cpus_(static_cast<size_t>(threads)) {
        for (std::atomic<int>& cpu : cpus_) cpu.store(-1, std::memory_order_relaxed);
    }

    void note(int thread) { cpus_[static_cast<size_t>(thread)].store(sched_getcpu(), std::memory_order_relaxed); }

    // Moves the calling thread, which is `thread`, if it shares its processor with another, to one that it may use and
    // no other is on. It stays free to be moved again.
    void leave_crowd(int thread) {
        note(thread);
        cpu_set_t allowed, free, one;
        if (!shares(thread) || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        free = allowed;
        for (const std::atomic<int>& cpu : cpus_) {
            const int taken = cpu.load(std::memory_order_relaxed);
            if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
        }
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &free)) continue;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one);
            sched_setaffinity(0, sizeof allowed, &allowed);
            return note(thread);
        }
    }

  private:
    bool shares(int thread) const {
        const int own = cpus_[static_cast<size_t>(thread)].load(std::memory_order_relaxed);
        for (size_t other = 0; other < cpus_.size(); ++other) {
            if (static_cast<int>(other) == thread) continue;
            if (cpus_[other].load(std::memory_order_relaxed) == own) return true;
        }
        return false;
    }

    std::vector<std::atomic<int>> cpus_;
};
#else
class ThreadPlaces {
  public:
    explicit ThreadPlaces(int) {}
    void note(int) {}
    void leave_crowd(int) {}
};
#endif

// The tasks [begin, end) of one thread, of which it does the first in any case.
class alignas(64) TaskShare {
  public:
    void set(int begin, int end) {
        begin_ = begin;
        end_ = end;
        taken_.store(1, std::memory_order_relaxed);
    }
    int begin() const { return begin_; }
    int end() const { return end_; }

    // A task that nobody has had, from the front or from the back; end() when there is none.
    int take_first() {
        const uint64_t taken = taken_.fetch_add(1, std::memory_order_relaxed);
        return is_left(taken) ? begin_ + static_cast<int>(taken & kFront) : end_;
    }
    int take_last() {
        if (!is_left(taken_.load(std::memory_order_relaxed))) return end_;  // mostly so, and costs its thread nothing
        const uint64_t taken = taken_.fetch_add(kFront + 1, std::memory_order_relaxed);
        return is_left(taken) ? end_ - 1 - static_cast<int>(taken >> 32) : end_;
    }

  private:
    static constexpr uint64_t kFront = 0xffffffff;
    bool is_left(uint64_t taken) const {
        return static_cast<int64_t>((taken & kFront) + (taken >> 32)) < end_ - begin_;
    }

    std::atomic<uint64_t> taken_{0};  // from the front, and 2**32 times how many from the back
    int begin_ = 0, end_ = 0;
};

size_t Stretches::bytes() const {
    size_t bytes = 0;
    for (int i = 0; i < count_; ++i) bytes += list_[i].bytes;
    return bytes;
}

void Stretches::copy(const Stretches& other) {
    count_ = other.count_;
    std::copy_n(other.list_, count_, list_);
}

void Stretches::fetch_piece(size_t at) const {
    constexpr size_t kLine = 64;
    for (int i = 0; i < count_; ++i) {
        const auto& [data, bytes] = list_[i];
        if (at < bytes) {
            const size_t end = std::min(at + kPieceBytes, bytes);
            for (; at < end; at += kLine) __builtin_prefetch(data + at, 0, 2);
            return;
        }
        at -= bytes;
    }
}

struct ThreadPool::State {
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<int> running{0};
    alignas(64) std::atomic<size_t> fetched{0};  // bytes of `after` that workers have asked for
    alignas(64) std::atomic<int> sleepers{0};
    std::atomic<bool> caller_sleeps{false};
    // The section; written before `generation` rises, read after.
    alignas(64) Task fn = nullptr;
    void* arg = nullptr;
    int tasks = 0;
    bool near = false;
    bool stop = false;
    Stretches after;  // to ask for once it is over

    const int threads;
    std::vector<TaskShare> shares;
    ThreadPlaces places;
    unsigned forks = 0;
    std::mutex mutex;
    std::condition_variable wake_workers, wake_caller;
    std::vector<std::thread> workers;

    Errands& errands;

    State(int threads_, Errands& errands_)
        : threads(threads_), shares(static_cast<size_t>(threads_)), places(threads_), errands(errands_) {}

    void share_out() {
        const auto begin_of = [&](int64_t share) { return static_cast<int>(tasks * share / threads); };
        for (int thread = 0; thread < threads; ++thread) {
            shares[static_cast<size_t>(thread)].set(begin_of(thread), begin_of(thread + 1));
        }
    }

    void work_near(int thread) {
        TaskShare& own = shares[static_cast<size_t>(thread)];
        for (int task = own.begin(); task < own.end(); task = own.take_first()) fn(arg, task, thread);
        for (int next = 1; next < threads; ++next) {
            TaskShare& other = shares[static_cast<size_t>((thread + next) % threads)];
            for (int task; (task = other.take_last()) < other.end();) fn(arg, task, thread);
        }
    }

    void work(int thread) {
        if (near) return work_near(thread);
        for (int task = next.fetch_add(1, std::memory_order_relaxed); task < tasks;
             task = next.fetch_add(1, std::memory_order_relaxed)) {
            fn(arg, task, thread);
        }
    }

    // Returns when there is a new section, or perhaps an errand. `ahead` is what to ask memory for meanwhile.
    void await_work(uint32_t seen, int thread, const Stretches& ahead) {
        const auto ready = [&] { return generation.load(std::memory_order_acquire) != seen || errands.has_waiting(); };
        const auto leave_crowd = [&] { places.leave_crowd(thread); };
        const size_t bytes = ahead.bytes();
        const auto pass = [&] {
            if (fetched.load(std::memory_order_relaxed) < bytes) {
                ahead.fetch_piece(fetched.fetch_add(Stretches::kPieceBytes, std::memory_order_relaxed));
            }
            pause_cpu();
        };
        if (spin_until(ready, leave_crowd, pass)) return;
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        wake_workers.wait(lock, [&] { return generation.load() != seen; });
        sleepers.fetch_sub(1);
        lock.unlock();
        leave_crowd();
    }

    void serve(int thread) {
        uint32_t seen = 0;
        Stretches ahead;
        while (true) {
            await_work(seen, thread, ahead);
            const uint32_t now = generation.load(std::memory_order_acquire);
            if (now == seen) {
                errands.run_next_beside();
                continue;
            }
            seen = now;
            if (stop) return;
            work(thread);
            ahead.copy(after);
            if (running.fetch_sub(1) == 1 && caller_sleeps.load()) {
                std::lock_guard lock(mutex);
                wake_caller.notify_one();
            }
        }
    }

    void publish() {
        places.note(0);
        generation.fetch_add(1);
        if (sleepers.load() > 0) {
            std::lock_guard lock(mutex);
            wake_workers.notify_all();
        }
    }

    void await_workers() {
        if (spin_until([&] { return running.load(std::memory_order_acquire) == 0; }, [] {}, pause_cpu)) return;
        std::unique_lock lock(mutex);
        caller_sleeps.store(true);
        wake_caller.wait(lock, [&] { return running.load() == 0; });
        caller_sleeps.store(false);
    }
};

ThreadPool::ThreadPool(int threads) : threads_(threads < 1 ? 1 : threads), errands_(new Errands), state_(nullptr) {
    if (threads_ == 1) return;
    state_ = new State(threads_, *errands_);
    state_->forks = fork_count().load();
    try {
        for (int thread = 1; thread < threads_; ++thread) {
            state_->workers.emplace_back([state = state_, thread] { state->serve(thread); });
        }
    } catch (...) {  // the system gave fewer threads: stop those that run, then report
        state_->stop = true;
        state_->publish();
        for (std::thread& worker : state_->workers) worker.join();
        delete state_;
        delete errands_;
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (state_ != nullptr) {
        if (state_->forks != fork_count().load()) return;  // the threads are the parent's: nothing to join, let it lie
        state_->stop = true;
        state_->publish();
        for (std::thread& worker : state_->workers) worker.join();
        delete state_;
    }
    delete errands_;
}

void ThreadPool::start(int tasks, Task fn, void* arg, bool near) {
    if (tasks <= 0) return;
    if (state_ == nullptr || tasks == 1 || state_->forks != fork_count().load(std::memory_order_relaxed)) {
        for (int task = 0; task < tasks; ++task) fn(arg, task, 0);
        return;
    }
    while (errands_->has_waiting() && errands_->run_next()) continue;
    State& state = *state_;
    state.fn = fn;
    state.arg = arg;
    state.tasks = tasks;
    state.near = near;
    state.after.copy(after_next_);
    if (!after_next_.empty()) state.fetched.store(0, std::memory_order_relaxed);
    after_next_.clear();
    if (near) state.share_out();
    state.next.store(0, std::memory_order_relaxed);
    state.running.store(threads_ - 1, std::memory_order_relaxed);
    state.publish();
    state.work(0);
    state.await_workers();
}

unsigned count_forks() {
    return fork_count().load(std::memory_order_relaxed);
}

void wait_a_little(int round) {
    constexpr int kRounds = 2000;  // some 30 us
    if (round < kRounds) return pause_cpu();
    std::this_thread::yield();
}

void ThreadPool::run(int tasks, Task fn, void* arg) {
    start(tasks, fn, arg, false);
}

void ThreadPool::run_near(int tasks, Task fn, void* arg) {
    start(tasks, fn, arg, true);
}

}  // namespace mlxr
