"""The engine by hand: requests in, steps, outputs. Without a guard, and with imports that are never used."""

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.utils import FlexibleArgumentParser

from vllm import EngineArgs, LLMEngine, PoolingParams, RequestOutput, SamplingParams

parser = FlexibleArgumentParser(description="Steps an engine")
parser = EngineArgs.add_cli_args(parser)
args = parser.parse_args()
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
lora_request: LoRARequest | None = None if current_platform.is_cpu() else LoRARequest("sql", 1, "/sql")

prompts = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, max_tokens=7, ignore_eos=True)),
]
request_id = 0
while prompts or engine.has_unfinished_requests():
    if prompts:
        prompt, sampling_params = prompts.pop(0)
        engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
        request_id += 1
    request_outputs: list[RequestOutput] = engine.step()
    for request_output in request_outputs:
        if request_output.finished and not isinstance(sampling_params, PoolingParams):
            print(f"{request_output.request_id}: {len(request_output.outputs[0].token_ids)} tokens")
