"""A GGUF model as a bf16 Hugging Face folder, for peers that read nothing else. Made once, kept in corespan's cache."""

import os
import shutil
import tempfile
from pathlib import Path


def hf_folder(gguf: Path, cache: Path) -> Path:
    """The folder made from `gguf` through transformers' own reader; it is written beside its place and renamed."""
    folder = cache / "benchmarks" / f"{gguf.stem}-{gguf.stat().st_size}-bf16"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        vars(model.config).pop("quantization_config", None)
        model.to(torch.bfloat16).save_pretrained(staging)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(staging)
        os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder
