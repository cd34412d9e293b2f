// See errands.h.
#include "runtime/errands.h"

#include <algorithm>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "runtime/thread_pool.h"

namespace mlxr {

namespace {

std::atomic<bool> closed{false};
std::atomic<int> busy_threads{0};  // of pools, at errands; a forked child has none of them

}  // namespace

Errands::Errands() : forks_(count_forks()) {
#if defined(__unix__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { busy_threads.store(0); });
    (void)registered;
#endif
}

void Errands::add(Errand& errand) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(&errand);
    errand.state_.store(Errand::State::waiting, std::memory_order_relaxed);
    waiting_.fetch_add(1, std::memory_order_release);
}

Errand* Errands::take() {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return nullptr;
    Errand* const errand = queue_.front();
    queue_.pop_front();
    errand->state_.store(Errand::State::running, std::memory_order_relaxed);
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return errand;
}

bool Errands::take_back(Errand& errand) {
    const std::lock_guard lock(mutex_);
    if (errand.state_.load(std::memory_order_relaxed) != Errand::State::waiting) return false;
    queue_.erase(std::find(queue_.begin(), queue_.end(), &errand));
    errand.state_.store(Errand::State::running, std::memory_order_relaxed);
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return true;
}

void Errands::do_it(Errand& errand) {
    errand.run();
    errand.state_.store(Errand::State::idle, std::memory_order_release);  // it may be gone after this
}

bool Errands::run_next() {
    Errand* const errand = take();
    if (errand == nullptr) return false;
    do_it(*errand);
    return true;
}

bool Errands::run_next_beside() {
    busy_threads.fetch_add(1);
    const bool found = !closed.load() && run_next();
    busy_threads.fetch_sub(1);
    return found;
}

void Errands::finish(Errand& errand) {
    if (errand.is_idle()) return;
    if (take_back(errand)) return do_it(errand);
    wait_for(errand);
}

void Errands::drop(Errand& errand) {
    if (errand.is_idle()) return;
    if (take_back(errand)) return errand.state_.store(Errand::State::idle, std::memory_order_relaxed);
    wait_for(errand);
}

void Errands::wait_for(const Errand& errand) const {
    wait_until([&] { return errand.is_idle() || count_forks() != forks_; });
}

void Errands::close() {
    closed.store(true);
    wait_until([] { return busy_threads.load() == 0; });
}

}  // namespace mlxr
