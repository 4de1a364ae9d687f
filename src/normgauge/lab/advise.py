"""`ng.advise`: which normalizer, rate and decay for this network, with evidence, within a budget."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.doctor import checkup
from normgauge.errors import InputError, NormgaugeError
from normgauge.lab.data import Dataset
from normgauge.lab.race import Race, halve, in_words, race
from normgauge.lab.trials import Budget, Setting, Trials, default_norm, split_data
from normgauge.measure.curvature.stable_rate import stable_rate
from normgauge.measure.decisions.drift import drift
from normgauge.measure.signal.signal_propagation import trainable_depth
from normgauge.measure.weights.weight_dynamics import weight_dynamics
from normgauge.objective import Objective, guess_loss
from normgauge.records import Chart, Reading, plain
from normgauge.results import Result, instrument
from normgauge.stats import Interval, above_chance
from normgauge.symmetry import param_groups, symmetries

MOST = 7  # recommendations
STEP = 4.0  # between rates that are tried: a factor of 2 to either side costs little
# What is tried, by what the network reads; further ones only where the first are refused or the same.
NORMS = {"images": ("batch", "group", "none", "layer", "rms"), "tokens": ("layer", "rms", "none")}
NORMS["vectors"] = ("batch", "layer", "none", "rms", "group")
SMALL_BATCH = 8
SWEPT = ("batch", "group", "layer", "batch_renorm", "ghost_batch")
FEWEST = 8  # runs under which no race says anything
TUNING, JUDGING, DECAYING = 10_000, 20_000, 30_000  # first seeds: what is judged is never what was tuned
MARGIN = 0.5  # points of accuracy that are not worth a run
ACTS = 0.05  # share by which decay must shrink weights in a training to matter
STRONG = 0.5  # the share by which the decay that is tried shrinks them
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
THRESHOLD, OPEN = "largest stable rate", "Normalizer, rate and decay"
Kind = Literal["proved", "predicted", "measured here", "contested"]


@dataclass(frozen=True)
class Recommendation:
    """One thing to change.

    Attributes:
        text: what to do, with the number behind it.
        kind: "proved" (a number shows the fault, or a symmetry was certified), "predicted" (by theory from what was
            measured), "measured here" (a race on held-out data) or "contested" (sources disagree).
        effect: how much, with its interval; without ends where nothing was repeated.
        unit: of the effect.
        cost: of following it.
        code: to paste.
    """

    text: str
    kind: Kind
    effect: Interval
    unit: str
    cost: str
    code: str


@dataclass(frozen=True)
class Advice(Result):
    """Recommendations, strongest first: iterate over it, or take `[0]`.

    Attributes:
        recommendations: at most seven.
        keep: what not to change, and why.
        undecided: what could not be decided, and what deciding would cost.
        given: normalizer, rate and decay as they came.
        setting: those to train with: the race's leader, or as given.
        runs: score of every setting that was tried: setting, seeds, mean.
        unit: of the scores.
        race: how it ended; `None` without one.
    """

    recommendations: tuple[Recommendation, ...]
    keep: tuple[str, ...]
    undecided: tuple[str, ...]
    given: Setting
    setting: Setting
    runs: tuple[dict[str, Any], ...]
    unit: str
    race: Race | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[Recommendation]:
        return iter(self.recommendations)

    def __len__(self) -> int:
        return len(self.recommendations)

    def __getitem__(self, place: int) -> Recommendation:
        return self.recommendations[place]

    def __bool__(self) -> bool:
        return True  # advice to change nothing is still advice

    def readings(self) -> tuple[Reading, ...]:
        """Return how many recommendations there are, and what each would bring."""
        readings = [Reading("recommendations", len(self), "estimate")]
        for item in self:
            half = None if math.isnan(item.effect.low) else (item.effect.high - item.effect.low) / 2
            name, why = f"effect in {item.unit}", "not measured"
            readings.append(Reading.measured(name, item.effect.mean, "estimate", uncertainty=half, why=why))
        return tuple(readings)

    def _title(self) -> str:
        return f"Advice: {self.setting}" + (" (as given)" if self.setting == self.given else f"; given {self.given}")

    def _rows(self) -> list[dict[str, Any]]:
        return [{**vars(item), "effect": str(item.effect)} for item in self]

    def _meaning(self) -> str:
        if not self.recommendations:
            return f"0 recommendations: keep {self.given}. {' '.join(self.undecided)[:200]}".strip()
        first, more = self[0], f" ({len(self) - 1} more)" if len(self) > 1 else ""
        return f"First: {first.text[:240]}{more} Effect {first.effect} {first.unit}, {first.kind}."

    def __str__(self) -> str:
        """Return every recommendation with number, kind, effect, cost and code; then what to keep and what is open."""
        lines = [self._title(), ""]
        for number, item in enumerate(self, 1):
            lines += [f"{number}. {item.text}"]
            lines += [f"   {item.kind}; effect {item.effect} {item.unit}; cost: {item.cost}"]
            lines += [f"       {line}" for line in item.code.splitlines()] + [""]
        for head, some in (("Keep:", self.keep), ("Not decided:", self.undecided)):
            lines += [head, *(f"  - {sentence}" for sentence in some), ""] if some else []
        return "\n".join([*lines, self.meaning(), self._footer()])

    def document(self) -> dict[str, Any]:
        """Return everything as data that JSON can write."""
        own = {"recommendations": self._rows(), "keep": self.keep, "undecided": self.undecided, "runs": self.runs}
        settings = {"given": self.given._asdict(), "setting": self.setting._asdict()}
        return plain({"format": "normgauge.advice", "version": 1, "status": self.status, **own, **settings})

    def _notes(self) -> str:
        return f"{sum(row['seeds'] for row in self.runs)} runs kept; scores in {self.unit}"

    def chart(self) -> Chart:
        """Return the mean score of every setting that was tried."""
        from normgauge.charts import bars

        rows = [{"setting": str(row["setting"]), "value": row["mean"]} for row in self.runs if row["seeds"]]
        return bars(rows or [{"setting": str(self.given), "value": 0.0}], x="setting", y="value", title=self.unit)


@instrument
def advise(
    model_or_factory: Any,
    data: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    budget: str | float = "5 minutes",
    steps: int = 200,
    batch: int | None = None,
    norm: str | None = None,
    norms: Sequence[str] | None = None,
    out: str | Path | None = None,
) -> Advice:
    """Say what to change in a training: what is proved or predicted first, and races where theory cannot decide.

    Without training: the doctor's findings (non-iid batches and leaks among them), where weight decay belongs, the
    stability threshold of the optimizer, how far decay can act in so many steps, trainable depth, drift of stored
    statistics. By training, while the budget lasts: the rate of each normalizer by halving on seeds of their own, a
    group-sequential race of the best two settings against the one given, another decay where decay can act, and a
    sweep over batch sizes where the batch is small. Scores are of held-out data: accuracy in points, or minus the loss.

    Kind: each recommendation says its own. Cost: about 40 runs, within the budget. The model is left as it was.

    Args:
        model_or_factory: a model (arms are made by `ng.swap_norms`, every run starts from its weights), or a function
            `factory(norm)` (every seed draws new weights).
        data: `(inputs, targets)`, batches of them (their size is the batch size), a `Dataset` or its name.
        loss: `loss(output, target)`; cross entropy for labels and squares otherwise if left out.
        optimizer: the one you train with, or `optimizer(model)`; torch's AdamW if left out.
        budget: "5 minutes", "90 s", "40 runs" or seconds, of the races.
        steps: of a training run: as many as you will train, or as few as still tell.
        batch: samples per step.
        norm: the factory's normalizer as given; by default that of its signature, else "batch".
        norms: to try instead; four common ones that the network takes if left out.
        out: folder in which runs are kept: the same call goes on where it was.

    Raises:
        InputError: for a factory that ignores `norm`, a network that does not train, a budget that is none.
        DataError: for data that are not finite, no pairs, or too few.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.99), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        >>> found = advise(net, (x, (x[:, 0] > 0).long()), budget="0 runs")
        >>> found[0].kind, "momentum" in found[0].text, found.undecided[0][:30]
        ('predicted', True, 'Normalizer, rate and decay: th')

    References: kosson2024, cohen2022
    """
    allowed = Budget(budget)
    if not callable(model_or_factory):
        step = "Pass a model or factory(norm)"
        raise InputError("advise", "it takes a model or a factory", type(model_or_factory).__name__, step)
    parts, size = split_data(data, batch)
    if steps < 1 or size < 1:
        raise InputError("advise", "steps and batch are positive", f"steps={steps}, batch={size}", "Correct them")
    file = None if out is None else Path(out) / "advise.json"
    own = norm or default_norm(model_or_factory)
    how: dict[str, Any] = {"norm": own, "budget": allowed, "file": file}
    trials = Trials(model_or_factory, parts, optimizer, loss or guess_loss, steps, size, **how)
    own_order = not isinstance(data, (str, tuple, Dataset)) and not isinstance(next(iter(data)), Tensor)
    several = trials.objective(4)
    first = list(itertools.islice(data, 64)) if own_order else [batch for _, batch in several.batches()]
    loader = first[:: max(1, len(first) // 8)]  # far apart: neighbours in sorted data are alike
    desk = _Desk(trials, trials.objective(), several, loader)
    for look in (desk.examine, desk.place_decay, desk.find_threshold, desk.measure_depth, desk.measure_drift):
        desk.attempt(look)
    setting, ended = desk.race(norms)
    table: dict[Setting, list[float]] = {}
    for (tried, _), score in trials.scores.items():
        table.setdefault(tried, []).append(score)
    rows = tuple({"setting": s, "seeds": len(v), "mean": fmean(v)} for s, v in table.items())
    order = {"measured here": 0, "proved": 1, "predicted": 2, "contested": 3}
    ranked = sorted(desk.advice, key=lambda item: order[item.kind])[:MOST]
    return Advice(
        recommendations=tuple(ranked), keep=tuple(desk.keep), undecided=tuple(desk.undecided), given=trials.given,
        setting=setting, runs=rows, unit=desk.unit, race=ended, mode="train",
        status="nonconverged" if desk.broken else "ok", sentence=desk.broken,
    )  # fmt: skip


@dataclass
class _Desk:
    """What was found so far: recommendations, what to keep, what is open."""

    trials: Trials
    objective: Objective
    several: Objective
    loader: list[Any]
    advice: list[Recommendation] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    broken: str = ""
    limit: float = math.inf

    @property
    def unit(self) -> str:
        return "points of held-out accuracy" if self.trials.classes else "held-out loss (lower by)"

    def attempt(self, look: Callable[[], None]) -> None:
        """Look, and where an instrument refuses say what stays unknown."""
        try:
            look()
        except (NormgaugeError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0][:200].rstrip(".")
            self.undecided.append(f"{look.__name__.replace('_', ' ').capitalize()}: {said}.")

    # -- without training ------------------------------------------------------------------------------------------

    def examine(self) -> None:
        """Take over the doctor's errors and warnings; the loader's own batches show whether they are sorted."""
        found = checkup(self.objective, optimizer=self.trials.template, loader=self.loader)
        for group in [group for group in found.groups() if group[0].severity != "info"][:3]:
            first, more = group[0], f" and {len(group) - 1} more" if len(group) > 1 else ""
            text, _, code = first.remedy.partition("\n")
            kind: Kind = "proved" if first.severity == "error" or first.exactness == "exact" else "predicted"
            said = f"{first.title} at {first.where}{more}: {first.evidence}. {text}"
            effect = Interval(first.effect, math.nan, math.nan, 1)
            cost = {"exact": "none, no output changes", "state_only": "none, stored numbers change"}
            unit, price = f"measured by {first.id}", cost.get(first.exactness, "retrain")
            self.advice.append(Recommendation(said, kind, effect, unit, price, code or text))
        if found.healthy:
            self.keep.append(f"The normalizers: {len(found.checks)} checks found no error and no warning.")

    def travel(self, setting: Setting) -> float:
        """Return the sum of the rates of all steps, momentum counted: decay shrinks weights by exp(-decay travel)."""
        memory = float(self.trials.template.param_groups[0].get("momentum") or 0.0)
        return setting.rate * self.trials.steps / (1 - memory)

    def place_decay(self) -> None:
        """Say which tensors decay belongs to, and whether it can act at all in so many steps."""
        trials, given = self.trials, self.trials.given
        if not given.decay or self.coupled():
            return
        free = symmetries(self.objective)
        groups = param_groups(self.objective, {"weight_decay": given.decay}, symmetries=free)
        held = {id(p): float(g.get("weight_decay") or 0.0) for g in trials.template.param_groups for p in g["params"]}
        named = dict(trials.network.named_parameters())
        wrong = [n for n, (_, _, decay, _) in groups.reasons.items() if not decay and held.get(id(named[n]))]
        dynamics = weight_dynamics(self.several, trials.template, symmetries=free)
        slow = max((b.steps for b in dynamics.blocks if b.scale_invariant and math.isfinite(b.steps)), default=0.0)
        share = 1 - math.exp(-given.decay * self.travel(given))
        if share < ACTS:
            settle = f"; norms need {slow:.2g} steps to settle" if slow else ""
            said = f"in {trials.steps} steps it shrinks weights by {share:.2g}, under {ACTS:g}{settle}"
            self.keep.append(f"Weight decay {given.decay:g}: {said}; a little more, less or elsewhere changes nothing.")
        elif wrong:
            text = f"Take weight decay off {len(wrong)} gains, shifts and biases ({wrong[0]} first): {given.decay:g} "
            text += f"shrinks them by {share:.2g} in {trials.steps} steps and limits nothing."
            code = f"groups = ng.param_groups(objective, {{'weight_decay': {given.decay:g}}})\n"
            code += f"optimizer = torch.optim.{type(trials.template).__name__}(groups, lr={given.rate:g})"
            effect = Interval(share, share, share, 1)
            self.advice.append(Recommendation(text, "contested", effect, "of their size", "one line", code))

    def find_threshold(self) -> None:
        """Compare the rate with the largest stable one on a batch."""
        found, used = stable_rate(self.objective, self.trials.template, tol=0.2), self.trials.given.rate
        self.limit = found.limit
        if not math.isfinite(found.limit):
            return
        low, high = found.observed_low, found.observed_high
        inside = low <= found.limit <= high
        effect = Interval(found.limit, *((low, high) if inside else (math.nan, math.nan)), len(found.runs))
        if used > found.limit:
            text = f"Lower the rate from {used:g} to {found.rate:.2g}: it is stable up to {found.limit:.2g} here."
            code = f"for group in optimizer.param_groups:\n    group['lr'] *= {found.rate / used:.3g}"
            self.advice.append(Recommendation(text, "predicted", effect, THRESHOLD, "retrain", code))
        else:
            share = used / found.limit
            self.keep.append(f"Stability: the rate {used:g} is {share:.2g} of the largest stable one, {effect}.")

    def measure_depth(self) -> None:
        """Compare the depth with the one gradients survive, in networks of some depth."""
        if sum(p.ndim > 1 for p in self.trials.network.parameters()) < 4:
            return
        found = trainable_depth(self.trials.network, next(iter(self.objective.batches()))[1][0])
        if found.layers > found.depth:
            text = f"Make gradients even by a normalizer, skips or other starts: {found.layers} layers, and beyond "
            text += f"{found.depth:.3g} their squares differ by {found.limit:g}."
            code, unit = "print(ng.trainable_depth(model, inputs))", "times per layer, squared gradients"
            effect = Interval(found.growth, math.nan, math.nan, 1)
            self.advice.append(Recommendation(text, "predicted", effect, unit, "retrain", code))

    def measure_drift(self) -> None:
        """Say how far held-out data are from stored statistics, where there are any in use."""
        counts = (int(getattr(m, "num_batches_tracked", None) or 0) for m in self.trials.network.modules())
        if any(counts):
            self.keep.append(f"Stored statistics: {drift(self.trials.network, [self.trials.data[1]]).meaning()}")

    # -- races -----------------------------------------------------------------------------------------------------

    def arms(self, norms: Sequence[str] | None) -> list[str]:
        """Return normalizers to try, the given one first, that the network takes on these data."""
        trials = self.trials
        some = trials.data[0][0][: min(trials.batch, len(trials.data[0][0]))]
        reads = "images" if some.ndim > 3 else "vectors" if some.is_floating_point() else "tokens"
        wanted = list(norms or NORMS[reads])
        kept, seen, refused = [trials.norm], {str(trials.network)}, {}
        for norm in [norm for norm in wanted if norm != trials.norm]:
            try:
                network = trials.build(norm, 0)
                with torch.no_grad():
                    network(some)
            except REFUSALS as error:
                refused[norm] = str(error).partition("\n")[0][:120].rstrip(".")
                continue
            if str(network) not in seen:
                kept.append(norm)
                seen.add(str(network))
        tried = len(wanted) - (trials.norm in wanted)
        if refused and len(refused) == tried:
            names, why = ", ".join(refused), next(iter(refused.values()))
            self.undecided.append(f"Another normalizer: the network takes none of {names} ({why}).")
        elif tried and len(seen) == 1 and not isinstance(trials.subject, nn.Module):
            rule = "the factory builds another network for another norm"
            raise InputError("advise", rule, "the same one each time", "Use the argument norm")
        return kept if norms else kept[:4]

    def race(self, norms: Sequence[str] | None) -> tuple[Setting, Race | None]:
        """Tune, judge, and say what to train with."""
        trials, given = self.trials, self.trials.given
        arms = self.arms(norms)
        trials.measure([(given, TUNING)])  # the pace
        left = trials.budget.left(trials.pace) + len(trials.scores)
        if left < FEWEST:
            need = f", about {in_words(40 * trials.pace)}" if trials.pace else ""
            self.undecided.append(f"{OPEN}: the budget allows {left:.0f} runs, and a race needs 40{need}.")
            return given, None

        def tune(wanted: Sequence[tuple[str, float, int]]) -> dict[tuple[str, float, int], float]:
            keys = {trial: (Setting(trial[0], trial[1], given.decay), trial[2]) for trial in wanted}
            scores = trials.measure(list(keys.values()))
            return {trial: scores[key] for trial, key in keys.items() if key in scores}

        lowest = given.rate if STEP * given.rate <= self.limit else given.rate / STEP  # room above, or none
        first = halve(tune, {trials.norm: [lowest * STEP**k for k in range(3)]}, first_seed=TUNING, extend=True)
        near = [first.get(trials.norm, given.rate) * STEP**k for k in (-1, 0, 1)]
        others = arms[1 : 1 + max(0, int((trials.budget.left(trials.pace) - 2 * FEWEST) / 3))]
        halve(tune, dict.fromkeys(others, near), first_seed=TUNING)
        tuned = {s: {n: v for (t, n), v in trials.scores.items() if t == s and n < JUDGING} for s, _ in trials.scores}
        tuned = {s: v for s, v in tuned.items() if v and not s.batch and not any(map(math.isnan, v.values()))}
        # some seeds are harder, and not all settings had both: scores count relative to a setting that did
        anchor = tuned.get(Setting(trials.norm, first.get(trials.norm, given.rate), given.decay), {})
        ranked = sorted((-fmean(v - anchor.get(n, 0.0) for n, v in own.items()), s) for s, own in tuned.items())
        best = [setting for _, setting in ranked if setting != given][:2]
        if not best or self.at_chance(max(fmean(scores.values()) for scores in tuned.values())):
            return given, None
        ended = self.judge([given, *best], JUDGING)
        setting = self.try_decay(self.conclude(ended, given))
        if trials.batch <= SMALL_BATCH and norms is None:
            self.sweep(setting)
        return setting, ended

    def at_chance(self, score: float) -> bool:
        """Say whether the best score is no better than guessing, which no race can repair."""
        targets = self.trials.data[1][1]
        if not self.trials.classes:
            return False
        chance = float(targets.flatten().bincount().max()) / targets.numel()
        if above_chance(score / 100, len(targets), chance):
            return False
        self.broken = f"the best of all settings has {score:.3g} % on held-out data, and guessing {100 * chance:.3g} %"
        self.undecided.append(f"{OPEN}: nothing was learned; train more steps, or check the targets.")
        return True

    def judge(self, settings: Sequence[Setting], first_seed: int) -> Race:
        """Race settings on seeds of their own, as many as the budget allows."""
        names = {str(setting): setting for setting in settings}

        def measure(pairs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float]:
            scores = self.trials.measure([(names[name], seed) for name, seed in pairs])
            return {(str(s), seed): value for (s, seed), value in scores.items()}

        margin = MARGIN if self.trials.classes else 0.0
        return race(measure, list(names), first_seed=first_seed, margin=margin, seeds=8)

    def conclude(self, ended: Race, given: Setting) -> Setting:
        """Turn the end of a race into a recommendation, or into what to keep and what is open."""
        trials = self.trials
        if ended.best is None or not ended.seeds:
            self.undecided.append(f"The rate: the race has no look yet; it needs {trials.cost(16)}.")
            return given
        setting = next(s for s, _ in trials.scores if str(s) == ended.best)
        if setting.rate >= given.rate > self.limit:  # the threshold is of the start, and a run goes past it
            self.advice = [item for item in self.advice if item.unit != THRESHOLD]
            self.keep.append(f"A rate over the threshold {self.limit:.2g} of the start: {setting.rate:g} trains best.")
        lead = ended.leads.get(str(given))
        if lead is not None and lead.n and not lead.low > 0:
            self.keep.append(f"Normalizer and rate ({given}): {setting} leads by {lead}, which proves nothing.")
            setting = given
        elif setting == given:
            ahead = min((lead.mean for lead in ended.leads.values()), default=0.0)
            self.keep.append(f"Normalizer and rate ({given}): ahead of others by {ahead:.2g} {self.unit} or more.")
        else:
            effect = ended.leads[str(given)]
            names = [name for name in ("rate", "decay") if getattr(setting, name) != getattr(given, name)]
            changes = [f"{name} {getattr(setting, name):g}" for name in names]
            changes = ([f"normalizer {setting.norm!r}"] if setting.norm != given.norm else []) + changes
            means = [fmean(ended.scores[name].values() or [math.nan]) for name in (ended.best, str(given))]
            text = f"Train with {', '.join(changes)}: it beats the setting given, {means[0]:.4g} to {means[1]:.4g} "
            text += f"on {effect.n} seeds." if effect.n else "which diverged."
            self.advice.append(Recommendation(text, "measured here", effect, self.unit, "retrain", self.code(setting)))
        if not ended.decided:
            rest = [name for name in ended.leads if name not in ended.beaten]
            self.undecided.append(f"{ended.best} or {', '.join(rest)}: deciding costs {ended.cost_of_deciding()}.")
        return setting

    def code(self, setting: Setting) -> str:
        """Return what makes a setting of the one given."""
        subject, kind = self.trials.subject, type(self.trials.template).__name__
        made = f"torch.optim.{kind}(model.parameters(), lr={setting.rate:.4g}, weight_decay={setting.decay:.4g})"
        build = f"model = {getattr(subject, '__name__', 'factory')}({setting.norm!r})"
        if isinstance(subject, nn.Module):
            build = f"model = ng.swap_norms(model, {setting.norm!r}, example=inputs).model"
        return f"{build}\noptimizer = {made}" if setting.norm != self.trials.norm else f"optimizer = {made}"

    def try_decay(self, setting: Setting) -> Setting:
        """Race the setting against a decay that acts in so many steps, and change it only beyond doubt."""
        other = setting._replace(decay=float(f"{-math.log(1 - STRONG) / self.travel(setting):.2g}"))
        if other.decay <= 2 * setting.decay or self.coupled():
            return setting
        if self.trials.budget.left(self.trials.pace) < FEWEST:
            said = f"Weight decay {other.decay:g} in the place of {setting.decay:g}"
            self.undecided.append(f"{said}: costs {self.trials.cost(FEWEST)}.")
            return setting
        ended = self.judge([setting, other], DECAYING)
        lead = next(iter(ended.leads.values()), Interval(math.nan, math.nan, math.nan, 0))
        if ended.best == str(other) and lead.low > 0:
            text = f"Raise weight decay from {setting.decay:g} to {other.decay:g}: it halves weights in this training."
            self.advice.append(Recommendation(text, "measured here", lead, self.unit, "retrain", self.code(other)))
            return other
        said = f"{other.decay:g} is not better beyond doubt ({ended.best} ahead by {lead})"
        self.keep.append(f"Weight decay {setting.decay:g}: {said}.")
        return setting

    def coupled(self) -> bool:
        """Say whether there is no decay, or one through Adam's denominator: its share is not known beforehand."""
        kind, group = type(self.trials.template), self.trials.template.param_groups[0]
        own = group.get("decoupled_weight_decay") or not issubclass(kind, torch.optim.Adam)
        return "weight_decay" not in group or not (own or issubclass(kind, torch.optim.AdamW))

    def sweep(self, setting: Setting) -> None:
        """Try normalizers at this batch size and four times it, one seed each, where the budget still allows."""
        trials = self.trials
        norms = [norm for norm in self.arms(SWEPT) if norm in SWEPT]
        wanted = [(setting._replace(norm=n, batch=b), TUNING) for b in (trials.batch, 4 * trials.batch) for n in norms]
        missing = [key for key in wanted if key not in trials.scores]
        if len(missing) > trials.budget.left(trials.pace):
            sizes = f"{trials.batch} and {4 * trials.batch}"
            self.undecided.append(f"Batch sizes {sizes}: a sweep over normalizers costs {trials.cost(len(missing))}.")
            return
        scores = trials.measure(wanted)
        words = [f"{s.norm} {scores[s, TUNING]:.3g} at {s.batch}" for s, _ in wanted]
        self.keep.append(f"Batch size {trials.batch}, one seed each at rate {setting.rate:.3g}: {', '.join(words)}.")
