"""Writes tests/fixtures/hf_logits.npz: the logits of transformers' PyTorch models on the cases of hf_cases.py.

    PYTHONPATH=tests python -m support.make_hf_golden        (needs torch, transformers and safetensors; no jax)
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from support import hf_cases


def torch_logits(folder: Path, inputs: hf_cases.Inputs, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Logits [B, T, V], as float32; every tensor of the folder must have found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    problems = {name: found for name, found in info.items() if found}
    assert not problems, problems
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(inputs.token_BT),
            position_ids=torch.tensor(inputs.position_BT),
            attention_mask=torch.tensor(inputs.is_token_BT).long(),
        ).logits.float().numpy()


def main() -> None:
    logits = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in hf_cases.CASES.items():
            folder = hf_cases.write_checkpoint(Path(scratch) / name, case)
            for kind, inputs in hf_cases.INPUTS.items():
                logits[f"{name}/{kind}"] = torch_logits(folder, inputs)
    np.savez_compressed(hf_cases.GOLDEN, **logits)
    print(f"{hf_cases.GOLDEN}: {len(logits)} arrays, {hf_cases.GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
