"""What only the client in process has: the core as an attribute, and an end by garbage collection."""

import gc
import weakref

import pytest
from bridge import FAKE_EXECUTOR, fake_config, request

from corespan.client import make_client


def inproc_client():
    return make_client(False, fake_config(), FAKE_EXECUTOR, False)


def test_a_dropped_client_frees_its_executor():
    client = inproc_client()
    client.add_request(request("unfinished"))
    executor = weakref.ref(client.engine_core.executor)
    del client
    gc.collect()
    assert executor() is None


def test_a_duplicate_id_is_refused_at_the_caller():
    client = inproc_client()
    client.add_request(request("same"))
    with pytest.raises(ValueError, match="'same'"):
        client.add_request(request("same"))
    client.shutdown()


def test_a_step_with_nothing_to_do_gives_empty_outputs():
    client = inproc_client()
    assert client.get_output().outputs == []
    client.shutdown()
