// Work that can wait: small pieces that a pool's threads do between its sections, while their caller is busy elsewhere.
// What no thread has begun when its result is wanted is done by the thread that wants it, so that nothing depends on
// there being a free one.
//
// An errand must not throw and must not use the pool. It may take Python's lock: whoever waits for errands must not
// hold it. Safe to use from several threads, each errand from one at a time.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>

namespace mlxr {

class Errand {
  public:
    virtual void run() = 0;

    bool is_idle() const { return state_.load(std::memory_order_acquire) == State::idle; }

  protected:
    Errand() = default;
    Errand(const Errand&) = delete;
    Errand& operator=(const Errand&) = delete;
    ~Errand() = default;

  private:
    friend class Errands;
    enum class State : int { idle, waiting, running };
    std::atomic<State> state_{State::idle};
};

class Errands {
  public:
    Errands();

    // Whether a thread would find one to do.
    bool has_waiting() const { return waiting_.load(std::memory_order_acquire) > 0; }

    // Takes an idle errand, which must stay until it was finished or dropped. Throws std::bad_alloc.
    void add(Errand& errand);

    // Does the one that waits longest. False if there is none.
    bool run_next();

    // The same for the threads of a pool, which take none once the process ends.
    bool run_next_beside();

    // Does the errand if nobody has begun, or waits for the thread that has. The errand is idle then; only what was
    // under way when the process was forked never ends in the child.
    void finish(Errand& errand);

    // The same, but what nobody has begun is not done.
    void drop(Errand& errand);

    // From now on no thread of any pool begins an errand; returns when none is at one. For the end of the process.
    static void close();

  private:
    Errand* take();
    bool take_back(Errand& errand);
    void wait_for(const Errand& errand) const;
    static void do_it(Errand& errand);

    alignas(64) std::atomic<int> waiting_{0};  // threads look at it all the time
    alignas(64) std::mutex mutex_;
    std::deque<Errand*> queue_;
    const unsigned forks_;
};

}  // namespace mlxr
