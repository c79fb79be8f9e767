"""Bans tokens by a logits processor of one's own. Usage: python examples/logits_processor.py [MODEL]"""

import sys
from typing import TYPE_CHECKING

from corespan import LLM, SamplingParams
from corespan.core.sampling.logits_processors import AdapterLogitsProcessor

if TYPE_CHECKING:
    import torch


class BanToken(AdapterLogitsProcessor):
    """Requests whose `extra_args` hold "banned" never get that token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams):
        banned = (params.extra_args or {}).get("banned")
        if banned is None:
            return None

        def ban(output_token_ids: list[int], logits: "torch.Tensor") -> "torch.Tensor":
            logits[banned] = float("-inf")
            return logits

        return ban


def main(model: str = "smollm2-135m") -> None:
    with LLM(model, max_model_len=512, logits_processors=[BanToken]) as llm:
        (free,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))
        banned = free.outputs[0].token_ids[0]
        params = SamplingParams(temperature=0, max_tokens=8, extra_args={"banned": banned})
        (held,) = llm.generate("Once upon a time", params)
        assert banned not in held.outputs[0].token_ids
        print(f"{free.outputs[0].text!r}, without {banned}: {held.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
