"""The public names are these; importing normgauge is cheap and pulls nothing heavy."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normgauge as ng

PUBLIC = {
    "Monitor",
    "Network",
    "NormgaugeError",
    "Objective",
    "Study",
    "Surgery",
    "Symmetries",
    "UpdateRecord",
    "__version__",
    "activation_history",
    "activations",
    "batch_noise",
    "canonicalize",
    "charts",
    "cite",
    "claims",
    "compare",
    "covariate_shift",
    "density",
    "drift",
    "errors",
    "flatness",
    "fold_norms",
    "freeze_norms",
    "generalization",
    "gradient_flow",
    "guard_norms",
    "lab",
    "landscape",
    "landscape_bands",
    "layer_spectra",
    "layer_to_rms",
    "lipschitz",
    "loss_surface",
    "margins",
    "measure",
    "monitor",
    "migrate_weight_norm",
    "nn",
    "operator_norm",
    "optim",
    "param_groups",
    "prune_norms",
    "quotient_spectrum",
    "recalibrate_norms",
    "register_lipschitz_rule",
    "report",
    "reproduce",
    "robustness",
    "sharpness_track",
    "rotate_stream",
    "signal_propagation",
    "smoothing",
    "spectrum",
    "split_norms",
    "stability",
    "stable_rate",
    "strip_biases",
    "surgery",
    "swap_norms",
    "symmetries",
    "symmetry",
    "take",
    "testing",
    "theory",
    "trace",
    "checkup",
    "identify",
    "doctor",
    "trainable_depth",
    "advise",
    "translate",
    "width_check",
    "weight_dynamics",
    "weight_lipschitz",
}


def test_the_public_list_is_held():
    assert set(ng.__all__) == PUBLIC
    assert set(dir(ng)) == PUBLIC
    for name in PUBLIC:
        assert getattr(ng, name) is not None


def test_unknown_names_are_ordinary_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'spektrum'; public names"):
        ng.spektrum  # noqa: B018


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_pulls_no_extras():
    heavy = "pandas", "altair", "dask", "sklearn", "matplotlib", "transformers", "hypothesis"
    loaded = run(f"import normgauge, sys; print([m for m in {heavy!r} if m in sys.modules])")
    assert loaded.strip() == "[]"
    measured = run(
        "import normgauge as ng, sys; ng.Objective, ng.spectrum, ng.symmetries, ng.claims, ng.nn, ng.Study, ng.compare;"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    assert measured.strip() == "[]"


def test_missing_extras_name_the_install_command():
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "import torch, normgauge as ng\n"
        "data = (torch.ones(2, 1), torch.zeros(2, 1))\n"
        "o = ng.Objective(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, data, mode='eval')\n"
        "try:\n    ng.landscape(o, steps=[0.1]).frame()\n"
        "except ng.NormgaugeError as error:\n    print(error)\n"
    )
    assert "pip install 'normgauge[lab]'" in run(code)


def test_the_types_are_marked():
    from importlib.resources import files

    assert (files("normgauge") / "py.typed").is_file()


def test_examples_are_named_as_the_documentation_reads_them():
    """The docstring parser knows `Examples:`; under `Example:` the lines run together on the page."""
    source = Path(ng.__file__).parent
    assert not [path for path in source.rglob("*.py") if re.search(r"^\s*Example:\s*$", path.read_text(), re.M)]


# What an argument is called, whatever instrument takes it; `steps` are multiples of the gradient and nothing else.
GLOSSARY = {"rtol": "tol", "eps_rel": "tol", "products": "max_products", "max_evaluations": "max_gradients"}
# Those whose arguments the task orders: what is translated, built at widths, or asked about comes first.
OTHERWISE = {"translate": "optimizer", "width_check": "factory", "advise": "model_or_factory"}
OBJECTIVE_FIRST = {"objective", "model", "layer", "train", "landscapes", "history", "weight", "problem", "x", "norm"}


def test_arguments_have_one_name_for_one_thing():
    import normgauge.results as results

    assert all(hasattr(ng, name) for name in ng.__all__)  # loads every instrument
    for name, instrument in results.INSTRUMENTS.items():
        arguments = list(inspect.signature(instrument).parameters)
        if name in OTHERWISE:
            assert arguments[0] == OTHERWISE[name] and not set(arguments) & set(GLOSSARY)
            assert "steps" not in arguments or name == "advise"  # of a training run, as in compare
            continue
        assert arguments[0] in OBJECTIVE_FIRST, f"{name} takes the objective first, or model and data"
        assert not set(arguments) & set(GLOSSARY), f"{name}: {[GLOSSARY[a] for a in arguments if a in GLOSSARY]}"
        assert "steps" not in arguments or name == "landscape", f"{name}: iterations of an algorithm are `iterations`"
        assert "objective" not in arguments or arguments[0] == "objective"
        data_later = name == "swap_norms"  # calibrates on it, and does without
        assert "data" not in arguments or data_later or arguments[:2] in (["model", "data"], ["train", "data"])
