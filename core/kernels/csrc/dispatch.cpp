// The library's face for Python: which instruction sets this CPU has, and running a list of operations with one of them.

#include <cstdint>

#include "args.h"

#define DECLARE(isa) \
    namespace isa { \
    int64_t run(const Op* ops, int64_t count, int threads); \
    }
DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512vnni)
DECLARE(avx512bf16)
#endif

// Levels: 0 portable, 1 avx2, 2 avx512, 3 avx512vnni, 4 avx512bf16. Each includes those below.
extern "C" __attribute__((visibility("default"))) int corespan_isa_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    auto has_avx512 = [] {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    };
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    if (!has_avx512()) return 1;
    if (!__builtin_cpu_supports("avx512vnni")) return 2;
    return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
#else
    return 0;
#endif
}

// The size in bytes of the arguments of an operation of this kind, 0 for a kind that does not exist: Python compares it
// with its own idea of the struct before it uses the library.
extern "C" __attribute__((visibility("default"))) int64_t corespan_args_size(int64_t kind) {
    switch (kind) {
        case EMBED: return sizeof(EmbedArgs);
        case EMBED_BLOCKS: return sizeof(EmbedBlocksArgs);
        case RMS_NORM: return sizeof(RmsNormArgs);
        case GEMM: return sizeof(GemmArgs);
        case PACK: return sizeof(PackArgs);
        case ROTARY: return sizeof(RotaryArgs);
        case WRITE_KV: return sizeof(WriteKvArgs);
        case ATTENTION: return sizeof(AttentionArgs);
        case DRAW: return sizeof(DrawArgs);
        case QUANTIZE: return sizeof(QuantizeArgs);
        case LOGPROBS: return sizeof(LogprobsArgs);
        case PENALTIES: return sizeof(PenaltiesArgs);
        case ROW_BLOCKS: return sizeof(RowBlocksArgs);
        case PROLOGUE: return sizeof(PrologueArgs);
        case PLACE: return sizeof(PlaceArgs);
        case LORA: return sizeof(LoraArgs);
        default: return 0;
    }
}

// Of the sources that this was built from: Python compares it with those beside it.
extern "C" __attribute__((visibility("default"))) int64_t corespan_source_hash() { return CORESPAN_SOURCE_HASH; }

// Runs the operations; returns how often the threads waited for each other.
extern "C" __attribute__((visibility("default"))) int64_t corespan_run(int level, const Op* ops, int64_t count, int threads) {
    switch (level) {
#if defined(__x86_64__)
        case 4: return avx512bf16::run(ops, count, threads);
        case 3: return avx512vnni::run(ops, count, threads);
        case 2: return avx512::run(ops, count, threads);
        case 1: return avx2::run(ops, count, threads);
#endif
        default: return portable::run(ops, count, threads);
    }
}
