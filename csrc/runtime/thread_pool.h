// A persistent pool for short parallel sections: the calling thread is worker 0, the others spin for some 30 us after
// each section, then let others have the processor for 400 us, then sleep. Starting a section costs well under a
// microsecond while they spin.
//
// Tasks must not throw, and must not start a section themselves. One section at a time: callers serialise
// (Runtime has the mutex). After fork() the child has no workers; there all work runs on the calling thread,
// with the same results.
//
// Between sections the workers do errands (errands.h) while they are awake; those that still wait when the next section
// starts are done first, by all threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlxr {

class Errands;

// Memory that is going to be read, in order; what does not fit into the list is left out.
class Stretches {
  public:
    void add(const uint8_t* data, size_t bytes) {
        if (count_ < kMost) list_[count_++] = {data, bytes};
    }
    void clear() { count_ = 0; }
    bool empty() const { return count_ == 0; }
    size_t bytes() const;
    void copy(const Stretches& other);  // costs little when there is little

    // Asks memory for kPieceBytes bytes, from byte `at` of them all on.
    void fetch_piece(size_t at) const;

    // More at once, without a pause in between, and processors drop most of what they are asked for.
    static constexpr size_t kPieceBytes = 1024;

  private:
    struct Stretch {
        const uint8_t* data;
        size_t bytes;
    };
    static constexpr int kMost = 16;
    int count_ = 0;
    Stretch list_[kMost];
};

class ThreadPool {
  public:
    using Task = void (*)(void* arg, int task, int thread);

    // `threads` >= 1, the caller included.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return threads_; }
    Errands& errands() { return *errands_; }

    // Calls fn(arg, task, thread) for every task in [0, tasks); threads claim tasks as they become free.
    // Returns when all are done. thread is in [0, threads()).
    void run(int tasks, Task fn, void* arg);

    // The same, but each thread has a contiguous share, [tasks*t/threads, tasks*(t+1)/threads): the first task of it is
    // its own, the others it takes from the front, and who is done with its own takes them from the back. So what one
    // section leaves in a processor's cache is there in the next, and a thread reads on where it was.
    void run_near(int tasks, Task fn, void* arg);

    // Once the section that starts next is over, workers ask memory for these bytes while they wait for another one and
    // are awake. They are only asked for, so the memory may go at any time.
    void fetch_after_next(const Stretches& stretches) { after_next_.copy(stretches); }

    // For callables: body(task, thread). Not for sources that are compiled per tier (inline code with
    // linkage).
    template <typename Body>
    void parallel_for(int tasks, const Body& body) {
        run(tasks, &call<Body>, const_cast<Body*>(&body));
    }
    template <typename Body>
    void parallel_for_near(int tasks, const Body& body) {
        run_near(tasks, &call<Body>, const_cast<Body*>(&body));
    }

  private:
    struct State;

    template <typename Body>
    static void call(void* body, int task, int thread) {
        (*static_cast<const Body*>(body))(task, thread);
    }
    void start(int tasks, Task fn, void* arg, bool near);

    int threads_;
    Errands* errands_;
    Stretches after_next_;
    State* state_;  // null for one thread; left to the process in a forked child
};

// How often this process is the child of a fork(): threads that were there before are not there any more.
unsigned count_forks();

// Spins until ready() holds, and lets others have the processor when that takes long: for a wait within a section for
// another of its tasks, which is running.
void wait_a_little(int round);
template <typename Ready>
void wait_until(const Ready& ready) {
    for (int round = 0; !ready(); ++round) wait_a_little(round);
}

}  // namespace mlxr
