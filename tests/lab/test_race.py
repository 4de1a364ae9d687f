"""The race: losers leave, the error holds over looks and arms, budgets end it, and it says what more would cost."""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest

from normgauge.errors import InputError
from normgauge.lab.race import halve, look_confidence, looks, race
from normgauge.stats import leads


def draws(means, spread=1.0, seed=0, kind="normal"):
    """A measure of arms with these means; every (arm, seed) has its own draw, half of its variance shared by arms."""
    stream = np.random.default_rng(seed)
    noise = {}

    def deviate():
        if kind == "heavy":
            return stream.standard_t(4) / math.sqrt(2)
        return stream.normal()

    def measure(pairs):
        for pair in pairs:
            shared = noise.setdefault(pair[1], deviate())
            noise[pair] = means[pair[0]] + spread * (shared + deviate()) / math.sqrt(2)
            if kind == "accuracy":  # of 360 test samples
                noise[pair] = round(360 * min(max(noise[pair], 0), 1)) / 360
        return {pair: noise[pair] for pair in pairs}

    return measure


def test_shares_of_all_looks_are_at_most_the_whole_error():
    for arms in (2, 3, 7):
        errors = [1 - look_confidence(look, arms) for look in itertools.islice(looks(), 40)]
        assert sum(errors) * (arms - 1) <= 0.05 + 1e-12
    assert list(itertools.islice(looks(), 7)) == [4, 6, 8, 12, 16, 24, 32]


def test_losers_get_no_more_seeds_and_intervals_are_those_of_a_t_test():
    from scipy.stats import t

    ended = race(draws({"a": 5.0, "b": 4.4, "c": 0.0}, spread=0.5), ["a", "b", "c"])
    assert ended.decided and ended.best == "a" and ended.beaten == ("c", "b") and ended.stopped == "decided"
    assert len(ended.scores["c"]) < len(ended.scores["b"]) == ended.seeds
    differences = [ended.scores["a"][s] - ended.scores["b"][s] for s in range(ended.seeds)]
    half = t.ppf((1 + look_confidence(ended.seeds, 3)) / 2, ended.seeds - 1) * np.std(differences, ddof=1)
    low = fmean(differences) - half / math.sqrt(ended.seeds)
    assert ended.leads["b"].low == pytest.approx(low) and low > 0 and ended.cost_of_deciding() == ""


def test_a_margin_ends_a_race_of_equals_and_lower_can_be_better():
    equal = race(draws({"a": 1.0, "b": 1.0}, spread=0.1), ["a", "b"], margin=0.2)
    assert equal.decided and not equal.beaten and -0.2 < equal.leads[{"a": "b", "b": "a"}[equal.best]].low < 0
    same = race(lambda pairs: dict.fromkeys(pairs, 0.5), ["a", "b"], margin=0.2)
    assert same.decided and same.seeds == 8, "differences without spread need more seeds to count as none"
    assert not race(lambda pairs: dict.fromkeys(pairs, 0.5), ["a", "b"], seeds=16).decided
    assert race(draws({"a": 5.0, "b": 1.0}), ["a", "b"], higher=False).best == "b"


def test_it_says_what_a_decision_would_cost_and_that_is_about_right():
    ended = race(draws({"a": 0.5, "b": 0.0}, seed=1), ["a", "b"], seeds=8, price=lambda pairs: 10.0 * len(pairs))
    assert not ended.decided and ended.stopped == "seeds" and ended.more_seeds > 0
    assert (
        ended.more_seconds == 10 * 2 * ended.more_seeds
        and f"{ended.more_seeds} more seeds, about" in ended.cost_of_deciding()
    )
    far = race(
        lambda pairs: {p: float(p[1] % 2) * (1 if p[0] == "a" else -1) - 0.5 for p in pairs}, ["a", "b"], seeds=4
    )
    assert far.more_seeds is None or far.more_seeds > 0


def test_a_spent_budget_ends_it_and_going_on_gives_what_one_race_would_have_given():
    means = {"a": 0.6, "b": 0.0, "c": -1.0}
    short = race(draws(means), list(means), budget=100, price=lambda pairs: 5.0 * len(pairs))
    assert short.stopped == "budget" and 4 <= short.seeds < 64 and not short.decided
    none = race(draws(means), list(means), budget=1, price=lambda pairs: 5.0 * len(pairs))
    assert none.best is None and none.seeds == 0 and none.stopped == "budget"
    kept, allowed = {}, [20]

    def stopping(pairs):
        source = draws(means)
        whole = source([(arm, seed) for seed in range(200) for arm in means])
        new = [pair for pair in pairs if pair not in kept][: allowed[0] - len(kept)]
        kept.update({pair: whole[pair] for pair in new})
        return {pair: kept[pair] for pair in pairs if pair in kept}

    first = race(stopping, list(means))
    allowed[0] = 1000
    again = race(stopping, list(means))
    assert first.stopped == "budget" and again.stopped == "decided"
    assert again.leads == race(lambda pairs: stopping(pairs), list(means)).leads


def test_lost_runs_are_no_measurements():
    source = draws({"a": 5.0, "b": 0.0, "c": 9.0}, spread=0.5)

    def measure(pairs):
        return {pair: math.nan if pair[0] == "c" or pair == ("b", 1) else v for pair, v in source(pairs).items()}

    ended = race(measure, ["a", "b", "c"])
    assert ended.best == "a" and ended.decided and "c" in ended.beaten and 1 not in ended.scores["b"]
    nothing = race(lambda pairs: dict.fromkeys(pairs, math.nan), ["a", "b"], seeds=4)
    assert nothing.best is None and not nothing.decided
    with pytest.raises(InputError, match="two arms or more"):
        race(measure, ["a"])


def test_halving_tries_all_once_and_the_better_half_again():
    calls = []

    def measure(trials):
        calls.extend(trials)
        return {trial: math.nan if trial[1] > 2 else -abs(math.log(trial[1] / 0.3)) for trial in trials}

    assert halve(measure, {"x": [0.03, 0.1, 0.3, 1.0, 3.0], "y": [0.5]}) == {"x": 0.3, "y": 0.5}
    assert len(calls) == 5 + 2 and {seed for *_, seed in calls} == {0, 1}
    edge = halve(lambda trials: {t: t[1] for t in trials}, {"x": [0.3, 1.0, 3.0]}, extend=True)
    assert edge == {"x": 30.0}, "two more beyond the end"
    assert halve(lambda trials: dict.fromkeys(trials, math.nan), {"x": [1.0, 2.0]}) == {}


def fixed_design(means, seeds, seed, kind):
    """The t test of all arms on a fixed number of seeds: winner or None."""
    measure = draws(means, seed=seed, kind=kind, spread=0.01 if kind == "accuracy" else 1.0)
    scores = measure([(arm, s) for s in range(seeds) for arm in means])
    table = {arm: {s: scores[arm, s] for s in range(seeds)} for arm in means}
    best = max(table, key=lambda arm: fmean(table[arm].values()))
    return best if all(lead.low > 0 for lead in leads(table, best, higher=True).values()) else None


def simulate(means, kind="normal", repeats=400, **terms):
    """Shares of wrong and of decided races, and runs of a race over those of the fixed design with its most seeds."""
    arms, wrong, decided, runs = list(means), 0, 0, 0
    top, spread = max(means.values()), 0.01 if kind == "accuracy" else 1.0
    unique = list(means.values()).count(top) == 1
    for seed in range(repeats):
        ended = race(draws(means, seed=seed, kind=kind, spread=spread), arms, seeds=64, **terms)
        short = top - means[ended.best] > terms.get("margin", 0.0)
        wrong += ended.decided and (short or (not unique and not terms.get("margin")))
        decided += ended.decided
        runs += sum(map(len, ended.scores.values()))
    return wrong / repeats, decided / repeats, runs / (repeats * 64 * len(arms))


CASES = {
    "two equal arms": ({"a": 0.0, "b": 0.0}, {}),
    "six equal arms": (dict.fromkeys("abcdef", 0.0), {}),
    "two equal arms, margin": ({"a": 0.0, "b": 0.0}, {"margin": 0.5}),
    "one of two better by half a deviation": ({"a": 0.5, "b": 0.0}, {}),
    "one of two better by one": ({"a": 1.0, "b": 0.0}, {}),
    "one of six better by one": ({"a": 1.0, **dict.fromkeys("bcdef", 0.0)}, {}),
    "one of six better by two": ({"a": 2.0, **dict.fromkeys("bcdef", 0.0)}, {}),
    "worse by just more than the margin": ({"a": 0.0, "b": -0.501}, {"margin": 0.5}),
    "two equal arms, heavy tails": ({"a": 0.0, "b": 0.0}, {"kind": "heavy"}),
    "two equal accuracies near 1": ({"a": 0.985, "b": 0.985}, {"kind": "accuracy"}),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_wrong_decisions_are_rare_and_runs_are_saved(case):
    """Printed with -s: the table of docs/lab/compare.md."""
    means, terms = CASES[case]
    repeats = 1000
    wrong, decided, runs = simulate(means, repeats=repeats, **terms)
    kind = terms.get("kind", "normal")
    fixed = [fixed_design(means, 64, seed, kind) for seed in range(repeats)]
    short = [fixed_design(means, 8, seed, kind) for seed in range(repeats)]
    shares = [sum(winner is not None for winner in some) / repeats for some in (fixed, short)]
    print(f"| {case} | {wrong:.1%} | {decided:.0%} | {runs:.2f} | {shares[0]:.0%} | {shares[1]:.0%} |")
    assert wrong <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repeats)
    if max(means.values()) > sorted(means.values())[-2] + 0.9:
        assert decided > 0.9 and runs < 0.5


def test_wrong_decisions_in_a_few_hundred_races():
    assert simulate({"a": 0.0, "b": 0.0}, repeats=150)[0] <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 150)
    wrong, decided, runs = simulate({"a": 2.0, "b": 0.0, "c": 0.0}, repeats=60)
    assert wrong == 0 and decided == 1 and runs < 0.25
