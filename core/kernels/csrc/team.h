// The threads that run one list of operations together, and how they meet and share work.
//
// One parallel region runs a whole list: between two operations the threads meet at a barrier, which costs a fraction of a
// microsecond where closing and opening a region costs several. A thread spins there for SPIN_NS, then sleeps: where the
// cores are shared with other programs, the thread that it waits for may need its core.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#include <time.h>

constexpr int MAX_OWNERS = 64;  // threads beyond have no items of their own

// Floats that the threads of a team share, as many as the largest operation so far needed.
class Room {
public:
    ~Room() { free(floats_); }

    // Uninitialised. Every thread of an operation asks for as many, none reads what an operation before has left.
    float* at_least(int64_t count) {
        const std::lock_guard<std::mutex> lock(growing_);
        if (count > capacity_) {
            free(floats_);
            capacity_ = (count + count / 4 + 15) / 16 * 16;
            floats_ = (float*)aligned_alloc(64, capacity_ * sizeof(float));
            if (!floats_) abort();
        }
        return floats_;
    }

private:
    std::mutex growing_;
    float* floats_ = nullptr;
    int64_t capacity_ = 0;
};

struct TeamState {
    Room* room = nullptr;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};
    std::atomic<int> sleepers{0};
    alignas(64) std::atomic<int64_t> next_item[3]{};
    struct alignas(64) Owner {
        std::atomic<int64_t> next_item[3]{};
    } owners[MAX_OWNERS];
};

struct Rows {
    int64_t first, end;
};

struct Bytes {
    const uint8_t *first, *end;
};

class Team {
public:
    Team(TeamState& state, int rank, int size) : rank(rank), size(size), state_(state) {}

    // One thread by itself, for some rows of every operation.
    Team(TeamState& state, Rows rows) : rank(0), size(1), state_(state), some_rows_(rows) {}

    const int rank;
    const int size;

    int64_t num_syncs() const { return phase_; }

    // What this thread will read before long, and fetches meanwhile where it has to wait for others.
    void expect(Bytes bytes) { expected_ = bytes; }

    // Every thread waits here for all others. What was written before is seen by all after.
    void sync() {
        const int next_phase = (phase_ + 1) % 3;
        if (rank == 0) state_.next_item[next_phase].store(0, std::memory_order_relaxed);
        if (rank < MAX_OWNERS) state_.owners[rank].next_item[next_phase].store(0, std::memory_order_relaxed);
        phase_++;
        if (size == 1) return;
        const int generation = state_.generation.load(std::memory_order_acquire);
        if (state_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            state_.arrived.store(0, std::memory_order_relaxed);
            // In one order with the sleeper's own pair: either it sees the new generation or it is seen here.
            state_.generation.store(generation + 1, std::memory_order_seq_cst);
            if (state_.sleepers.load(std::memory_order_seq_cst)) wake_sleepers();
        } else {
            wait_for_next(generation);
        }
    }

    // Floats that all threads of the team share until the operation ends.
    float* room(int64_t count) { return state_.room->at_least(count); }

    // Which of an operation's rows this team works on.
    Rows rows(const int64_t* count) const { return some_rows_.end < 0 ? Rows{0, *count} : some_rows_; }

    // Calls work(item) for items first..end-1, `run` at a time on whichever thread is free. At most one such loop, or one
    // as below, between two syncs.
    template <class Work>
    void share(int64_t first, int64_t end, int64_t run, Work work) {
        if (size == 1) {
            for (int64_t item = first; item < end; item++) work(item);
            return;
        }
        auto& next = state_.next_item[phase_ % 3];
        for (int64_t at; (at = first + next.fetch_add(run, std::memory_order_relaxed)) < end;)
            for (int64_t item = at; item < at + run && item < end; item++) work(item);
    }

    template <class Work>
    void share(int64_t count, Work work) {
        share(0, count, 1, work);
    }

    // Calls work(item) for items 0..count-1. The static part: thread r takes items r * own .. (r + 1) * own - 1. The dynamic
    // part: of the rest, `run` at a time go to whichever thread is free. Then threads help out with what others have left
    // of their static part: one that lost its core to another program keeps nobody waiting but for the item it is at.
    template <class Work>
    void share_by_rank(int64_t count, int64_t own, int64_t run, Work work) {
        if (size == 1 || size > MAX_OWNERS || own == 0) return share(0, count, run, work);
        work_on_own_items_of(rank, own, work);
        share(size * own, count, run, work);
        for (int other = 1; other < size; other++) work_on_own_items_of((rank + other) % size, own, work);
    }

    // Calls work(item) for the items of an operation's rows, `per_row` to a row: small and side by side in memory, so
    // they go in runs that leave each thread several.
    template <class Work>
    void share_rows(const int64_t* count, Work work, int64_t per_row = 1) {
        const Rows all = rows(count);
        share(all.first * per_row, all.end * per_row, (all.end - all.first) * per_row / (8 * size) + 1, work);
    }

private:
    static constexpr int64_t SPIN_NS = 50'000;
    static constexpr int SPINS_PER_LOOK = 64;  // at the clock

    template <class Work>
    void work_on_own_items_of(int owner, int64_t own, Work& work) {
        auto& next = state_.owners[owner].next_item[phase_ % 3];
        for (int64_t at; next.load(std::memory_order_relaxed) < own && (at = next.fetch_add(1, std::memory_order_relaxed)) < own;)
            work(owner * own + at);
    }

    void wait_for_next(int generation) {
        auto waiting = [&] { return state_.generation.load(std::memory_order_acquire) == generation; };
        while (waiting() && expected_.first < expected_.end) fetch_expected();
        for (const int64_t end = now() + SPIN_NS; waiting() && now() < end;)
            for (int spins = 0; waiting() && spins < SPINS_PER_LOOK; spins++) pause();
        if (!waiting()) return;
        state_.sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (state_.generation.load(std::memory_order_seq_cst) == generation) sleep_while(generation);
        state_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

#if defined(__linux__)
    void sleep_while(int generation) {
        syscall(SYS_futex, &state_.generation, FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
    }

    void wake_sleepers() { syscall(SYS_futex, &state_.generation, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(int) { sched_yield(); }

    void wake_sleepers() {}
#endif

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec * 1'000'000'000 + time.tv_nsec;
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void fetch_expected() {
        __builtin_prefetch(expected_.first, 0, 2);
        expected_.first += 64;
    }

    TeamState& state_;
    Bytes expected_{nullptr, nullptr};
    const Rows some_rows_{0, -1};
    int phase_ = 0;
};
