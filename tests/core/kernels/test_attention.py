"""The native attention backend against the torch one, which is its reference."""

import dataclasses

import pytest
import torch

from corespan.core.attention.interface import AttentionMetadata
from corespan.core.attention.native import NativeAttentionBackend
from corespan.core.attention.torch_backend import TorchAttentionBackend
from corespan.core.kernels import library
from corespan.core.kernels.memory import as_tensor
from corespan.core.models.spec import AttentionSpec

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make_metadata(
    queries: list[int], contexts: list[int], block_size: int, generator: torch.Generator
) -> AttentionMetadata:
    """queries[i] tokens of a request whose context, after them, is contexts[i] tokens; blocks scattered at random, and
    so are the requests' rows in a table with more rows than requests."""
    blocks = [-(-context // block_size) for context in contexts]
    ids = torch.randperm(sum(blocks), generator=generator, dtype=torch.int32) + 1
    table = torch.zeros(len(queries) + 2, max(blocks) + 3, dtype=torch.int32)
    rows = torch.randperm(len(queries) + 2, generator=generator)[: len(queries)]
    for row, row_ids in zip(rows.tolist(), ids.split(blocks), strict=True):
        table[row, : len(row_ids)] = row_ids
    positions = torch.cat([torch.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)])
    request = torch.arange(len(queries)).repeat_interleave(torch.tensor(queries))
    slots = table[rows[request], positions // block_size].long() * block_size + positions % block_size
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        block_table=table[:, : max(blocks)],
        table_rows=rows,
        slot_mapping=slots,
        positions=positions,
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        num_reqs=len(queries),
        num_tokens=sum(queries),
        num_decodes=sum(q == 1 for q in queries),
    )


class Case:
    """A batch whose earlier context is already in both backends' caches."""

    def __init__(self, heads: tuple[int, int, int], queries: list[int], contexts: list[int], dtype: torch.dtype,
                 window: int | None = None, block_size: int = 16, softcap: float | None = None,
                 bidirectional: bool = False) -> None:  # fmt: skip
        self.generator = torch.Generator().manual_seed(0)
        self.heads, self.dtype = heads, dtype
        spec = AttentionSpec(*heads, scale=heads[2] ** -0.5, rotary=None, window=window, softcap=softcap)
        spec = dataclasses.replace(spec, bidirectional=bidirectional)
        self.backends = [
            backend(spec, block_size, dtype) for backend in (NativeAttentionBackend, TorchAttentionBackend)
        ]
        everything = make_metadata(contexts, contexts, block_size, self.generator)
        num_blocks = int(everything.block_table.max()) + 1
        self.caches = [backend.allocate(num_blocks) for backend in self.backends]
        everything.num_decodes = 0
        self.full = everything
        self.step = self._tail(everything, queries, contexts)
        self.q, self.k, self.v = (self.random(self.full.num_tokens, n) for n in (heads[0], heads[1], heads[1]))

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.heads[2], generator=self.generator).to(self.dtype)

    def _tail(self, full: AttentionMetadata, queries: list[int], contexts: list[int]) -> AttentionMetadata:
        ends = torch.tensor(contexts).cumsum(0).tolist()
        self.rows = torch.cat([torch.arange(end - q, end) for q, end in zip(queries, ends, strict=True)])
        return dataclasses.replace(
            full,
            query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
            slot_mapping=full.slot_mapping[self.rows],
            positions=full.positions[self.rows],
            max_query_len=max(queries),
            num_tokens=sum(queries),
            num_decodes=sum(q == 1 for q in queries),
        )

    def run(self) -> list[torch.Tensor]:
        """Prefills everything, then attends again from the step's rows; native first."""
        outputs = []
        for backend, cache in zip(self.backends, self.caches, strict=True):
            backend.forward(self.q, self.k, self.v, cache, self.full)
            rows = self.rows
            outputs.append(backend.forward(self.q[rows], self.k[rows], self.v[rows], cache, self.step))
        return outputs


CASES = {
    "decodes": ((6, 2, 64), [1, 1, 1], [1, 17, 40]),
    "long decode on idle threads": ((3, 1, 64), [1], [777]),
    "chunk after context": ((4, 4, 32), [7], [300]),
    "whole prompts": ((9, 3, 64), [33, 520], [33, 520]),
    "mixed batch": ((6, 2, 80), [1, 1, 5, 64], [513, 16, 5, 530]),
    "one kv head, odd group": ((7, 1, 128), [1, 9], [31, 513]),
    "rows beyond one tile": ((48, 1, 16), [1, 3], [20, 19]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_native_attention_equals_torch(name: str, dtype: torch.dtype, isa: str) -> None:
    native, reference = Case(*CASES[name], dtype).run()
    torch.testing.assert_close(native, reference, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 20, 600])
def test_tokens_see_those_behind_them_where_they_are_to(window: int | None, dtype: torch.dtype, isa: str) -> None:
    lengths = [1, 5, 530, 1100]
    case = Case((6, 2, 64), lengths, lengths, dtype, window, bidirectional=True)
    native, reference = case.run()
    torch.testing.assert_close(native, reference, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    causal, _ = Case((6, 2, 64), lengths, lengths, dtype, window).run()
    assert torch.equal(native[:1], causal[:1]) and torch.equal(native, causal) == (window == 1)
    backend, cache = case.backends[0], case.caches[0]
    alone = case._tail(case.full, [0, 0, 530, 0], lengths)
    rows = case.rows
    request = dataclasses.replace(
        alone,
        query_start_loc=torch.tensor([0, 530]).int(),
        seq_lens=case.full.seq_lens[2:3],
        table_rows=case.full.table_rows[2:3],
        num_reqs=1,
        num_decodes=0,
    )
    output = backend.forward(case.q[rows], case.k[rows], case.v[rows], cache, request)
    assert torch.equal(output, native[6:536]), "alone"


@pytest.mark.parametrize("window", [1, 16, 100, 512, 550])
def test_sliding_window_hides_what_lies_further_back(window: int, isa: str) -> None:
    native, reference = Case((4, 2, 32), [1, 1, 50], [700, 90, 600], torch.float32, window).run()
    torch.testing.assert_close(native, reference, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scores_are_capped_before_a_window_hides_some(dtype: torch.dtype, isa: str) -> None:
    capped, plain = (Case((6, 2, 64), [1, 1, 40], [17, 600, 90], dtype, window=50, softcap=cap) for cap in (0.5, None))
    native, reference = capped.run()
    torch.testing.assert_close(native, reference, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (native - plain.run()[0]).abs().max() > 0.1


def test_blocks_of_32_tokens_are_pairs_of_kernel_blocks(isa: str) -> None:
    native, reference = Case((4, 2, 32), [1, 20], [100, 45], torch.bfloat16, block_size=32).run()
    torch.testing.assert_close(native, reference, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, threads: int) -> None:
    case = Case((3, 1, 64), [1, 40], [1500, 900], dtype)
    torch.set_num_threads(1)
    alone = case.run()[0]
    torch.set_num_threads(threads)
    assert torch.equal(case.run()[0], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_token_attends_bitwise_alike_as_decode_and_within_a_prompt(dtype: torch.dtype, isa: str) -> None:
    case = Case((6, 2, 64), [1], [601], dtype)
    backend, cache = case.backends[0], case.caches[0]
    whole = backend.forward(case.q, case.k, case.v, cache, case.full)
    rows = case.rows
    assert torch.equal(backend.forward(case.q[rows], case.k[rows], case.v[rows], cache, case.step), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_lies_in_slots_not_yet_written_does_not_matter(dtype: torch.dtype, isa: str) -> None:
    case = Case((4, 2, 32), [1, 1, 3], [1, 35, 19], dtype)
    clean = case.run()[0]
    as_tensor(case.caches[0]).fill_(float("nan"))
    assert torch.equal(case.run()[0], clean)


def test_strided_views_of_a_merged_projection_are_taken_as_they_are(isa: str) -> None:
    case = Case((4, 2, 32), [1, 6], [20, 30], torch.bfloat16)
    backend, cache = case.backends[0], case.caches[0]
    expected = backend.forward(case.q, case.k, case.v, cache, case.full)
    q, k, v = torch.cat((case.q, case.k, case.v), dim=1).split((4, 2, 2), dim=1)
    as_tensor(cache).zero_()
    assert torch.equal(backend.forward(q, k, v, cache, case.full), expected)


def test_a_long_context_is_shared_out_by_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence of 43 partitions, 8 kv heads of 128: threads with less than four heads each share partitions, wait
    once more, and merge; and no bit depends on their number."""
    context = 43 * 512
    generator = torch.Generator().manual_seed(0)
    step = make_metadata([1], [context], 16, generator)
    spec = AttentionSpec(8, 8, 128, scale=128**-0.5, rotary=None, window=None)
    backend = NativeAttentionBackend(spec, 16, torch.bfloat16)
    cache = backend.allocate(context // 16 + 1)
    values = torch.randn(1 << 18, generator=generator).bfloat16()
    for part in as_tensor(cache).view(-1).split(1 << 18):
        part.copy_(values[: len(part)])
    q, k, v = (torch.randn(1, 8, 128, generator=generator).bfloat16() for _ in range(3))
    num_syncs: list[int] = []
    monkeypatch.setattr(library, "run", lambda *given: num_syncs.append(library.Recording(given).run()))
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 16):
        torch.set_num_threads(threads)
        results.append(backend.forward(q, k, v, cache, step))
    torch.set_num_threads(before)

    write, attend, end = 1, 1, 1
    whole = write + attend + end
    assert num_syncs == [whole, whole, whole + 1, whole + 1]
    assert all(torch.equal(result, results[0]) for result in results)
