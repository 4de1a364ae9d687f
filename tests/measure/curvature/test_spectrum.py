"""`ng.spectrum` against dense eigenvalues, and its manners."""

import dataclasses
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, OutOfMemoryError, UnknownNameError
from normgauge.linalg import DenseOperator, eigenpairs
from normgauge.testing import check_result
from reference.curvature import dense_hessian, hand_written


def with_spectrum(values, seed=0):
    """A symmetric matrix with the given eigenvalues in random directions."""
    values = torch.as_tensor(values, dtype=torch.float64)
    random = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    frame, _ = torch.linalg.qr(random)
    matrix = (frame * values) @ frame.T
    return (matrix + matrix.T) / 2


def bn_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def batch(size=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_top_and_bottom_are_those_of_the_dense_hessian(mode):
    model, data = bn_net(), batch()
    objective = ng.Objective(model, nn.functional.cross_entropy, data, mode=mode)
    found = ng.spectrum(objective, top=4, bottom=3, tol=1e-9)
    exact = torch.linalg.eigvalsh(dense_hessian(hand_written(model), nn.functional.cross_entropy, [data], mode))
    torch.testing.assert_close(torch.tensor(found.top), exact.flip(0)[:4], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.tensor(found.bottom), exact[:3], rtol=1e-9, atol=1e-12)
    assert found.status == "ok" and max(found.residuals) <= 1e-9


def test_residuals_are_the_true_ones():
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    found = ng.spectrum(objective, top=3, tol=1e-3)
    for value, vector, residual in zip(found.top, found.vectors, found.residuals, strict=True):
        true = (objective.hessian() @ vector - value * vector).norm() / abs(value)
        assert float(true) == pytest.approx(residual, rel=1e-6, abs=1e-12)
        assert residual <= 1e-3


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 30,
        [5.0, 5.0, 4.0, 3.0, 3.0, 2.0] + [0.01] * 60,
        [3.0, 2.0, 1.0] + [0.0] * 40,
        [0.0] * 10,
        [-1.0, -2.0, -2.0, -3.0],
        torch.linspace(-3, 1, 80).tolist(),
    ],
    ids=["identity", "copies", "low rank", "zero", "negative", "spread"],
)
@pytest.mark.parametrize("memory", [None, 18 * 80 * 8, 12 * 80 * 8])
def test_known_spectra_with_their_copies(values, memory):
    matrix = with_spectrum(values)
    found = eigenpairs(DenseOperator(matrix), top=3, bottom=1, tol=1e-9, memory=memory)
    exact = sorted(values, reverse=True)
    assert found.status == "ok"
    torch.testing.assert_close(torch.tensor(found.top), torch.tensor(exact[:3]), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.tensor(found.bottom), torch.tensor(exact[-1:]), rtol=0, atol=1e-10)
    gram = found.vectors[:3] @ found.vectors[:3].T
    torch.testing.assert_close(gram, torch.eye(3), rtol=0, atol=1e-9)


def test_restarted_basis_gives_the_same_values():
    matrix = with_spectrum([6.0, 5.8, 5.5, *torch.linspace(0, 5, 200).tolist()])
    free = eigenpairs(DenseOperator(matrix), top=3, tol=1e-8)
    tight = eigenpairs(DenseOperator(matrix), top=3, tol=1e-8, memory=17 * 203 * 8)
    assert free.restarts == 0 < tight.restarts
    assert tight.status == "ok"
    torch.testing.assert_close(torch.tensor(tight.top), torch.tensor(free.top), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("top", "rows"), [(1, 4), (2, 8), (3, 10), (5, 14)])
def test_the_smallest_basis_that_is_accepted_converges(top, rows):
    matrix = with_spectrum([9.0, 7.0, 7.0, 6.0, 5.5, *torch.linspace(0, 5, 200).tolist()])
    found = eigenpairs(DenseOperator(matrix), top=top, tol=1e-6, memory=rows * 205 * 8)
    assert found.status == "ok"
    assert found.top == pytest.approx([9.0, 7.0, 7.0, 6.0, 5.5][:top], rel=1e-6)
    with pytest.raises(OutOfMemoryError, match=rf"{rows} vectors of 205 entries.*pass memory={rows * 205 * 8}"):
        eigenpairs(DenseOperator(matrix), top=top, memory=rows * 205 * 8 - 1)


def test_the_default_budget_is_kept_and_said_before_the_work(monkeypatch):
    class Huge(DenseOperator):
        def __init__(self):
            super().__init__(torch.eye(2))
            self.shape = (101_000_000, 101_000_000)

        def _matvec(self, vector):
            raise AssertionError("the work has begun")

    monkeypatch.setattr("normgauge.linalg.lanczos.machine_memory", lambda device: 16 << 30)
    with pytest.raises(
        OutOfMemoryError, match=r"need 7\.53 GiB. Got a quarter of the machine's, 4 GiB.*memory=8080000000"
    ):
        eigenpairs(Huge(), top=3)
    monkeypatch.setattr("normgauge.linalg.lanczos.machine_memory", lambda device: 64 << 30)
    with pytest.raises(AssertionError, match="the work has begun"):
        eigenpairs(Huge(), top=1)


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(-10, 10), min_size=2, max_size=25),
    seed=st.integers(0, 5),
    top=st.integers(0, 3),
    bottom=st.integers(0, 3),
)
def test_any_small_spectrum(values, seed, top, bottom):
    top, bottom = min(top, len(values)), min(max(bottom, 1), len(values))
    found = eigenpairs(DenseOperator(with_spectrum(values, seed)), top=top, bottom=bottom, tol=1e-6, seed=seed)
    exact = torch.tensor(sorted(values), dtype=torch.float64)
    scale = float(exact.abs().max())
    got = torch.tensor(found.top + found.bottom, dtype=torch.float64)
    wanted = torch.cat([exact.flip(0)[:top], exact[:bottom]])
    # Of many copies of several eigenvalues one may stay unfound: then the result must say so.
    assert found.status == "nonconverged" or float((got - wanted).abs().max()) <= 1e-6 * scale + 1e-12


def test_a_sequence_that_closes_up_to_rounding_is_not_taken_for_an_asymmetric_operator():
    found = eigenpairs(DenseOperator(with_spectrum([1.0, 0.5, 0.5], 4)), bottom=3, tol=1e-6, seed=4)
    assert found.status == "ok" and found.bottom == pytest.approx((0.5, 0.5, 1.0), abs=1e-12)


def test_equal_seeds_give_equal_results_and_leave_the_global_stream():
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    state = torch.get_rng_state()
    first, second = (ng.spectrum(objective, top=2, seed=5) for _ in range(2))
    assert first == second
    assert torch.equal(first.vectors, second.vectors)
    assert torch.equal(state, torch.get_rng_state())


def test_warm_start_needs_fewer_products():
    matrix = with_spectrum([10.0, 9.0, 8.0, *torch.linspace(-1, 7, 300).tolist()])
    shifted = matrix + 1e-3 * with_spectrum(torch.linspace(-1, 1, 303), seed=1)
    cold = eigenpairs(DenseOperator(shifted), top=3)
    before = eigenpairs(DenseOperator(matrix), top=3)
    warm = eigenpairs(DenseOperator(shifted), top=3, start=before.vectors)
    assert warm.status == "ok" and warm.matvecs < cold.matvecs
    torch.testing.assert_close(torch.tensor(warm.top), torch.tensor(cold.top), rtol=1e-5, atol=0)


class Stops(DenseOperator):
    """Raises Ctrl-C inside the product of a given number."""

    def __init__(self, matrix, at):
        super().__init__(matrix)
        self.count, self.at = 0, at

    def _matvec(self, vector):
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return super()._matvec(vector)


def interrupted(action):
    with pytest.raises(KeyboardInterrupt) as stop:
        action()
    return stop.value.partial


def stop_at(count):
    def stop(products, residuals):
        if products == count:
            raise KeyboardInterrupt

    return stop


def test_ctrl_c_arrives_and_carries_what_converged():
    matrix = with_spectrum([100.0, *torch.linspace(0, 1, 400).tolist()])
    for partial, products in (
        (interrupted(lambda: eigenpairs(DenseOperator(matrix), top=5, progress=stop_at(12))), 12),
        (interrupted(lambda: eigenpairs(Stops(matrix, 12), top=5)), 11),
    ):
        assert partial.status == "nonconverged" and f"interrupted after {products} products" in partial.sentence
        assert 1 <= len(partial.top) < 5
        assert partial.top[0] == pytest.approx(100.0, rel=1e-6)


def test_ctrl_c_before_anything_converged_carries_nothing():
    operator = with_spectrum(torch.linspace(0, 1, 50))
    for stop in (
        lambda: eigenpairs(Stops(operator, 1), top=2),  # before the first product is done there is a row and no value
        lambda: eigenpairs(DenseOperator(operator), top=2, progress=stop_at(1)),
    ):
        partial = interrupted(stop)
        assert partial.top == () and partial.vectors.shape == (0, 50) and "0 of 2" in partial.sentence


def test_ctrl_c_does_not_count_a_largest_eigenvalue_among_the_smallest():
    matrix = with_spectrum([100.0, *torch.linspace(0, 1, 400).tolist()])
    partial = interrupted(lambda: eigenpairs(Stops(matrix, 12), top=1, bottom=1))
    assert partial.top[0] == pytest.approx(100.0, rel=1e-6) and partial.bottom == ()


@pytest.mark.parametrize("memory", [None, 16 * 60 * 8])
def test_ctrl_c_at_any_line_carries_only_true_pairs(memory):
    """A trace function interrupts at every n-th line of the algorithm: restarts, searches and verification included."""
    truth = [9.0, 9.0, 8.0, *torch.linspace(-3, 4, 57).tolist()]
    matrix = with_spectrum(truth)

    def lines(stop_at_line):
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            if "linalg" not in frame.f_code.co_filename or frame.f_code.co_name in ("_converged", "_result"):
                return None
            count += event == "line"
            if event == "line" and count == stop_at_line:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            eigenpairs(DenseOperator(matrix), top=3, tol=1e-6, memory=memory)
        finally:
            sys.settrace(before)
        return count

    whole = lines(-1)
    carried = 0
    for line in range(1, whole, max(1, whole // 120)):
        with pytest.raises(KeyboardInterrupt) as stop:
            lines(line)
        partial = getattr(stop.value, "partial", None)  # before and after the search there is nothing to carry
        if partial is not None:
            for value, vector in zip(partial.top, partial.vectors, strict=True):
                assert torch.linalg.vector_norm(matrix @ vector - value * vector) < 2e-5 * 9
            carried += len(partial.top) > 0
    assert carried > 5


@pytest.mark.parametrize(
    "measure",
    [
        lambda o, **more: ng.spectrum(o, top=2, tol=1e-6, **more),
        lambda o, **more: ng.spectrum(o, top=2, of="quotient", symmetries=ng.symmetries(o), **more),
        lambda o, **more: ng.trace(o, relative_error=1e-9, **more),
        lambda o, **more: ng.density(o, probes=3, iterations=4, **more),
    ],
    ids=["spectrum", "quotient", "trace", "density"],
)
def test_instruments_let_ctrl_c_through_unless_asked_for_what_there_is(measure):
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    for count in (1, 2, 6, 11):
        carried = interrupted(lambda count=count: measure(objective, progress=stop_at(count)))
        if carried is None:  # nothing to give: Ctrl-C comes through all the same
            with pytest.raises(KeyboardInterrupt):
                measure(objective, progress=stop_at(count), partial=True)
            continue
        assert carried.status == "nonconverged" and "interrupted" in carried.sentence
        assert carried.mode == "train" and carried.seed == 0 and carried.cost.products >= count
        given = measure(objective, progress=stop_at(count), partial=True)
        assert str(given) == str(carried)
        check_result(given)


def test_layers_that_were_finished_are_carried(monkeypatch):
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    whole, measure = ng.layer_spectra(objective), ng.spectrum
    calls = []

    def spectrum(part, **settings):
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(part, **settings)

    monkeypatch.setattr("normgauge.measure.curvature.spectrum.spectrum", spectrum)
    given = ng.layer_spectra(objective, partial=True)
    assert list(given.spectra) == list(whole.spectra)[:1] and given.status == "nonconverged"
    assert f"{len(whole.spectra) - 1} of {len(whole.spectra)}" in given.sentence


def test_an_instrument_without_a_partial_result_carries_none_of_another():
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target)

    objective = ng.Objective(bn_net(), loss, batch(), mode="train")
    assert interrupted(lambda: ng.stable_rate(objective)) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_stderr_of_a_terminal_only(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    ng.spectrum(objective, top=2)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("spectrum of hessian" in err) is terminal


def test_a_budget_of_products_ends_as_nonconverged():
    found = eigenpairs(DenseOperator(with_spectrum(torch.linspace(0, 1, 300))), top=3, max_products=8, tol=1e-8)
    assert found.status == "nonconverged" and "give more products" in found.sentence
    assert len(found.top) == 3 and max(found.residuals) > 1e-8


def test_products_that_are_not_symmetric_are_said():
    class Crooked(DenseOperator):
        self_adjoint = True

    operator = Crooked(with_spectrum(torch.linspace(0, 1, 40)))
    operator.matrix = operator.matrix + 0.05 * torch.randn(40, 40).triu()
    operator.self_adjoint = True
    found = eigenpairs(operator, top=2)
    assert found.status == "error" and "not self-adjoint" in found.sentence


def test_an_operator_may_hand_back_its_argument():
    class Identity(DenseOperator):
        def _matvec(self, vector):
            return vector

    found = eigenpairs(Identity(torch.eye(12)), top=3)
    assert found.top == pytest.approx((1.0, 1.0, 1.0)) and found.status == "ok"


def test_a_zero_hessian_is_remarked():
    data = (torch.randn(3, 2), torch.ones(3))
    objective = ng.Objective(nn.Linear(2, 1), lambda out, y: (out[:, 0] - y).abs().mean(), data, mode="eval")
    found = ng.spectrum(objective, top=2)
    assert found.top == (0.0, 0.0) and found.status == "ok" and "piecewise linear" in str(found)


def test_progress_hears_every_step():
    heard = []
    eigenpairs(
        DenseOperator(with_spectrum(torch.linspace(0, 1, 50))), top=2, progress=lambda n, r: heard.append((n, list(r)))
    )
    assert [n for n, _ in heard] == list(range(1, len(heard) + 1))
    assert max(heard[-1][1]) <= 1e-3


def test_float32_reaches_its_tolerance():
    model = bn_net().float()
    x, y = batch()
    objective = ng.Objective(model, nn.functional.cross_entropy, (x.float(), y), mode="train")
    found = ng.spectrum(objective, top=3)
    exact = ng.spectrum(ng.Objective(model.double(), nn.functional.cross_entropy, (x, y), mode="train"), top=3)
    assert found.status == "ok"
    torch.testing.assert_close(torch.tensor(found.top), torch.tensor(exact.top), rtol=1e-4, atol=0)


def test_gauss_newton_of_a_linear_model_is_its_hessian():
    torch.manual_seed(0)
    data = (torch.randn(7, 3), torch.randn(7, 2))
    objective = ng.Objective(nn.Linear(3, 2), nn.functional.mse_loss, data, mode="eval")
    hessian, gauss = (ng.spectrum(objective, top=4, of=of, tol=1e-8) for of in ("hessian", "gauss_newton"))
    torch.testing.assert_close(torch.tensor(hessian.top), torch.tensor(gauss.top), rtol=1e-10, atol=0)
    assert hessian.top[0] == pytest.approx(hessian.top[1])  # two outputs: every eigenvalue comes twice


def test_the_ways_out():
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    found = ng.spectrum(objective, top=2, bottom=1)
    text = str(found)
    assert "mode train" in text.splitlines()[-1] and f"{found.matvecs} products" in text.splitlines()[-1]
    assert list(found.frame()["eigenvalue"]) == [*found.top, *found.bottom]
    assert found.chart().to_dict()["layer"]
    assert [reading.value for reading in found.readings()] == [*found.top, *found.bottom]
    assert dataclasses.is_dataclass(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top": 10**6}, r"top=1000000, bottom=0\. Ask for at most 63"),
        ({"top": 0}, "at least one in all"),
        ({"top": -1}, "top=-1"),
        ({"tol": 1e-17}, r"what torch\.float64 can give"),
        ({"tol": 2.0}, "below 1"),
    ],
)
def test_bad_input_says_the_rule(arguments, message):
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    with pytest.raises(InputError, match=message):
        ng.spectrum(objective, **arguments)


def test_a_basis_that_does_not_fit_is_said():
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    with pytest.raises(OutOfMemoryError, match=r"GiB.*memory=100 bytes.*fewer eigenvalues"):
        ng.spectrum(objective, memory=100)


def test_unknown_curvature_and_foreign_start():
    objective = ng.Objective(bn_net(), nn.functional.cross_entropy, batch(), mode="train")
    with pytest.raises(UnknownNameError, match="Did you mean 'hessian'"):
        ng.spectrum(objective, of="hesian")
    first = ng.spectrum(objective, top=1)
    part = objective.replace(parameters="0.*")
    with pytest.raises(InputError, match="same 30 variables"):
        ng.spectrum(part, start=first)
    with pytest.raises(InputError, match="self-adjoint"):
        eigenpairs(DenseOperator(torch.tensor([[0.0, 1.0], [0.0, 0.0]])))


def test_close_eigenvalues_converge():
    source = torch.Generator().manual_seed(35)
    close = 1 - 0.0015 * torch.rand(15, generator=source, dtype=torch.float64).cumsum(0)
    values = torch.cat([close, torch.randn(45, generator=source, dtype=torch.float64) * 0.1])
    found = eigenpairs(DenseOperator(torch.diag(values)), top=3, bottom=2, tol=1e-3, seed=35)
    assert found.status == "ok"
    assert found.top == pytest.approx(close[:3].tolist(), rel=1e-3)


def planted(seed):
    """A dense spectrum made to mislead: clusters, copies and near-copies 1e-6 to 1e-2 apart, also across place k."""
    source = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=source, dtype=torch.float64)

    def pick(*choices):
        return choices[int(uniform() * len(choices))]

    def near(value):
        return value * (1 - float(10 ** (-6 + 4 * uniform())))

    size, top, tol = pick(40, 80, 150), pick(*range(1, 9)), pick(1e-2, 1e-3, 1e-3, 1e-5)
    decay = 1 / (1 + torch.arange(size).double()), torch.exp(-torch.arange(size) / 10.0).double()
    bulk = pick(torch.zeros(size).double(), 0.3 * uniform(size), torch.linspace(0, 0.9, size).double(), *decay)
    outliers = []
    for _ in range(pick(0, 1, 2, 3, 4, 6)):
        value = 1 + 2 * float(uniform())
        outliers += [value, *([value] * pick(0, 0, 1, 3)), *(near(value) for _ in range(pick(0, 0, 1, 2)))]
    values = torch.cat([torch.tensor(outliers, dtype=torch.float64), bulk]).sort(descending=True).values
    if pick(True, False, False):
        values = torch.cat([values, torch.stack([pick(values[top - 1], near(values[top - 1]))])])
    if pick(True, False, False):
        values = torch.cat([values, -values[: pick(1, 3, 5)] * float(0.2 + uniform())])
    values = values * float(10 ** (-2 + 3 * uniform()))
    return values.sort(descending=True).values, top, pick(0, 0, 1, 3), tol


@pytest.mark.parametrize("rows", [None, 3], ids=["free", "tight"])
def test_status_ok_means_the_outermost_each_to_the_tolerance(rows):
    """Against the planted spectrum, which is that of the dense matrix; one sequence misses copies."""
    unsettled = 0
    for seed in range(60 if rows else 240):
        values, top, bottom, tol = planted(seed)
        memory = None if rows is None else (2 * (top + bottom) + 4 + rows) * len(values) * 8
        matrix = DenseOperator(with_spectrum(values, seed))
        found = eigenpairs(matrix, top=top, bottom=bottom, tol=tol, seed=seed, memory=memory)
        if found.status != "ok":
            unsettled += 1
            continue
        wanted = torch.cat([values[:top], values.flip(0)[:bottom]])
        error = (torch.tensor(found.top + found.bottom, dtype=torch.float64) - wanted).abs()
        assert float((error / wanted.abs().clamp_min(1e-3 * float(values.abs().max()) or 1.0)).max()) <= tol, seed
    assert unsettled <= (12 if rows else 0)


def test_a_warm_start_at_a_lower_eigenvector_still_finds_the_largest():
    """A start that is almost an eigenvector converges at once: to the wrong one."""
    values = torch.cat([torch.tensor([2.0, 1.9]), 0.1 * torch.rand(400, generator=torch.Generator().manual_seed(0))])
    wrong = torch.zeros(402, dtype=torch.float64)
    wrong[1] = 1.0
    for seed in range(30):
        found = eigenpairs(DenseOperator(torch.diag(values.double())), top=1, tol=1e-2, seed=seed, start=wrong)
        assert found.status == "ok" and found.top[0] == pytest.approx(2.0, rel=1e-2)


def test_what_the_budget_does_not_settle_is_said():
    found = eigenpairs(DenseOperator(with_spectrum(torch.linspace(0, 1, 300))), top=3, max_products=40, tol=1e-2)
    assert found.status == "nonconverged" and "whether an eigenvalue was missed" in found.sentence


def test_blocks_without_curvature_are_not_told_a_rate():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    model[1].weight.data.fill_(1e-8)
    data = (torch.randn(8, 2, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64))
    said = ng.layer_spectra(ng.Objective(model, nn.functional.mse_loss, data, mode="eval")).meaning()
    assert "'0' would allow over 1e+06 times that" in said
