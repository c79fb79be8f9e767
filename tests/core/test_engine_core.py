"""The engine core by itself: sizing the cache, aborts in mid step, utilities that wait."""

from collections.abc import Sequence

import pytest
from bridge import FAKE_EXECUTOR, fake_config, request, tokens_of
from fake_executor import FakeExecutor

from corespan.core.engine_core import Abort, DuplicateRequestError, EngineCore
from corespan.core.kv_cache.groups import FullAttention, KVCacheConfig, LayerKind, SlidingWindow
from corespan.core.kv_sizing import num_kv_blocks, with_kv_blocks
from corespan.protocol.config import VllmConfig
from corespan.protocol.outputs import FinishReason


class Recorder:
    """Takes what the core emits outside of steps."""

    def __init__(self):
        self.outputs = []

    def __call__(self, client_index, outputs):
        self.outputs += [(client_index, output) for output in outputs.outputs]


@pytest.fixture
def emitted():
    return Recorder()


@pytest.fixture
def core(emitted):
    core = EngineCore(fake_config(), FAKE_EXECUTOR, True, emitted)
    yield core
    core.shutdown()


def run(core):
    """Steps until nothing is left; the tokens by request."""
    tokens = {}
    while core.has_work():
        for outputs in core.step()[0].values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_an_idle_core_has_no_work(core):
    assert not core.has_work()
    assert core.step() == ({}, False)


def test_an_abort_that_comes_while_the_model_runs_takes_effect_before_its_output(core, monkeypatch):
    execute_model = FakeExecutor.execute_model

    def abort_meanwhile(executor, scheduler_output):
        core.abort_queue.put(Abort(0, ["gone"]))
        return execute_model(executor, scheduler_output)

    monkeypatch.setattr(FakeExecutor, "execute_model", abort_meanwhile)
    kept = request("kept")
    core.add_request(kept)
    core.add_request(request("gone"))
    assert run(core) == {"kept": tokens_of(kept)}


def test_a_duplicate_id_is_refused_at_the_call(core, emitted):
    first = request("same")
    core.add_request(first)
    with pytest.raises(DuplicateRequestError, match="'same'"):
        core.add_request(request("same", seed=1))
    assert run(core) == {"same": tokens_of(first)}
    assert emitted.outputs == []


def test_requests_end_with_the_client_they_came_from(core):
    for client_index in (0, 1):
        new = request(f"r{client_index}")
        new.client_index = client_index
        core.add_request(new)
    core.abort_client_requests(0)
    assert set(run(core)) == {"r1"}


def test_aborting_everything_tells_each_client_about_its_own(core, emitted):
    for client_index in (0, 1):
        new = request(f"r{client_index}")
        new.client_index = client_index
        core.add_request(new)
    core.abort_all_requests()
    assert [(index, out.request_id, out.finish_reason) for index, out in emitted.outputs] == [
        (0, "r0", FinishReason.ABORT),
        (1, "r1", FinishReason.ABORT),
    ]


def test_a_request_is_continued_behind_the_tokens_it_brings_along(core):
    whole = request("moved", max_tokens=12)
    tokens = tokens_of(whole)
    whole.output_token_ids = tokens[:5]
    core.add_request(whole)
    assert run(core) == {"moved": tokens[5:]}


def test_a_pause_that_waits_is_done_when_what_runs_has_finished(core):
    core.add_request(request("running", max_tokens=10))
    core.step()
    paused = core.pause_scheduler("wait")
    assert not paused.done()
    run(core)
    core.run_idle_actions()
    assert paused.result(0) is None


def test_resuming_calls_off_a_pause_that_has_not_come_about(core):
    core.add_request(request("running", max_tokens=10))
    core.step()
    paused = core.pause_scheduler("wait")
    core.resume_scheduler()
    with pytest.raises(RuntimeError, match="resumed before"):
        paused.result(0)


def test_a_failed_assembly_shuts_the_executor_down(monkeypatch, emitted):
    shut_down = []
    monkeypatch.setattr(FakeExecutor, "shutdown", lambda executor: shut_down.append(executor))
    with pytest.raises(ValueError, match="largest max_model_len"):
        EngineCore(fake_config(num_gpu_blocks_override=2), FAKE_EXECUTOR, True, emitted)
    assert len(shut_down) == 1


@pytest.mark.parametrize("path", ["no_colon", "fake_executor:Missing", "missing_module:Executor"])
def test_an_executor_class_that_is_not_there_is_an_error(path, emitted):
    with pytest.raises(ValueError, match=f"^executor_class '{path}'"):
        EngineCore(fake_config(), path, True, emitted)


BLOCK_BYTES = 1 << 20


def blocks_of(config: VllmConfig, available_bytes: int = 0, kinds: Sequence[LayerKind] = (FullAttention(),)) -> int:
    return num_kv_blocks(config, KVCacheConfig.of(config, kinds), BLOCK_BYTES, available_bytes)


def test_the_cache_takes_what_is_free_up_to_what_the_batch_can_use():
    config = fake_config(max_model_len=160, max_num_seqs=4)
    assert blocks_of(config, 20 * BLOCK_BYTES + 5) == 19
    assert blocks_of(config, 1000 * BLOCK_BYTES) == 40


def test_an_explicit_cache_size_is_taken_as_it_is(monkeypatch):
    config = fake_config(max_model_len=160, max_num_seqs=4)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert blocks_of(config) == 511
    assert blocks_of(fake_config(num_gpu_blocks_override=77)) == 77


@pytest.mark.parametrize(("num_blocks", "fits"), [(10, True), (9, False), (1, False), (0, False)])
def test_one_request_of_the_longest_must_fit(num_blocks, fits):
    config = fake_config(max_model_len=160, num_gpu_blocks_override=num_blocks)
    if fits:
        assert blocks_of(config) == num_blocks
    else:
        with pytest.raises(ValueError, match=f"fits is {num_blocks * 16}\\b"):
            blocks_of(config)


def test_a_window_group_needs_a_window_and_a_step_of_the_longest_request():
    config = fake_config(max_model_len=1600, max_num_seqs=4)
    kinds = (FullAttention(), SlidingWindow(33))  # 100 blocks, and those of 32 + 256 tokens and one more
    assert blocks_of(config, 1000 * BLOCK_BYTES, kinds) == 4 * 119
    with pytest.raises(ValueError, match=r"needs 119 KV blocks .* fits is 1584\b"):
        blocks_of(config, 119 * BLOCK_BYTES, kinds)  # one is the null block
    assert with_kv_blocks(config, KVCacheConfig.of(config, kinds), 118).model_config.max_model_len == 1584
