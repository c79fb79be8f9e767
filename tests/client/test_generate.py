"""The same requests over each client give the same tokens."""

from bridge import request, tokens_of


def test_every_client_generates_the_expected_tokens(make_bridge):
    bridge = make_bridge()
    requests = [request(f"r{index}", range(1, 3 + index * 9), 3 + index, seed=index) for index in range(10)]
    tokens = bridge.generate(*requests)
    assert tokens == {wanted.request_id: tokens_of(wanted) for wanted in requests}
