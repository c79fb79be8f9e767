"""Who may use an engine: any thread, in its turn; no fork; no second event loop while the first runs."""

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from async_llm import PROMPT, collect
from clients import SMALL_ENGINE, multiprocessing_flag
from deadlines import DEADLINE
from prompts import PROMPTS, greedy

from corespan import LLM, AsyncLLM, SamplingParams


@pytest.fixture(scope="module", params=["inproc", "sync_mp"])
def llm(request: pytest.FixtureRequest, tiny_llama_dir: str) -> Iterator[LLM]:
    with multiprocessing_flag(request.param == "sync_mp"):
        llm = LLM(tiny_llama_dir, **SMALL_ENGINE)
    yield llm
    llm.shutdown()


# Threads


def test_threads_that_share_an_llm_take_turns_and_each_gets_its_answers(llm: LLM) -> None:
    def generate(number: int) -> list[int]:
        prompt = PROMPTS[number % len(PROMPTS)]
        outputs = llm.generate([prompt, prompt], greedy(6), use_tqdm=False)
        assert [output.prompt for output in outputs] == [prompt, prompt]
        return list(outputs[1].outputs[0].token_ids)

    expected = [generate(number) for number in range(24)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(generate, range(24), timeout=DEADLINE)) == expected
    assert list(llm.engine_core.get_request_counts()) == [0, 0]


def test_requests_are_added_and_aborted_in_one_thread_while_another_steps(llm: LLM) -> None:
    engine = llm.llm_engine
    (alone,) = llm.generate(PROMPT, greedy(6), use_tqdm=False)
    engine.add_request("long", PROMPT, greedy(500))
    answers: dict[str, list[int]] = {}
    all_are_there = threading.Event()

    def step_to_the_end() -> None:
        while engine.has_unfinished_requests() or not all_are_there.is_set():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)

    stepping = threading.Thread(target=step_to_the_end)
    stepping.start()
    for number in range(10):
        engine.add_request(f"short-{number}", PROMPT, greedy(6))
        engine.add_request(f"dropped-{number}", PROMPT, greedy(500))
        engine.abort_request(f"dropped-{number}")
    engine.abort_request("long")
    all_are_there.set()
    stepping.join(DEADLINE)

    assert not stepping.is_alive()
    assert {f"short-{number}": list(alone.outputs[0].token_ids) for number in range(10)}.items() <= answers.items()
    assert {len(ids) for name, ids in answers.items() if name.startswith("dropped")} <= {500}  # the abort came too late


def test_controls_from_another_thread_do_not_disturb_a_generation(llm: LLM) -> None:
    (alone,) = llm.generate(PROMPT, greedy(60), use_tqdm=False)
    with ThreadPoolExecutor(1) as pool:
        generation = pool.submit(llm.generate, PROMPT, greedy(60), use_tqdm=False)
        while True:
            assert (llm.is_sleeping(), llm.is_paused()) == (False, False)
            llm.reset_prefix_cache()
            if generation.done():
                break
        (output,) = generation.result()

    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_step_of_a_paused_engine_returns_so_that_another_thread_can_resume_it(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("frozen", PROMPT, greedy(6))
    engine.pause_generation("keep")

    assert engine.step() == []

    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.resume_generation).result(DEADLINE)
    while engine.has_unfinished_requests():
        engine.step()


def test_a_shutdown_in_another_thread_does_not_wait_for_its_turn(make_llm: Callable[..., LLM]) -> None:
    for multiprocess in (False, True):
        llm = make_llm(multiprocess=multiprocess)
        with llm.turns, ThreadPoolExecutor(1) as pool:
            pool.submit(llm.shutdown).result(DEADLINE)


# Event loops


def test_no_call_from_a_second_event_loop_touches_what_the_first_one_runs(engine: AsyncLLM) -> None:
    def from_another_loop() -> None:
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: engine.abort("first"),
            lambda: collect(engine, "second", greedy()),
            lambda: engine.pause_generation(),
            lambda: engine.sleep(),
            lambda: engine.resume_generation(),
            lambda: engine.wake_up(),
            lambda: engine.is_sleeping(),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(call())

    async def first_loop() -> int:
        stream = engine.generate(PROMPT, greedy(100), "first")
        await anext(stream)
        await asyncio.to_thread(from_another_loop)
        outputs = [output async for output in stream]
        return len(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(first_loop()) == 100


# Forks


def public_members(engine: Any) -> list[str]:
    """All that belongs to an instance: methods, coroutines, properties."""
    statics = (classmethod, staticmethod)
    names = [name for name in dir(type(engine)) if not name.startswith("_")]
    return [name for name in names if not isinstance(inspect.getattr_static(type(engine), name), statics)]


def use(engine: Any, name: str) -> None:
    """Reads a property, calls a method, awaits a coroutine, asks a generator for its first."""
    member = getattr(engine, name)
    if name == "generate" and isinstance(engine, AsyncLLM):
        asyncio.run(anext(member(PROMPT, SamplingParams(), "forked")))
    result = member()
    if inspect.iscoroutine(result):
        asyncio.run(result)


def in_a_fork(action: Callable[[], None]) -> str:
    """Runs `action` in a fork of this process, which then ends at once; the last line of what it raised, or ""."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            try:
                action()
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


def check_every_member_names_the_owner(engine: Any) -> None:
    for name in public_members(engine):
        answer = in_a_fork(lambda name=name: use(engine, name))  # type: ignore[misc]
        assert answer.startswith("RuntimeError: this "), f"{name}: {answer}"
        assert f"belongs to process {os.getpid()}" in answer, name


def test_every_method_of_a_sync_engine_names_its_owner_in_a_fork(llm: LLM) -> None:
    check_every_member_names_the_owner(llm)
    check_every_member_names_the_owner(llm.llm_engine)

    assert len(llm.generate(PROMPT, greedy(4), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_every_method_of_async_llm_names_its_owner_in_a_fork(engine: AsyncLLM) -> None:
    check_every_member_names_the_owner(engine)

    assert len(asyncio.run(collect(engine, "after", greedy(4)))[-1].outputs[0].token_ids) == 4


def test_a_fork_that_leaves_a_with_block_raises_what_it_raised(llm: LLM) -> None:
    def leave() -> None:
        with suppress(ZeroDivisionError):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError as error:
                llm.__exit__(type(error), error, None)
                raise

    assert in_a_fork(leave) == ""
    assert len(llm.generate(PROMPT, greedy(4), use_tqdm=False)) == 1
