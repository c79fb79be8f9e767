"""`import vllm` with this folder on the path: from then on `vllm` and all below it are `corespan.vllm`."""

from corespan import vllm
from corespan.vllm._modules import call_it_vllm

call_it_vllm(vllm.__name__)
