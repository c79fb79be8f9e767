// Everything an instruction set compiles: the kernels, and the loop that runs a list of operations with them.
//
// No include guard: each isa_*.cpp includes this once, after its target pragma and inside its own namespace. Standard
// headers are included before the pragma, so that no shared inline function is compiled for a set the CPU may lack.

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#include "simd.h"

#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "kv_write.h"
#include "lora.h"
#include "quant.h"
#include "quant_blocks.h"
#include "sampling.h"

#define BY_DTYPE(function, Args) \
    ((const Args*)op.args)->dtype == BFLOAT16 ? function<bf16>(*(const Args*)op.args, team) \
                                              : function<float>(*(const Args*)op.args, team)

// By the dtype of what is normalised, and of the weights that do it.
#define BY_DTYPES(function, Args, wide)                                                                \
    ((const Args*)op.args)->dtype == FLOAT32 ? function<float, float>(*(const Args*)op.args, team) \
    : ((const Args*)op.args)->wide           ? function<bf16, float>(*(const Args*)op.args, team)  \
                                             : function<bf16, bf16>(*(const Args*)op.args, team)

// `op` by the weight format of its arguments; BY_BLOCKS takes GGUF's alone.
#define BY_BLOCKS(function, Args)                                                     \
    switch (((const Args*)op.args)->format) {                                         \
        case Q8_0: return function<BlockWeight<8, false>>(*(const Args*)op.args, team); \
        case Q4_0: return function<BlockWeight<4, false>>(*(const Args*)op.args, team); \
        case Q4_1: return function<BlockWeight<4, true>>(*(const Args*)op.args, team);  \
        case Q5_0: return function<BlockWeight<5, false>>(*(const Args*)op.args, team); \
        case Q5_1: return function<BlockWeight<5, true>>(*(const Args*)op.args, team);  \
        case Q4_K: return function<SuperBlockWeight<4>>(*(const Args*)op.args, team);   \
        case Q5_K: return function<SuperBlockWeight<5>>(*(const Args*)op.args, team);   \
        default: return function<SuperBlockWeight<6>>(*(const Args*)op.args, team);     \
    }

#define BY_FORMAT(function, Args)                                            \
    switch (((const Args*)op.args)->format) {                                \
        case BF16: return function<Bf16Weight>(*(const Args*)op.args, team); \
        case INT8: return function<Int8Weight>(*(const Args*)op.args, team); \
        default: BY_BLOCKS(function, Args)                                   \
    }

static void execute(const Op& op, Team& team) {
    switch (op.kind) {
        case EMBED: return BY_DTYPE(embed, EmbedArgs);
        case EMBED_BLOCKS: BY_BLOCKS(embed_blocks, EmbedBlocksArgs)
        case RMS_NORM: return BY_DTYPES(rms_norm, RmsNormArgs, wide_weights);
        case GEMM: BY_FORMAT(gemm, GemmArgs)
        case PACK: BY_FORMAT(pack_weight, PackArgs)
        case PLACE: BY_FORMAT(place_weight, PlaceArgs)
        case ROTARY: return BY_DTYPES(rotary, RotaryArgs, wide_norms);
        case WRITE_KV: return BY_DTYPE(write_kv, WriteKvArgs);
        case ATTENTION: return attention(*(const AttentionArgs*)op.args, team);
        case DRAW: return draw(*(const DrawArgs*)op.args, team);
        case QUANTIZE: return quantize(*(const QuantizeArgs*)op.args, team);
        case LOGPROBS: return logprobs(*(const LogprobsArgs*)op.args, team);
        case LORA: return lora(*(const LoraArgs*)op.args, team);
        case PENALTIES: return penalties(*(const PenaltiesArgs*)op.args, team);
    }
}

constexpr int64_t BLOCK_ROWS = 168;  // and more, but for few rows; whole tiles of the products

static void run_row_blocks(const Op* ops, const RowBlocksArgs& a, Team& team) {
    const int64_t rows = *a.rows, blocks = larger<int64_t>(1, rows / (BLOCK_ROWS * team.size)) * team.size;
    auto begin = [&](int64_t block) { return block == blocks ? rows : block * rows / blocks / 14 * 14; };
    team.share(blocks, [&](int64_t block) {
        TeamState alone;
        Team self(alone, Rows{begin(block), begin(block + 1)});
        for (int64_t i = 0; i < a.operations; i++) execute(ops[i], self);
    });
}

constexpr int64_t PROLOGUE_VALUES = 4096;  // computing so many takes no longer than waiting for a thread that does

// Whether the operations before the product are so small that each thread does them for itself.
static bool is_apart(const Op* ops, const PrologueArgs& a) {
    const RmsNormArgs* norm = ops[0].kind == RMS_NORM ? (const RmsNormArgs*)ops[0].args : nullptr;
    const GemmArgs& product = *(const GemmArgs*)ops[a.operations].args;
    const bool overwrites = norm && norm->x && !norm->sum;  // what the others read
    return !overwrites && *a.rows * product.k <= PROLOGUE_VALUES;
}

// Leaves the results in this thread's own memory, but for the sum, which one thread puts where it belongs.
static void run_prologue(const Op* ops, const PrologueArgs& a, Team& alone, Team& team) {
    static thread_local Array<bf16> normed, sums;
    static thread_local Array<int8_t> values;
    static thread_local Array<float> scales, totals;
    static thread_local Array<int32_t> block_sums;
    const int64_t rows = *a.rows;
    GemmArgs product = *(const GemmArgs*)ops[a.operations].args;
    const void* x = nullptr;
    for (const Op* op = ops; op < ops + a.operations; op++) {
        if (op->kind == RMS_NORM) {
            RmsNormArgs norm = *(const RmsNormArgs*)op->args;
            bf16* const sum = (bf16*)norm.sum;
            if (norm.x) norm.sum = sums.at_least(rows * norm.size);
            product.x = x = norm.out = normed.at_least(rows * norm.size);
            execute({RMS_NORM, &norm}, alone);
            if (norm.x) team.once([&] { memcpy(sum, norm.sum, rows * norm.size * sizeof(bf16)); });
        } else {
            QuantizeArgs quantized = *(const QuantizeArgs*)op->args;
            if (x) quantized.x = x;
            product.x = quantized.out = values.at_least(rows * quantized.k);
            product.x_scales = quantized.scales = scales.at_least(rows * quantized.k / quantized.block);
            product.x_sums = quantized.sums = block_sums.at_least(rows * quantized.k / quantized.block);
            product.x_totals = quantized.totals = totals.at_least(rows);
            execute({QUANTIZE, &quantized}, alone);
        }
    }
    execute({GEMM, &product}, team);
}

static Bytes weights_of_product(const Op& op, const Team& team) { BY_FORMAT(first_weights, GemmArgs) }

int64_t run(const Op* ops, int64_t count, int threads) {
    static thread_local Room room;  // outlives the run: its memory is in place in the next
    int64_t num_syncs = 0;
    TeamState state;
    state.room = &room;
#pragma omp parallel num_threads(threads)
    {
        Team team(state, omp_get_thread_num(), omp_get_num_threads());
        TeamState of_one;
        int64_t product = -1;  // the next one
        for (int64_t i = 0; i < count; i++) {
            if (product < i) {
                for (product = i; product < count && ops[product].kind != GEMM;) product++;
                if (product < count) team.expect(weights_of_product(ops[product], team));
            }
            if (ops[i].kind == ROW_BLOCKS) {
                const RowBlocksArgs& a = *(const RowBlocksArgs*)ops[i].args;
                if (*a.rows < BLOCK_ROWS * 3 / 4 * team.size) continue;
                team.sync();
                run_row_blocks(ops + i + 1, a, team);
                i += a.operations;
            } else if (ops[i].kind == PROLOGUE) {
                const PrologueArgs& a = *(const PrologueArgs*)ops[i].args;
                if (!is_apart(ops + i + 1, a)) continue;
                Team alone(of_one, Rows{0, *a.rows});
                team.sync();
                run_prologue(ops + i + 1, a, alone, team);
                i += a.operations + 1;
            } else {
                team.sync();
                execute(ops[i], team);
            }
        }
        team.sync();  // waits more sparingly than the region's own end
        if (team.rank == 0) num_syncs = team.num_syncs();
    }
    return num_syncs;
}
