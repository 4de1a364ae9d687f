"""The typeset forms of the claims say what the claims say: every word, number and symbol, and nothing of LaTeX."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from normgauge.papers.court import Claim, ledger, typeset
from normgauge.papers.court.typeset import PARTS, latex, rendered_forms, sources

TOOLS = Path(__file__).parents[3] / "tools"
CLAIMS = {claim.id: claim for claim in ledger()}
FORMS = [(id, part) for id, parts in sources().items() for part in parts]
# The list calls the variance of this lemma s2; it is set as sigma_n^2.
REWRITTEN = {("S2-L23", "printed")}

GREEK = {"alpha", "beta", "gamma", "delta", "eps", "eta", "theta", "kappa", "lambda", "mu", "rho", "sigma", "Sigma"}
GREEK |= {"zeta", "phi", "Phi", "pi", "Pi", "Omega", "omega"}
LATEX_NAMES = {"varphi": "phi", "varepsilon": "eps"}
SIGNS = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne", "->": r"\to", "=>": r"\Rightarrow", "+-": r"\pm", "<<": r"\ll"}
NAMES = {"sqrt": r"\sqrt", "grad": r"\nabla", "sum": r"\sum", "prod": r"\prod", "orth": r"\perp", "exp": r"\exp"}
NAMES |= {"max": r"\max", "min": r"\min", "sup": r"\sup"}
# Names of symbols and functions, not words: they become letters with accents and signs.
SYMBOLS = {*GREEK, *(f"d{name}" for name in GREEK), *NAMES, "lam", "linf", "infinity", "hat"}
SYMBOLS |= {"xhat", "yhat", "ghat", "Lhat", "Hhat", "What", "xbar", "Wbar", "Twt", "TSw", "TSwt", "TAw"}
SYMBOLS |= {"dLN", "dGN", "dLhat", "dxhat", "dim", "ker", "log", "cos", "sin", "tanh"}


def plain_symbols(text):
    """Count what a statement in plain characters says, symbol by symbol; 1e-5 is a power of ten."""
    text = re.sub(r"\b1e(?=-?\d)", "10^", text)
    found = Counter(re.findall(r"\d", text))
    text = re.sub(r"(?<![A-Za-z])lam(?=_|\d)", "lambda_", text)
    for name in GREEK:
        found[name] = len(re.findall(rf"(?<![A-Za-z])d?{name}(?![a-z])", text))
    for sign in SIGNS:
        found[sign] = text.count(sign)
    for name in NAMES:
        found[name] = len(re.findall(rf"(?<![A-Za-z]){name}(?![a-z])", text))
    found["transposed"] = len(re.findall(r"\^T", text))
    return +found


def latex_symbols(text):
    """Count the same of a statement with LaTeX formulas."""
    found = Counter(re.findall(r"\d", text))
    names = Counter(LATEX_NAMES.get(name, name) for name in re.findall(r"\\([A-Za-z]+)", text))
    found.update({name: names[name] for name in GREEK})
    found.update({sign: names[command[1:]] for sign, command in SIGNS.items()})
    found.update({name: names[command[1:]] for name, command in NAMES.items()})
    words = re.sub(r"\$[^$]*\$", "", text)
    found.update({name: len(re.findall(rf"(?<![A-Za-z]){name}(?![a-z])", words)) for name in NAMES})
    found["transposed"] = names["top"]
    return +found


def words(text):
    """Count the words of three letters and more, names of symbols left out."""
    text = re.sub(r"\\(?:text|operatorname|mathrm)\{([^}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[A-Za-z]+", " ", text)
    return Counter(word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in SYMBOLS)


def test_every_claim_has_its_typeset_forms():
    assert set(sources()) == set(CLAIMS)
    for claim in CLAIMS.values():
        forms = sources()[claim.id]
        assert "printed" in forms and ("corrected" in forms) == bool(claim.corrected), claim.id
        assert set(forms) <= set(PARTS) and all(getattr(claim, part) for part in forms), claim.id


@pytest.mark.parametrize(("id", "part"), FORMS, ids=[f"{id}-{part}" for id, part in FORMS])
def test_no_word_number_or_symbol_is_lost(id, part):
    plain, formulas = getattr(CLAIMS[id], part), sources()[id][part]
    assert words(formulas) == words(plain)
    if (id, part) not in REWRITTEN:
        assert latex_symbols(formulas) == plain_symbols(plain)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(r"$\gamma^2/s$", r"$\gamma/s$"), (r"$a \le b$", "$a = b$"), ("of $w$", "$w$"), (r"$\sqrt{m}$", "$m$")],
)
def test_the_comparison_notices_a_loss(right, wrong):
    assert latex_symbols(right) != latex_symbols(wrong) or words(right + " long") != words(wrong + " longer")


def test_the_rendered_forms_are_those_of_the_sources():
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("typeset", TOOLS / "typeset.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.rendered() == rendered_forms(), "run python tools/typeset.py"


def test_the_rendered_forms_are_words_and_mathml_and_nothing_else():
    known = {"p", "math", "mrow", "mi", "mo", "mn", "mtext", "mspace"}
    known |= {"mfrac", "msqrt", "msub", "msup", "msubsup", "mover"}
    for id, parts in rendered_forms().items():
        for part, markup in parts.items():
            assert not re.search(r"[\\${}]|amp;", re.sub(r"<mo[^>]*>[{}]</mo>", "", markup)), f"{id} {part}"
            tree = ElementTree.fromstring(f"<p>{markup}</p>")  # well formed
            assert {node.tag for node in tree.iter()} <= known, f"{id} {part}"
            assert not [node for node in tree.iter("mrow") if not len(node)], f"{id} {part}: an empty group"
            outside = "".join([tree.text or "", *(node.tail or "" for node in tree)])
            assert words(outside) <= words(getattr(CLAIMS[id], part)), f"{id} {part}"
            assert len(list(tree.iter("math"))) == sources()[id][part].count("$") // 2


def test_a_formula_becomes_mathml():
    found = typeset(CLAIMS["S0-WD"], "corrected")
    assert "<mfrac>" in found and "<mi>λ</mi>" in found and "‖" in found
    assert latex(CLAIMS["S0-WD"], "corrected").count("$") == 4


def test_a_claim_without_typeset_form_is_shown_as_it_is():
    claim = Claim("X-1", "here", "a < b & c", "theorem")
    assert typeset(claim, "printed") == "a &lt; b &amp; c"
    assert latex(claim, "printed") is None
