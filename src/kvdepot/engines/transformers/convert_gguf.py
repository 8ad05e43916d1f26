"""Turn a GGUF file into a folder that transformers and vLLM load. Run as a process of its own.

    python -m kvdepot.engines.transformers.convert_gguf FILE FOLDER

The weights are dequantised to bfloat16. Needs the demo extra.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

__all__ = ["convert"]


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, config and tokenizer into `folder`, which is made."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # the weights are plain numbers now; what is left of it would have loaders refuse the folder
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
