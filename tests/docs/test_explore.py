"""The explorable page: its formulas are those of the theory room, its lines go through what normgauge measured."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normgauge as ng
from browser import CHROMIUM, ask, needs_browser
from normgauge.theory import batchnorm_calculus, norm_growth, scale_invariance, weight_dynamics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "explore" / "index.html"
sys.path.insert(0, str(DOCS))

NODE = shutil.which("node")
needs_javascript = pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor chromium on PATH")


def run_javascript(expression, cases, tmp_path):
    """Evaluate a function of formulas.js (`F`) and data.js (`D`) on every case, in node or else in Chromium."""
    sources = [(PAGE.parent / name).read_text(encoding="utf-8") for name in ("formulas.js", "data.js")]
    body = f"const F = formulas, D = measured; const answers = {json.dumps(cases)}.map({expression});"
    if NODE:
        script = "\n".join([*sources, body, "console.log(JSON.stringify(answers));"])
        done = subprocess.run([NODE], input=script, capture_output=True, text=True, check=True, timeout=60)
        return json.loads(done.stdout)
    page = tmp_path / "empty.html"
    page.write_text(f"<body><script>{sources[0]}{sources[1]}</script></body>", encoding="utf-8")
    return ask(page, body + "found.answers = answers;")["answers"]


@needs_javascript
def test_the_formulas_are_those_of_the_theory_room(tmp_path):
    generator, cases, wanted = torch.Generator().manual_seed(1), [], []
    for _ in range(40):
        m = int(torch.randint(2, 30, (1,), generator=generator))
        y, g = torch.randn(2, m, generator=generator, dtype=torch.float64)
        gamma, eps, rate, decay, squared, slope = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
        cases.append({"y": y.tolist(), "g": g.tolist(), **locals_of(gamma, eps, rate, decay, squared, slope)})
        yh, s = batchnorm_calculus.standardize(y, eps)
        wanted.append(
            [
                *yh.tolist(),
                float(s),
                *batchnorm_calculus.pullback_gradient(y, g, gamma, eps).tolist(),
                float(scale_invariance.radial_derivative(y, g, gamma, eps)),
                norm_growth.after_sgd_step(squared, slope, rate),
                weight_dynamics.sgd_effective_rate(rate, squared),
                weight_dynamics.sgd_angle(rate, squared, slope),
                *weight_dynamics.sgd_equilibrium(rate, decay, slope),
            ]
        )
    got = run_javascript(
        """({y, g, gamma, eps, rate, decay, squared, slope}) => {
          const n = F.standardize(y, eps), settled = F.sgdEquilibrium(rate, decay, slope);
          return [...n.yh, n.s, ...F.pullbackGradient(y, g, gamma, eps), F.radialDerivative(y, g, gamma, eps),
            F.afterSgdStep(squared, slope, rate), F.sgdEffectiveRate(rate, squared), F.sgdAngle(rate, squared, slope),
            settled.norm, settled.angle, settled.relaxation];
        }""",
        cases,
        tmp_path,
    )
    for ours, theirs in zip(wanted, got, strict=True):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), rtol=1e-12, atol=1e-14)


def locals_of(gamma, eps, rate, decay, squared, slope):
    return {"gamma": gamma, "eps": eps, "rate": rate, "decay": decay, "squared": squared, "slope": slope}


@needs_javascript
@pytest.mark.parametrize("normalizer", ["batch", "eval", "weight", "none"])
def test_loss_gradient_and_steps_are_those_of_torch_and_of_our_optimizer(normalizer, tmp_path):
    import generate_explore

    plane, targets, _ = generate_explore.points()
    logistic = lambda z, t: nn.functional.softplus(-t * z).mean()  # noqa: E731
    cases, wanted = [], []
    for seed in range(6):
        torch.manual_seed(seed)
        scene = {**generate_explore.DEFAULTS, "normalizer": normalizer, "eps": 10.0 ** (-2 * seed)}
        w, chosen = torch.randn(2) * 10 ** (seed % 3 - 1), torch.randperm(64)[: 3 + 9 * seed]
        model = generate_explore.Unit(scene, plane)
        model.weight.data.copy_(w[None])
        mode = "train" if normalizer == "batch" else "eval"
        objective = ng.Objective(model, logistic, (plane[chosen], targets[chosen]), mode=mode)
        (name,) = [key for key, value in model.named_parameters() if value is model.weight]
        gradient = objective.gradient()[name]
        on_sphere = nn.Parameter(w[None].clone())
        on_sphere.grad = gradient.clone()
        ng.optim.SphereSGD([on_sphere], lr=0.7).step()
        wanted.append([float(objective.loss()), *gradient[0].tolist(), *on_sphere[0].tolist()])
        cases.append({"w": w.tolist(), "chosen": chosen.tolist(), "eps": scene["eps"], "normalizer": normalizer})
    got = run_javascript(
        """({w, chosen, eps, normalizer}) => {
          const y = D.points.map(({x}) => F.dot(x, D.start)), mean = F.mean(y);
          const running = {mean, var: F.mean(y.map((v) => (v - mean) ** 2))};
          const at = F.unit(w, chosen.map((k) => D.points[k]), {normalizer, eps, gamma: D.gamma, running});
          return [at.loss, ...at.gradient, ...F.sphereStep(w, at.gradient, 0.7)];
        }""",
        cases,
        tmp_path,
    )
    for ours, theirs in zip(wanted, got, strict=True):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), rtol=1e-9, atol=1e-12)


@needs_javascript
def test_lines_go_through_what_was_measured(tmp_path):
    got = run_javascript(
        """(scene) => {
          const s = D.scenes[scene], y = D.points.map(({x}) => F.dot(x, D.start)), mean = F.mean(y);
          const options = {...s, gamma: D.gamma, running: {mean, var: F.mean(y.map((v) => (v - mean) ** 2))}};
          let off = 0;
          for (const arm of ["plain", "sphere"]) {
            let w = D.start;
            s[arm].forEach(([length, loss], k) => {
              off = Math.max(off, Math.abs(F.norm(w) - length), Math.abs(F.unit(w, D.points, options).loss - loss));
              const {gradient} = F.unit(w, F.batch(D.points, D.order, s.batch, k), options);
              w = arm === "plain" ? F.sgdStep(w, gradient, s.rate, s.decay) : F.sphereStep(w, gradient, s.rate);
            });
          }
          return off;
        }""",
        list(range(6)),
        tmp_path,
    )
    assert max(got) < 2e-5, got


def test_the_measured_numbers_are_those_of_today():
    import generate_explore

    text = generate_explore.OUT.read_text(encoding="utf-8")
    shipped = json.loads(text.partition("const measured = ")[2].rstrip("\n;"))
    scene, data = shipped["scenes"][2], generate_explore.points()
    for name in ("plain", "sphere"):
        again = generate_explore.measure(scene, data, getattr(generate_explore, name))
        torch.testing.assert_close(torch.tensor(again), torch.tensor(scene[name]), rtol=0, atol=2e-5)
    assert [entry["name"] for entry in shipped["scenes"]] == [entry["name"] for entry in generate_explore.SCENES]


@needs_browser
@pytest.mark.parametrize("width", [390, 820, 1400])
def test_keys_move_the_weight_and_nothing_overflows(tmp_path, width):
    whole = PAGE.read_text(encoding="utf-8").replace(
        'href="explore.css"', f'href="{(PAGE.parent / "explore.css").as_uri()}"'
    )
    for name in ("formulas.js", "data.js", "explore.js"):
        whole = whole.replace(f'src="{name}"', f'src="{(PAGE.parent / name).as_uri()}"')
    page = tmp_path / "page.html"
    page.write_text(
        whole.replace("<head>", "<head><script>window.trouble = []; onerror = (m) => trouble.push(m);</script>")
    )
    found = ask(
        page,
        """const cell = (k) => all('#facts tr')[k].children[1].textContent;
        const handle = document.querySelector('.handle'); handle.focus();
        found.first = [cell(0), cell(4), handle.getAttribute('aria-valuenow')];
        const key = (name) => handle.dispatchEvent(new KeyboardEvent('keydown', {key: name, bubbles: true}));
        for (let k = 0; k < 5; k++) key('ArrowUp');
        found.longer = [cell(0), cell(4), handle.getAttribute('aria-valuenow')];
        key('ArrowLeft');
        found.turned = [cell(0), handle.getAttribute('aria-valuenow')];
        document.getElementById('step').click();
        found.done = cell(8);
        found.overflow = document.documentElement.scrollWidth - innerWidth;
        found.trouble = trouble;""",
        width=width,
    )
    assert found["first"][0] == found["longer"][0] != found["turned"][0]  # constant along the ray, and only there
    assert math.isclose(float(found["longer"][1]), 1.1**10, rel_tol=1e-3)
    assert found["first"][2] == found["longer"][2] and int(found["turned"][1]) == int(found["first"][2]) + 5
    assert found["done"] == "1" and found["overflow"] <= 0 and not found["trouble"]
