"""A server for the page's check: answers that are written down, from a model that is otherwise the tiny one."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from clients import SMALL_ENGINE  # noqa: E402
from http_server import ServerThread  # noqa: E402
from tiny_llama import build_tiny_llama  # noqa: E402

from corespan import AsyncEngineArgs, AsyncLLM  # noqa: E402
from corespan.engine.outputs.request_output import CompletionOutput, RequestOutput  # noqa: E402
from corespan.server.models import ChatSettings, ServedModel, SingleModel  # noqa: E402
from corespan.server.serve_options import ServeOptions  # noqa: E402

KEY = "a-key-of-the-check"
MARKDOWN = """<think>The reader wants a short answer with some code.</think>## Sums
A **sum** of `n` numbers, *in order*:

1. read them
2. add them
   - in float64

```python
def total(numbers):
    return sum(numbers)  # <b>not bold</b>
```

| n | seconds |
|---|---|
| 10 | 0.1 |

> See [the guide](https://example.org/guide).
"""
HOSTILE = """<img src=x onerror="window.broken=1"><script>window.broken=1</script>
[click](javascript:window.broken=1) [data](data:text/html,x) ![pixel](https://example.org/pixel.png)
<svg onload="window.broken=1"></svg> **bold <i>x</i>**"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SCRIPTS = {
    "markdown": MARKDOWN,
    "hostile": HOSTILE,
    "call": CALL,
    "long": "\n\n".join(f"Paragraph {number}: " + "word " * 60 for number in range(150)),
    "endless": "tick " * 20_000,
}
PIECE_SECONDS = 0.01


class ScriptedLLM:
    """Stands in for AsyncLLM: the last word of a prompt names the answer, other prompts go to the real engine."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.prompts: list[str] = []
        self.num_running = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, params: Any, request_id: str, **settings: Any) -> AsyncGenerator[Any, None]:
        text = self._engine.get_tokenizer().decode(prompt["prompt_token_ids"])
        self.prompts.append(text)
        named = [(text.rfind(f"say {name}"), name) for name in SCRIPTS]
        at, name = max(named)
        if at < 0:
            async for output in self._engine.generate(prompt, params, request_id, **settings):
                yield output
            return
        answer = SCRIPTS[name]
        size = 60 if name == "long" else 6
        pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
        self.num_running += 1
        try:
            for number, piece in enumerate(pieces):
                last = number == len(pieces) - 1
                output = CompletionOutput(0, piece, [5], None, None, "stop" if last else None, None)
                yield RequestOutput(request_id, text, prompt["prompt_token_ids"], None, [output], last)
                await asyncio.sleep(PIECE_SECONDS)  # the pace of a model
        finally:
            self.num_running -= 1


class PageServer:
    def __init__(self, folder: Path) -> None:
        options = ServeOptions(api_key=[KEY], disable_uvicorn_access_log=True)
        self.thread = ServerThread(options)
        self.url = self.thread.url
        model = str(build_tiny_llama(folder))
        self.engine = self.thread.loop.run(self._build(model))
        self.llm = ScriptedLLM(self.engine)
        chat = ChatSettings(enable_auto_tool_choice=True, tool_parser="hermes", reasoning_parser="qwen3")
        served = ServedModel(self.llm, ["tiny", "tiny-by-another-name"], chat)  # type: ignore[arg-type]
        self.thread.serve(SingleModel(served))

    async def _build(self, model: str) -> AsyncLLM:
        arguments = AsyncEngineArgs(model=model, **SMALL_ENGINE)
        return await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)

    def close(self) -> None:
        self.thread.close()
