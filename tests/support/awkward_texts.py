"""Texts that tokenizers and detokenizers stumble over, and random mixtures of them."""

import random

AWKWARD = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n\r\n",
    "\t\tx",
    " leading",
    "trailing ",
    "a  b   c    d",
    "1234567890",
    " 12 345  6789",
    "3.14159e-10",
    "don't won't I'll they've",
    "DON'T",
    "naïve café",
    "nai\u0308ve e\u0301",
    "ďábel 👩‍👩‍👧 日本 ok",
    "👍🏽🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "日本語のテキスト",
    "العربية עברית",
    "ไทย हिन्दी",
    "\u200b\u200d\ufeff",
    "\u00a0nbsp\u2003em",
    "\x00\x01\x7f",
    "\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|>",
    "<|im_start",
    "</s><s>",
    "<0x0A>",
    "▁▁underline",
    "Ġspace",
    "def f(x):\n    return x ** 2  # ok\n",
    "https://example.org/?q=a%20b&c=d",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "(((((]]]]]{{{{{",
    "A" * 300,
    "the the the in the world",
]

_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz ",
    "ABCDEFGHIJ  \n\t'",
    "0123456789 .,",
    "éüñßďáØł\u0301\u0308",
    "日本語中文字汉",
    "👩👍🏽🇩🇪\u200d\ufe0f",
    "!?#$%&()*+-/:;<=>@[]^_`{|}~",
    "\u00a0\u2003\u200b\r\n ",
]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """The awkward ones, then random ones: pieces of several alphabets, of awkward texts, and of any characters."""
    rng = random.Random(seed)
    texts = list(AWKWARD)
    while len(texts) < count:
        pieces = []
        for _ in range(rng.randint(1, 6)):
            kind = rng.random()
            if kind < 0.7:
                pieces.append("".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randint(1, 12))))
            elif kind < 0.85:
                pieces.append(rng.choice(AWKWARD))
            else:
                pieces.append("".join(_any_character(rng) for _ in range(rng.randint(1, 5))))
        texts.append("".join(pieces))
    return texts[:count]


def _any_character(rng: random.Random) -> str:
    while 0xD800 <= (code := rng.randrange(0x110000)) <= 0xDFFF:
        pass
    return chr(code)
