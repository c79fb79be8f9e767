// The arguments of every operation, as Python fills them in, and the numbers that both sides know: core/kernels/header.py
// reads this file, so constants, enums and structs are written one entry to a line or `a = 0, b = 1` in a row.
//
// All fields are 8 bytes wide. `rows` and `step` are pointers, so that a recorded list can be replayed with other counts.
#pragma once

#include <cstdint>

struct bf16 {
    uint16_t bits;
};

constexpr int PANEL = 32;          // output columns of a packed weight that lie together
constexpr int GROUP = 32;          // values to a block of GGUF's formats
constexpr int BLOCK = 16;          // tokens of the KV cache that lie together
constexpr int MAX_HEAD_DIM = 512;  // in attention
constexpr int MAX_LORA_RANK = 512;
constexpr int MAX_ROWS = 48;       // query rows that share one reading of a partition: tokens x heads of one kv head

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

// One step's batch, shared by all operations that attend.
struct Step {
    int64_t num_reqs;
    const int32_t* query_start_loc;  // [num_reqs + 1]
    const int32_t* seq_lens;         // [num_reqs], tokens including this step's
    const int32_t* block_table;      // [any number, block_table_stride]
    const int64_t* table_rows;       // [num_reqs], each request's row of it
    int64_t block_table_stride;
    int64_t block_size;           // tokens, a multiple of 16
    const int64_t* positions;     // [num_tokens]
    const int64_t* slot_mapping;  // [num_tokens], block * block_size + offset; negative: not written
};

struct EmbedArgs {
    const int64_t* rows;
    const int64_t* ids;  // [rows]
    const void* table;   // [vocab, size]
    void* out;           // [rows, size]
    int64_t size;
    int64_t dtype;
};

// Rows of a packed weight in GGUF's blocks, each value rounded to the dtype, then times `scale` and rounded again.
struct EmbedBlocksArgs {
    const int64_t* rows;
    const int64_t* ids;  // [rows]
    int64_t format;
    const void* table;  // packed, [vocab, size]
    void* out;          // [rows, size]
    int64_t size;
    double scale;
    int64_t dtype;
};

// sum = residual + x (x is normalised before where x_weight is given; without x the sum is the residual), then out = sum
// normalised (merely copied where weight is null). With `row_index`, and no x, only those rows of the residual are taken,
// into consecutive rows of out. What is normalised is rounded to its dtype before a weight of that dtype multiplies it, and
// after a wide one does, which is FLOAT32.
struct RmsNormArgs {
    const int64_t* rows;
    const void* x;
    const void* x_weight;  // [size] or null
    void* residual;
    void* sum;  // null: the residual itself takes it
    const void* weight;  // [size] or null
    void* out;
    const int64_t* row_index;
    int64_t size;
    double eps;
    int64_t dtype;
    int64_t wide_weights;  // 0: of `dtype`
};

enum Epilogue : int64_t { STORE = 0, STORE_FLOAT32 = 1, SILU_MUL = 2, GELU_MUL = 3 };
enum Format : int64_t {
    BF16 = 0,
    INT8 = 1,
    Q8_0 = 2,
    Q4_0 = 3,
    Q4_1 = 4,
    Q5_0 = 5,
    Q5_1 = 6,
    Q4_K = 7,
    Q5_K = 8,
    Q6_K = 9,
};

// One product with packed weights. SILU_MUL and GELU_MUL (GELU by tanh) of gate and up: each 32-column panel holds 16 gate
// columns, then the 16 up columns that belong to them; out is [rows, n / 2].
struct GemmArgs {
    const int64_t* rows;
    const void* x;  // [rows, x_stride], bf16; for all other formats int8 as quantised by QuantizeArgs
    int64_t x_stride;
    int64_t x_block;        // values of a row of x to one scale: 32, for Q6_K 16, for INT8 any divisor of k
    const float* x_scales;  // [rows, k / x_block]
    const int32_t* x_sums;  // likewise
    const float* x_totals;  // [rows], of scale times sum
    int64_t format;
    const void* weight;          // packed
    const float* weight_scales;  // INT8: [n rounded up to 32]
    const float* bias;           // [n rounded up to 32] or null
    void* out;                   // [rows, out_stride]
    int64_t out_stride;
    int64_t n;
    int64_t k;
    int64_t epilogue;
};

// x to int8 with one scale to every `block` values of a row, and the sum of each block's int8 values.
struct QuantizeArgs {
    const int64_t* rows;
    const void* x;  // [rows, x_stride] bf16
    int64_t x_stride;
    void* out;      // [rows, k]
    float* scales;  // [rows, k / block]
    int32_t* sums;  // [rows, k / block]
    float* totals;  // [rows], of scale times sum
    int64_t k;
    int64_t block;
};

struct PackArgs {
    int64_t format;
    const void* weight;  // [n, k] row-major, of bf16, int8, or GGUF blocks
    void* out;
    int64_t n;
    int64_t k;
};

// Decides which processor's memory the pages of a packed weight lie in, before it is packed. Alone in its list: each thread
// has a part that no other does for it.
struct PlaceArgs {
    int64_t format;
    void* out;  // not written to before
    int64_t n;
    int64_t k;
};

// What a LoRA adapter adds to one matrix's product, as core/runtime/native_adapters.py packs it; a null: nothing.
struct LoraPart {
    const void* a;  // bf16 [rank / 16 rounded up][k / 2][16][2]
    const void* b;  // bf16 [rows / 16][rank][16]
    int64_t rank;
};

// One step's rows by adapter, shared by all operations that apply adapters.
struct LoraStep {
    int64_t groups;
    const int64_t* starts;         // [groups + 1], places in `rows`
    const int64_t* rows;           // all rows of the step, ascending within a group
    const LoraPart* const* parts;  // [groups], of all matrices of an adapter; null: the group has none
};

// The end of a product that adapters change: out = epilogue(base + what each row's adapter adds). Of the base's columns,
// `skip` are no part's; those of up to three parts follow. SILU_MUL and GELU_MUL: two parts, lying as in GemmArgs.
struct LoraArgs {
    const int64_t* rows;
    const LoraStep* step;
    const void* x;  // [rows, x_stride] bf16
    int64_t x_stride;
    int64_t k;
    const float* base;  // [rows, base_stride]
    int64_t base_stride;
    void* out;  // [rows, out_stride] bf16
    int64_t out_stride;
    int64_t n;           // columns of the base
    int64_t first_part;  // of an adapter's
    int64_t parts;
    int64_t skip;
    int64_t size0;
    int64_t size1;
    int64_t epilogue;  // as of the product; STORE_FLOAT32: not
};

// Rotates q and k in place of a merged qkv row and writes k and v to the cache; q alone where k_cache is null, k and v
// alone where num_heads is 0.
struct RotaryArgs {
    const int64_t* rows;
    const Step* step;
    void* qkv;  // [rows, stride]: heads of q, of k, of v
    int64_t stride;
    const float* cos_sin;  // [positions, rotary_dim]: cosines, then sines; null: no rotation
    const void* q_norm;    // [head_dim] or null, normalises before the rotation as RmsNormArgs does
    const void* k_norm;
    void* k_cache;  // [kv_heads, num_blocks, head_dim / p, 16, p], p values to a word
    void* v_cache;  // [kv_heads, num_blocks, 16 / p, head_dim, p]
    int64_t num_blocks;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t rotary_dim;
    double eps;
    int64_t dtype;
    int64_t wide_norms;  // 0: of `dtype`
};

struct WriteKvArgs {
    const int64_t* rows;
    const Step* step;
    const void* k;  // [rows, k_stride]
    const void* v;  // [rows, v_stride]
    int64_t k_stride;
    int64_t v_stride;
    void* k_cache;
    void* v_cache;
    int64_t num_blocks;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t dtype;
};

struct AttentionArgs {
    const Step* step;
    const void* q;  // [tokens, q_stride]
    int64_t q_stride;
    const void* k_cache;
    const void* v_cache;
    int64_t num_blocks;
    void* out;  // [tokens, out_stride]
    int64_t out_stride;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    double scale;
    double softcap;  // scores become softcap * tanh(score / softcap); 0: they do not
    int64_t window;  // 0: none
    int64_t bidirectional;  // a token sees what is behind it too, as far as the window goes
    int64_t dtype;
};

// A token for each row: the first of the largest where the temperature is 0, else drawn from softmax(logits / temperature)
// after min-p, top-k and top-p, as the first, in the order of ids, whose cumulative probability exceeds the uniform number.
struct DrawArgs {
    const int64_t* rows;
    const float* logits;  // [rows, stride]
    int64_t stride;
    int64_t n;
    const double* temperature;  // [rows]
    const double* min_p;        // [rows], 0: off
    const int64_t* top_k;       // [rows], 0: off
    const double* top_p;        // [rows], 1: off
    const double* uniforms;     // [rows], within 0..1
    int64_t* token_ids;         // [rows]
    float* largest;             // [rows], NaN where any logit is; a row without a finite largest is not drawn from
    float* processed;           // [rows, n] or null: the logits that were drawn from, -inf where not kept
    const uint32_t* const* allowed;  // null, or [rows], of null or [n / 32 rounded up]: a bit for each entry, 0: it is -inf
};

// Log-probabilities of ids, and the rank of the first id of each row: how many entries are not below its own.
struct LogprobsArgs {
    const int64_t* rows;
    const float* logits;  // [rows, stride]
    int64_t stride;
    int64_t n;
    int64_t width;         // ids to a row
    int64_t find_largest;  // 1: all ids but the first are set here, to the largest entries
    int64_t normalize;     // 0: logits are reported as they are
    int32_t* ids;          // [rows, width]
    float* values;         // [rows, width]
    int32_t* ranks;        // [rows]
};

// Penalises in place the entries that stand at a row's ids: a positive one is divided by the repetition penalty, another
// multiplied; then each that was generated loses frequency * count + presence.
struct PenaltiesArgs {
    const int64_t* rows;
    float* logits;  // [any number, stride]
    int64_t stride;
    const int64_t* lines;           // [rows], of the logits
    const int64_t* sizes;           // [rows]
    const int64_t* const* ids;      // [rows], of [size], distinct
    const float* const* generated;  // [rows], of [size]: how often; 0: in the prompt only
    const float* repetition;        // [rows]
    const float* frequency;
    const float* presence;
};

// The next `operations` operations work row by row, on the same number of rows each. Where there are many, a thread takes
// a block of rows through all of them, finding what one leaves in its own cache for the next.
struct RowBlocksArgs {
    const int64_t* rows;
    int64_t operations;
};

// The next `operations`, a norm, a quantisation or both, lead up to the product behind them, and nobody else reads what they
// leave. Where values are few, every thread computes them for itself, which is cheaper than waiting for each other.
struct PrologueArgs {
    const int64_t* rows;
    int64_t operations;
};

enum Kind : int64_t {
    EMBED = 0,
    RMS_NORM = 1,
    GEMM = 2,
    PACK = 3,
    ROTARY = 4,
    WRITE_KV = 5,
    ATTENTION = 6,
    DRAW = 7,
    QUANTIZE = 8,
    LOGPROBS = 9,
    ROW_BLOCKS = 10,
    PLACE = 11,
    PENALTIES = 12,
    PROLOGUE = 13,
    LORA = 14,
    EMBED_BLOCKS = 15,
};

struct Op {
    int64_t kind;
    const void* args;
};
