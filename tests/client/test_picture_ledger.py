"""What a connection leaves out of requests, and what it sends again."""

import numpy as np

from corespan.client.picture_ledger import PictureLedger
from corespan.protocol.multimodal import MultiModalFeatureSpec, PlaceholderRange
from corespan.protocol.outputs import EngineCoreOutput
from corespan.protocol.requests import EngineCoreRequest
from corespan.protocol.resolved_sampling import ResolvedSampling


def request(request_id: str, *identifiers: str) -> EngineCoreRequest:
    features = [
        MultiModalFeatureSpec("image", each, PlaceholderRange(at, 1), {"image_embeds": np.zeros((1, 25), np.float32)})
        for at, each in enumerate(identifiers)
    ]
    return EngineCoreRequest(request_id, [1] * len(identifiers), ResolvedSampling(), mm_features=features)


def sent(ledger: PictureLedger, given: EngineCoreRequest) -> list[bool]:
    """Of each picture: whether it is sent."""
    return [feature.data is not None for feature in ledger.trim(given).mm_features]


def test_a_picture_is_sent_once_while_there_is_room_for_it() -> None:
    ledger = PictureLedger(300)
    assert sent(ledger, request("1", "a", "b", "c")) == [True, True, True]
    assert sent(ledger, request("2", "a", "d")) == [False, True], "b makes room"
    assert sent(ledger, request("3", "b", "a", "d")) == [True, False, False]
    assert sent(PictureLedger(0), request("1", "a", "a")) == [True, True]


def test_what_the_core_lacks_is_sent_whole() -> None:
    ledger = PictureLedger(300)
    ledger.trim(request("1", "a"))
    second = request("2", "a")
    ledger.trim(second)
    assert ledger.answered(EngineCoreOutput("1", [], resend=True)) is None, "it was whole"
    assert ledger.answered(EngineCoreOutput("2", [], resend=True)) is second
    assert ledger.answered(EngineCoreOutput("2", [], resend=True)) is None
    ledger.trim(request("3", "a"))
    ledger.discard(["3"])
    assert ledger.answered(EngineCoreOutput("3", [], resend=True)) is None, "it has been aborted"
