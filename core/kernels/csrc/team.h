// The threads that run one list of operations together, and how they meet and share work.
//
// One parallel region runs a whole list: between two operations the threads meet at a spin barrier, which costs a
// fraction of a microsecond where closing and opening a region costs several.
#pragma once

#include <atomic>
#include <cstdint>

#include <sched.h>

struct TeamState {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};
    alignas(64) std::atomic<int64_t> next_item[3]{};
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

    // What this thread will read before long, and fetches meanwhile where it has to wait for others.
    void expect(Bytes bytes) { expected_ = bytes; }

    // Every thread waits here for all others. What was written before is seen by all after.
    void sync() {
        if (rank == 0) state_.next_item[(phase_ + 1) % 3].store(0, std::memory_order_relaxed);
        phase_++;
        if (size == 1) return;
        const int generation = state_.generation.load(std::memory_order_acquire);
        if (state_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            state_.arrived.store(0, std::memory_order_relaxed);
            state_.generation.store(generation + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; state_.generation.load(std::memory_order_acquire) == generation; spins++) {
            if (expected_.first < expected_.end) fetch_expected();
            else if (spins < SPINS_BEFORE_YIELD) pause();
            else sched_yield();
        }
    }

    // Which of an operation's rows this team works on.
    Rows rows(const int64_t* count) const { return some_rows_.end < 0 ? Rows{0, *count} : some_rows_; }

    // Calls work(item) for items first..end-1: first `own` neighbours on each thread, by its rank, then `run` at a time on
    // whichever thread is free. At most one such loop between two syncs.
    template <class Work>
    void share(int64_t first, int64_t end, int64_t own, int64_t run, Work work) {
        if (size == 1) {
            for (int64_t item = first; item < end; item++) work(item);
            return;
        }
        auto& next = state_.next_item[phase_ % 3];
        for (int64_t item = first + rank * own; item < first + (rank + 1) * own && item < end; item++) work(item);
        for (int64_t at; (at = first + size * own + next.fetch_add(run, std::memory_order_relaxed)) < end;)
            for (int64_t item = at; item < at + run && item < end; item++) work(item);
    }

    template <class Work>
    void share(int64_t count, Work work) {
        share(0, count, 0, 1, work);
    }

    // Calls work(item) for the items of an operation's rows, `per_row` to a row: small and side by side in memory, so
    // they go in runs that leave each thread several.
    template <class Work>
    void share_rows(const int64_t* count, Work work, int64_t per_row = 1) {
        const Rows all = rows(count);
        share(all.first * per_row, all.end * per_row, 0, (all.end - all.first) * per_row / (8 * size) + 1, work);
    }

private:
    static constexpr int SPINS_BEFORE_YIELD = 2000;

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
