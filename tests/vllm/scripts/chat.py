"""One conversation, then a batch of them, under a template of one's own."""

import sys

from vllm.entrypoints.chat_utils import ChatCompletionMessageParam

from vllm import LLM, SamplingParams

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


def main():
    llm = LLM(model=sys.argv[1], max_model_len=512, num_gpu_blocks_override=64)
    sampling_params = SamplingParams(temperature=0.5, max_tokens=8)
    conversation: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=TEMPLATE))
    conversations = [conversation for _ in range(3)]
    print_outputs(llm.chat(messages=conversations, sampling_params=sampling_params, chat_template=TEMPLATE))


if __name__ == "__main__":
    main()
