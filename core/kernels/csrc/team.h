// The threads that run one list of operations together, and how they share work and wait for it.
//
// One parallel region runs a whole list. An operation is over when all of its items are done, whoever did them, and the
// next one begins: a thread that lost its core to another program is not waited for but for the item it holds, and finds
// the work further on when it comes back. Waiting costs a fraction of a microsecond where closing and opening a region
// costs several. A thread spins for SPIN_NS, then sleeps: where cores are shared with other programs, the thread that it
// waits for may need its core.
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
#endif
#include <sched.h>
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

// Hands out the items of one loop after another, each known by its number.
class alignas(64) Dispenser {
public:
    // Takes up to `run` items of a loop of `count`; returns the first. -1: none is left, or a later loop has begun, as a
    // thread finds that comes late.
    int64_t take(int64_t loop, int64_t count, int64_t run) {
        for (int64_t seen = state_.load(std::memory_order_relaxed);;) {
            if (seen >> ITEM_BITS > loop) return -1;
            const int64_t item = seen >> ITEM_BITS == loop ? seen & ((1LL << ITEM_BITS) - 1) : 0;
            if (item >= count) return -1;
            if (state_.compare_exchange_weak(seen, (loop << ITEM_BITS) + item + run, std::memory_order_relaxed)) return item;
        }
    }

private:
    static constexpr int ITEM_BITS = 40;
    std::atomic<int64_t> state_{0};  // the loop's number, then the next item
};

struct TeamState {
    Room* room = nullptr;
    alignas(64) std::atomic<uint32_t> done{0};  // items, since the run began
    alignas(64) std::atomic<int> sleepers{0};
    Dispenser shared, single, own[MAX_OWNERS];
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

    int64_t num_syncs() const { return loop_; }

    // What this thread will read before long, and fetches meanwhile where it has to wait for others.
    void expect(Bytes bytes) { expected_ = bytes; }

    // Waits until all that was shared out is done. What was written before is seen by all after.
    void sync() {
        loop_++;
        if (size == 1) return;
        if (!is_done()) wait();
        if (state_.sleepers.load(std::memory_order_seq_cst)) wake_sleepers();
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
        expect_items(end - first);
        take_from(state_.shared, first, end - first, run, work);
    }

    template <class Work>
    void share(int64_t count, Work work) {
        share(0, count, 1, work);
    }

    // Calls work() on one thread, beside a loop that needs nothing of it. At most once between two syncs.
    template <class Work>
    void once(Work work) {
        if (size == 1) return work();
        expect_items(1);
        take_from(state_.single, 0, 1, 1, [&](int64_t) { work(); });
    }

    // Calls work(item) for items 0..count-1. The static part: thread r takes items r * own .. (r + 1) * own - 1. The dynamic
    // part: of the rest, `run` at a time go to whichever thread is free. Then threads help out with what others have left
    // of their static part.
    template <class Work>
    void share_by_rank(int64_t count, int64_t own, int64_t run, Work work) {
        if (size == 1 || size > MAX_OWNERS || own == 0) return share(0, count, run, work);
        expect_items(count);
        take_from(state_.own[rank], rank * own, own, 1, work);
        take_from(state_.shared, size * own, count - size * own, run, work);
        for (int i = 1; i < size; i++) {
            const int other = (rank + i) % size;
            take_from(state_.own[other], other * own, own, 1, work);
        }
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
    static constexpr int64_t STRETCH_NS = 2'000'000;  // less than a turn of the system's, which is 2.8 to 4 ms on few cores

    void expect_items(int64_t count) { expected_items_ += (uint32_t)count; }

    template <class Work>
    void take_from(Dispenser& items, int64_t first, int64_t count, int64_t run, Work&& work) {
        for (int64_t at; (at = items.take(loop_, count, run)) >= 0;) {
            const int64_t end = at + run < count ? at + run : count;
            for (int64_t item = at; item < end; item++) work(first + item);
            // In one order with a sleeper's own pair: either it sees this or is seen when this thread has waited.
            state_.done.fetch_add((uint32_t)(end - at), std::memory_order_seq_cst);
            if (at % 8 == 0 || &items == &state_.shared) give_way();
        }
    }

    // A count may have gone round, and others may be further on.
    bool is_done() const { return is_done(state_.done.load(std::memory_order_seq_cst)); }

    bool is_done(uint32_t items) const { return (int32_t)(items - expected_items_) >= 0; }

    void wait() {
        while (!is_done() && expected_.first < expected_.end) fetch_expected();
        for (const int64_t end = now() + SPIN_NS; !is_done() && now() < end;)
            for (int spins = 0; !is_done() && spins < SPINS_PER_LOOK; spins++) pause();
        if (is_done()) return;
        state_.sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (uint32_t items; !is_done(items = state_.done.load(std::memory_order_seq_cst));) sleep_while(items);
        state_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

    // Lets other programs have this core now, when no item is held, lest the system take it while one is.
    void give_way() {
        if (now() - gave_way_ < STRETCH_NS) return;
        sched_yield();
        gave_way_ = now();
    }

#if defined(__linux__)
    void sleep_while(uint32_t items) {
        syscall(SYS_futex, &state_.done, FUTEX_WAIT_PRIVATE, items, nullptr, nullptr, 0);
    }

    void wake_sleepers() { syscall(SYS_futex, &state_.done, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(uint32_t) { sched_yield(); }

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
    int64_t loop_ = 0;  // how many syncs there were
    uint32_t expected_items_ = 0;  // done when all loops so far are
    int64_t gave_way_ = now();
};
