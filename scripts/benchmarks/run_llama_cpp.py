"""llama.cpp through llama-cpp-python, up to 64 sequences in one context, from the GGUF: run_llama_cpp.py FILE.gguf"""

import os
import sys

from workloads import Conversation, Request

conversation = Conversation()
import llama_cpp as lib  # noqa: E402  the conversation's clock counts the imports
import numpy as np  # noqa: E402

BATCH = 2048
Item = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted

lib.llama_backend_init()
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 64 * 512, BATCH, 512, 64
params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
params.kv_unified = True
context = lib.llama_init_from_model(model, params)
vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(BATCH, 0, 1)


def decode(items: list[Item]) -> dict[int, int]:
    """Runs one batch; returns the likeliest next token of each sequence whose logits were wanted."""
    batch.n_tokens = len(items)
    for i, (token, position, sequence, wanted) in enumerate(items):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    if lib.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    best = {}
    for i, (_, _, sequence, wanted) in enumerate(items):
        if wanted:
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), shape=(vocab_size,))
            best[sequence] = int(logits.argmax())
    return best


def run(requests: list[Request]) -> int:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    newest: dict[int, int] = {}
    chunk: list[Item] = []
    for sequence, (prompt, _) in enumerate(requests):
        if len(chunk) + len(prompt) > BATCH:
            newest.update(decode(chunk))
            chunk = []
        chunk += [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
    newest.update(decode(chunk))
    positions = [len(prompt) for prompt, _ in requests]
    left = [made - 1 for _, made in requests]
    generated = len(requests)
    while live := [sequence for sequence, count in enumerate(left) if count > 0]:
        newest.update(decode([(newest[sequence], positions[sequence], sequence, True) for sequence in live]))
        for sequence in live:
            positions[sequence] += 1
            left[sequence] -= 1
        generated += len(live)
    return generated


conversation.serve("llama.cpp", lib.__version__, run)
