"""What `transformers_scale.py lipschitz` and `transformers_scale.py curvature` need on transformers of 100M parameters.

lipschitz: BERT-base on two sentences of 16 tokens, with respect to the embedded input; seconds of CPU on one thread.
curvature: the top eigenvalue of the Hessian of GPT-2 small (124M) on one sequence; peak memory of the process.
"""

from __future__ import annotations

import os
import resource
import sys
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch

import normgauge as ng


def lipschitz() -> str:
    """Bracket BERT-base."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_labels=3)).eval()
    ids = torch.randint(2, 30_000, (2, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return str(ng.lipschitz(model, inputs, forward=lambda m, x: m(**x).logits))


def curvature() -> str:
    """Find the top of the spectrum of GPT-2 small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    ids = torch.randint(0, 50_000, (1, 33))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    objective = ng.Objective(
        model, loss, ({"input_ids": ids[:, :-1]}, ids[:, 1:]), mode="eval", forward=lambda m, x: m(**x).logits
    )
    return str(ng.spectrum(objective, top=1, tol=0.05))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    start = time.process_time()
    print({"lipschitz": lipschitz, "curvature": curvature}[sys.argv[1]]())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.process_time() - start:.1f} s of CPU, peak {peak:.2f} GiB")
