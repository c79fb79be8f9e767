"""`corespan serve` over the executor without a model, for tests of the process: its signals, its exit status.

Arguments: the options of `ServeOptions` and the fake engine's as two JSON objects, and a FIFO whose writer ends the
loading.
"""

import json
import logging
import sys

from bridge import FAKE_EXECUTOR, fake_config

from corespan import AsyncEngineArgs, AsyncLLM
from corespan.server import serve
from corespan.server.models import ServedModel
from corespan.server.serve_options import ServeOptions


def load(options: ServeOptions, engine_args: AsyncEngineArgs) -> ServedModel:
    with open(sys.argv[3]) as fifo:
        fifo.read()
    config = fake_config(**json.loads(sys.argv[2]))
    engine = AsyncLLM(config, FAKE_EXECUTOR, log_stats=True, client_count=options.api_server_count)
    return ServedModel(engine, ["fake"])


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    serve._load = load
    sys.exit(serve.serve(ServeOptions(**json.loads(sys.argv[1])), [AsyncEngineArgs(model="fake")]))
