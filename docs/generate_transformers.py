"""Run one example per instrument on a transformer and write docs/transformers.md from what came out.

    python docs/generate_transformers.py [--only spectrum,lipschitz] [--minutes 8] [--gigabytes 10]

Examples run first on GPT-2's own size (124M parameters, made from its configuration, random weights); what takes longer
than the minutes or more than the memory given, or stops there, is shown with its reason and run on two layers of width 128. Outputs are kept in
docs/_generated/transformers.json: what is there is not run again unless named. Needs the extra `transformers`; nothing is downloaded.
"""

# ruff: noqa: E501 (a line of an example is a line of the page)
from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import signal
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
PAGE, KEPT = FOLDER / "transformers.md", FOLDER / "_generated" / "transformers.json"
LINES = 24  # of an output that the page shows

START = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import normgauge as ng
from normgauge.lab.data import text

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config())                      # 12 layers of width 768: 124M parameters
inputs, targets = (part[:2, :32] for part in text().train)     # characters of Python's own help texts


def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def logits(model, tokens):
    return model(tokens).logits


objective = ng.Objective(model, loss, (inputs, targets), mode="eval", forward=logits)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
"""
SMALL = START.replace("GPT2Config())                      # 12 layers of width 768: 124M parameters",
                      "GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=96))")  # fmt: skip

EXAMPLES: dict[str, tuple[str, str]] = {
    "identify": ("What does this norm compute?", "print(ng.identify(model.transformer.h[0].ln_1, example=torch.randn(2, 5, model.config.n_embd)))"),
    "activations": ("What do the layers send each other?", 'print(ng.activations(objective, layers="*ln_1"))'),
    "signal_propagation": ("Does the signal survive the depth?", "print(ng.signal_propagation(objective))"),
    "trainable_depth": ("How deep could it be?", "print(ng.trainable_depth(model, inputs, forward=logits))"),
    "margins": ("How sure are the decisions?", "print(ng.margins(objective))"),
    "landscape": ("How far does the gradient hold?", "print(ng.landscape(objective, steps=[0.1, 1, 10]))"),
    "covariate_shift": ("What does one step move under the layers above?", "print(ng.covariate_shift(objective, optimizer))"),
    "smoothing": ("What do the normalizers do to gradient and curvature?", "print(ng.smoothing(objective))"),
    "spectrum": ("How curved is the loss?", "print(ng.spectrum(objective, top=1, tol=0.05))"),
    "trace": ("And on average?", "print(ng.trace(objective, probes=3))"),
    "density": ("The whole spectrum?", "print(ng.density(objective, probes=1, iterations=12))"),
    "layer_spectra": ("Which layer is sharpest?", 'last = f"transformer.h.{len(model.transformer.h) - 1}.*"\nprint(ng.layer_spectra(objective, per={"first": "transformer.h.0.*", "last": last}, tol=0.1))'),
    "stable_rate": ("Which rate is stable?", "print(ng.stable_rate(objective, tol=0.2))"),
    "batch_noise": ("How noisy is the gradient?", """\
more = tuple(part[:8, :32] for part in text().train)
print(ng.batch_noise(ng.Objective(model, loss, more, mode="eval", forward=logits), sizes=[2, 4], draws=4))"""),
    "flatness": ("What do small changes of the weights cost?", "print(ng.flatness(objective, sigmas=[0.01], samples=3))"),
    "loss_surface": ("A cut through the loss?", "print(ng.loss_surface(objective, points=5))"),
    "symmetries": ("Which changes of the weights change nothing?", "print(ng.symmetries(objective))"),
    "param_groups": ("Which weights should decay?", "print(ng.param_groups(objective, {'lr': 3e-4, 'weight_decay': 0.1}))"),
    "weight_dynamics": ("Where are the norms heading?", "print(ng.weight_dynamics(objective, optimizer))"),
    "gradient_flow": ("What does gradient flow conserve?", "print(ng.gradient_flow(objective, 0.01, integrator='runge_kutta', iterations=3))"),
    "sharpness_track": ("Is sharpness rising?", """\
track = ng.sharpness_track(objective, optimizer, curvature=False)
for step in range(2):
    track.measure(step)
    optimizer.zero_grad()
    loss(logits(model, inputs), targets).backward()
    optimizer.step()
print(track)"""),
    "lipschitz": ("How much can outputs change with the embedded input?", """\
class Embedded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, embedded):
        return self.model(inputs_embeds=embedded).logits[:, -1]


embedded = model.transformer.wte(inputs).detach()
print(ng.lipschitz(Embedded().eval(), embedded, radius=0.01))"""),
    "weight_lipschitz": ("And with the weights?", """\
last = ng.Objective(Embedded(), torch.nn.functional.cross_entropy, (embedded, targets[:, -1]), mode="eval")
print(ng.weight_lipschitz(last))"""),
    "operator_norm": ("How long can one matrix make a vector?", "print(ng.operator_norm(torch.nn.Linear(model.config.n_embd, 4 * model.config.n_embd)))"),
    "robustness": ("Which embedded inputs fool it?", """\
class LastToken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, embedded):
        return self.model(inputs_embeds=embedded).logits[:, -1]


data = (model.transformer.wte(inputs).detach(), targets[:, -1])
print(ng.robustness(LastToken(), data, attack="fgsm", radius=0.01))"""),
    "drift": ("Do stored statistics fit the data?", "print(ng.drift(model, [inputs], forward=logits))"),
    "checkup": ("What is wrong with it?", "print(ng.checkup(objective, optimizer=optimizer, quick=True))"),
    "layer_to_rms": ("LayerNorm to RMSNorm", "print(ng.layer_to_rms(model, example=inputs, untie=True))"),
    "fold_norms": ("Gains folded into the matrices", """\
for block in model.transformer.h:
    torch.nn.init.normal_(block.ln_1.weight, 1, 0.1)       # fresh gains are 1: there is nothing to fold yet
print(ng.fold_norms(model.eval(), example=inputs, untie=True))"""),
    "monitor": ("And live, in training", """\
with ng.Monitor(model, optimizer, every=1) as monitor:
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(logits(model, inputs), targets)
        value.backward()
        optimizer.step()
        monitor.step(value)
print(monitor.frame().tail(3).T.to_string(max_rows=12))"""),
}  # fmt: skip


def run(code: str, names: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run an example; return its output or the last line of its error, and its seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds / 60:.0f} minutes of one core")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    begin, output = time.process_time(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, names)
    except Exception as error:  # noqa: BLE001 (whatever stopped it is what the page says)
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:400].rstrip(".")
        spent = time.process_time() - begin
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            limit = resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**30
            said = f"asked for more than {limit:.0f} GiB after {spent:.0f} s of one core"
        elif isinstance(error, TimeoutError):
            said += f" (the process at most {_peak()} GiB so far)"
        return {"error": said}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"output": output.getvalue().rstrip(), "seconds": round(time.process_time() - begin, 1), "peak": _peak()}


def _peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)


def section(name: str, result: dict[str, Any]) -> str:
    """Return the example as a reader sees it."""
    title, code = EXAMPLES[name]
    lines = [f"## {title}", "", "```py", code, "```", ""]
    whole, small = result["whole"], result.get("small")
    if "error" in whole:
        lines += [f"At 124M parameters: {whole['error']}.", ""]
    shown = small if "error" in whole else whole
    if shown is None or "error" in shown:
        return "\n".join(lines + ([] if shown is None else [f"On two layers of width 128: {shown['error']}.", ""]))
    output = [
        textwrap.shorten(line, 400, placeholder=" ...") if len(line) > 400 else line
        for line in shown["output"].splitlines()
    ]
    if len(output) > LINES:
        output = [*output[: LINES - 6], f"... {len(output) - LINES + 1} lines more", *output[-5:]]
    size = "two layers of width 128" if "error" in whole else "124M parameters"
    lines += [
        "```",
        *output,
        "```",
        "",
        f"{size}, {shown['seconds']} s, the process at most {shown['peak']} GiB so far.",
    ]
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    """Return the whole page."""
    head = f"""# Transformers

<!-- Generated by python docs/generate_transformers.py; do not edit. -->

{len(results)} examples on GPT-2 as they ran, on a share of one core of a busy machine, each with a time limit. Where
GPT-2's own size took too long or stopped, the page says why and shows two layers of width 128. All of them begin with

```py
{START.rstrip()}
```

RMSNorm in its forms, QK-norm, ScaleNorm, DyT, Derf, weights and streams on spheres, and where normalizers stand in a
block are in the [register](_generated/normalizers.md). [Which models are supported](_generated/support.md) has more
models; `models.gpt` and the text are on the page on [data](lab/data.md).
"""
    return "\n\n".join([head.rstrip(), *(section(name, results[name]) for name in EXAMPLES if name in results)]) + "\n"


def main() -> None:
    """Run what is not kept, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept, run nothing")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (int(options.gigabytes * 2**30),) * 2)
    torch.set_num_threads(1)
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if options.page:
        PAGE.write_text(page(results), encoding="utf-8")
        return
    wanted = [name for name in EXAMPLES if (name in options.only.split(",") if options.only else name not in results)]
    names: dict[str, dict[str, Any]] = {"whole": {}, "small": {}}
    for size, start in (("whole", START), ("small", SMALL)):
        exec(start, names[size])
    for name in wanted:
        result: dict[str, Any] = {}
        for size in names:
            if size == "whole" or "error" in result["whole"]:
                result[size] = run(EXAMPLES[name][1], names[size], 60 * options.minutes)
                print(size, name, repr(result[size])[:200], flush=True)
        results[name] = result
        KEPT.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results), encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
