"""Products with Hessian, Gauss-Newton, Fisher and Jacobian against dense twins on sixteen networks, both modes."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import DataError, NonFiniteError, NotDifferentiableError, OutOfMemoryError
from normgauge.objective import HessianOperator
from reference.curvature import dense_empirical_fisher, dense_gauss_newton, dense_hessian, dense_jacobian, hand_written
from reference.nets import NETS, net

MODES = ["train", "eval"]


def dense(operator):
    return operator.matmat(torch.eye(operator.shape[1]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_hessian_equals_the_dense_twin_and_is_symmetric(name, mode):
    model, loss, batches = net(name)
    if name == "spectral norm" and mode == "train":
        pytest.skip("in train mode the power iteration is part of the function: tested apart")
    before = copy.deepcopy(model.state_dict())
    ours = dense(ng.Objective(model, loss, batches, mode=mode).hessian())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    twin = dense_hessian(hand_written(model), loss, batches, mode)
    assert float((ours - twin).norm() / twin.norm()) < 1e-12
    assert float((ours - ours.T).norm() / ours.norm()) < 1e-12
    assert float(ours.norm()) > 1e-3  # a Hessian of zeros would pass all of the above


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_blocks_computed_again_change_nothing(name, mode):
    model, loss, batches = net(name)
    before = copy.deepcopy(model.state_dict())
    objective = ng.Objective(model, loss, batches, mode=mode)
    vectors = torch.randn(objective.dimension, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = objective.hessian().matmat(vectors)
    with HessianOperator(objective, memory=1) as operator:
        torch.testing.assert_close(operator.matmat(vectors), whole, rtol=1e-11, atol=1e-13)
        assert all(built[-1] is not None for _, built, _ in operator._graphs()), "a whole graph was kept"
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())


class Reader(nn.Linear):
    """Adds its bias, and another layer's weight where one is lent."""

    lender = ()

    def forward(self, x):
        return x + self.bias + sum(each.weight.sum(0) for each in self.lender)


class Borrower(nn.Module):
    """Has a block that reads a weight it does not own, one whose input is written into later, or dropout."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(4, 4), Reader(4, 4)
        self.second.lender = [self.first] if kind == "lent" else []

    def forward(self, x):
        hidden = self.first(torch.nn.functional.dropout(x, 0.2, self.training))
        out = self.second(hidden).sin()
        return out + (hidden.mul_(2.0) if self.kind == "in place" else hidden)


@pytest.mark.parametrize("kind", ["lent", "in place", "dropout"])
def test_blocks_that_cannot_be_computed_again_are_kept(kind):
    torch.manual_seed(0)
    model, x = Borrower(kind).double(), torch.randn(6, 4, dtype=torch.float64)
    objective = ng.Objective(model, torch.nn.functional.mse_loss, (x, x.cos()), mode="train")
    vector = torch.randn(objective.dimension, dtype=torch.float64)
    with HessianOperator(objective, memory=1) as operator:
        torch.testing.assert_close(operator @ vector, objective.hessian() @ vector, rtol=1e-11, atol=1e-13)
        assert all((built[-1] is None) == (kind != "dropout") for _, built, _ in operator._graphs())


def test_spectral_norm_in_train_mode_is_symmetric():
    """Its power iteration is cut out of the graph, so no difference quotient of the gradient can be the judge."""
    model, loss, batches = net("spectral norm")
    ours = dense(ng.Objective(model, loss, batches, mode="train").hessian())
    assert float((ours - ours.T).norm() / ours.norm()) < 1e-12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["batch norm 1d", "group norm", "no norm, squares", "attention", "several batches"])
def test_output_space_operators_equal_their_dense_twins(name, mode):
    model, loss, batches = net(name)
    objective = ng.Objective(model, loss, batches, mode=mode)
    gauss, fisher, jacobian = objective.gauss_newton(), objective.empirical_fisher(), objective.jacobian()
    ours = dense(gauss), dense(fisher), dense(jacobian)
    transposed = torch.stack([jacobian.rmatvec(row) for row in torch.eye(jacobian.shape[0])])
    hand = hand_written(model)
    twins = [make(hand, loss, batches, mode) for make in (dense_gauss_newton, dense_empirical_fisher, dense_jacobian)]
    for mine, twin in zip(ours, twins, strict=True):
        assert float((mine - twin).norm() / twin.norm()) < 1e-12
    torch.testing.assert_close(transposed, twins[2], rtol=1e-11, atol=1e-13)
    assert float(torch.linalg.eigvalsh(ours[0]).min()) > -1e-12 * float(ours[0].norm())


@pytest.mark.parametrize("name", ["attention", "lstm", "gru", "batch norm 2d", "several batches"])
def test_float32_products_agree_with_float64(name):
    model, loss, batches = net(name)
    wide = ng.Objective(model, loss, batches, mode="train")
    direction = torch.randn(wide.dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = wide.hessian() @ direction
    narrow = ng.Objective(copy.deepcopy(model).float(), loss, [(x.float(), y) for x, y in batches], mode="train")
    found = narrow.hessian() @ direction.float()
    assert found.dtype == torch.float32
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_memory_budget_changes_work_and_not_results(kind):
    model, loss, batches = net("several batches")
    objective = ng.Objective(model, loss, batches, mode="train")
    operator = type(getattr(objective, kind)())
    vector = torch.randn(objective.dimension)
    kept, rebuilt = operator(objective), operator(objective, memory=0)
    one_graph = operator(objective, memory=kept_bytes(kept, vector) // 2)
    products = [[each @ vector for _ in range(3)][-1] for each in (kept, rebuilt, one_graph)]
    torch.testing.assert_close(products[1], products[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(products[2], products[0], rtol=1e-12, atol=1e-14)
    assert (kept.builds, rebuilt.builds) == (3, 9)
    assert 3 < one_graph.builds < 9


def kept_bytes(operator, vector):
    from normgauge.objective._diagnose import graph_bytes

    operator @ vector
    total = sum(graph_bytes(operator._graph_tensors(built)) for built, _ in operator._kept.values())
    assert total > 0
    operator.close()
    operator.builds = 0
    return total


def test_graphs_are_freed_on_exit_and_on_error():
    model, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train")
    with objective.hessian() as operator:
        operator @ torch.ones(objective.dimension)
        leaf = weakref.ref(operator._kept[0][0][0][0])
        assert leaf() is not None
    gc.collect()
    assert leaf() is None

    operator = objective.hessian()
    operator @ torch.ones(objective.dimension)
    leaf = weakref.ref(operator._kept[0][0][0][0])
    with pytest.raises(NonFiniteError, match="batch 0"):
        operator @ torch.full((objective.dimension,), float("inf"))
    gc.collect()
    assert leaf() is None


def test_train_batches_are_not_split_nor_joined():
    model, loss, batches = net("several batches")
    objective = ng.Objective(model, loss, batches, mode="train")
    joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    vector = torch.randn(objective.dimension)
    apart, together = objective.hessian() @ vector, objective.replace(data=joined).hessian() @ vector
    assert float((apart - together).norm() / together.norm()) > 1e-2
    still = objective.replace(mode="eval")
    torch.testing.assert_close(
        still.hessian() @ vector, still.replace(data=joined).hessian() @ vector, rtol=1e-11, atol=1e-13
    )


def test_products_take_vectors_dicts_matrices_and_scipy():
    model, loss, batches = net("layer norm")
    objective = ng.Objective(model, loss, batches, mode="train")
    operator = objective.hessian()
    vector = torch.randn(objective.dimension)
    flat = operator @ vector
    torch.testing.assert_close(objective.flatten(operator @ objective.unflatten(vector)), flat, rtol=0, atol=0)
    torch.testing.assert_close((operator @ torch.stack([vector, -vector], 1))[:, 1], -flat, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.as_tensor(operator.to_scipy() @ vector.numpy()), flat, rtol=0, atol=0)
    jacobian = objective.jacobian().to_scipy()
    left = torch.randn(jacobian.shape[0]).numpy()
    assert float(left @ (jacobian @ vector.numpy())) == pytest.approx(float((jacobian.T @ left) @ vector.numpy()))


def test_a_subset_is_a_principal_block():
    model, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train")
    whole = dense(objective.hessian())
    block = dense(objective.replace(parameters="0.*").hessian())
    torch.testing.assert_close(block, whole[: block.shape[0], : block.shape[0]], rtol=1e-12, atol=1e-14)


# -- closed forms of scale invariance ----------------------------------------------------------------------------


def test_batch_norm_makes_the_hessian_turn_weights_into_minus_the_gradient():
    """w -> L(w) of degree zero gives <w, g> = 0 and H w = -g, for every row of weights before BatchNorm."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=1e-30), nn.Tanh(), nn.Linear(5, 3))
    _, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train")
    values, slopes = objective.parameters, objective.gradient()
    for row in range(5):
        direction = {name: torch.zeros_like(value) for name, value in values.items()}
        direction["0.weight"][row] = values["0.weight"][row]
        product = objective.hessian() @ direction
        expected = torch.zeros_like(slopes["0.weight"])
        expected[row] = -slopes["0.weight"][row]
        torch.testing.assert_close(product["0.weight"], expected, rtol=1e-9, atol=1e-13)
        assert float((values["0.weight"][row] * slopes["0.weight"][row]).sum()) == pytest.approx(0.0, abs=1e-13)
    biased = {name: torch.zeros_like(value) for name, value in values.items()}
    biased["0.bias"][2] = 1.0  # batch norm removes the bias before it: a zero mode
    assert float(objective.flatten(objective.hessian() @ biased).norm()) < 1e-13


def test_curvature_scales_with_the_inverse_square_of_the_weights():
    """For L(c w) = L(w): H(c w) = H(w) / c^2 on the weights' block."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, eps=1e-30), nn.Tanh(), nn.Linear(5, 3))
    _, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train", parameters="0.weight")
    larger = objective.at({"0.weight": 3.0 * objective.parameters["0.weight"]})
    torch.testing.assert_close(9.0 * dense(larger.hessian()), dense(objective.hessian()), rtol=1e-9, atol=1e-12)


# -- bad input ---------------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_a_loss_without_second_derivative_is_said():
    objective = ng.Objective(
        nn.Linear(2, 1), lambda out, _: Once.apply(out).mean(), (torch.ones(3, 2), torch.ones(3)), mode="eval"
    )
    assert float(objective.gradient()["bias"]) != 0.0
    with pytest.raises(NotDifferentiableError, match=r"twice differentiable"):
        objective.hessian() @ torch.ones(3)
    deeper = ng.Objective(
        nn.Linear(2, 1), lambda out, _: Once.apply(out).square().mean(), (torch.ones(3, 2), torch.ones(3)), mode="eval"
    )
    with pytest.raises(NotDifferentiableError, match=r"twice differentiable.*once_differentiable"):
        deeper.hessian() @ torch.ones(3)
    with pytest.raises(NotDifferentiableError, match=r"twice differentiable.*once_differentiable"):
        deeper.gauss_newton() @ torch.ones(3)


def test_a_kernel_without_second_derivative_is_said():
    logits = nn.Linear(4, 5)

    def loss(out, target):
        steps = out.log_softmax(-1).reshape(4, 2, 5)
        return nn.functional.ctc_loss(steps, target, torch.tensor([4, 4]), torch.tensor([2, 2]))

    target = torch.randint(1, 5, (2, 2))
    objective = ng.Objective(logits, loss, (torch.randn(8, 4), target), mode="eval")
    with pytest.raises(NotDifferentiableError, match=r"twice differentiable.*ctc"):
        objective.hessian() @ torch.ones(objective.dimension)


def test_a_second_derivative_lost_in_silence_is_said():
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.value = x.detach()
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.value * grad

    data = (torch.ones(3, 2), torch.ones(3))
    objective = ng.Objective(nn.Linear(2, 1), lambda out, _: Silent.apply(out).mean(), data, mode="eval")
    with pytest.raises(NotDifferentiableError, match="without a graph"):
        objective.hessian() @ torch.ones(3)


@pytest.mark.parametrize("loss", [lambda out, _: out.max(), lambda out, y: (out[:, 0] - y).abs().mean()])
def test_a_piecewise_linear_loss_has_the_zero_hessian(loss):
    objective = ng.Objective(nn.Linear(2, 1), loss, (torch.randn(3, 2), torch.ones(3)), mode="eval")
    assert float((objective.hessian() @ torch.ones(3)).norm()) == 0.0


def test_an_affine_loss_has_the_zero_hessian():
    objective = ng.Objective(nn.Linear(2, 1), lambda out, _: out.mean(), (torch.ones(3, 2), torch.ones(3)), mode="eval")
    assert float((objective.hessian() @ torch.ones(3)).norm()) == 0.0


def test_a_product_that_is_not_finite_names_its_batch():
    def loss(out, target):
        return (out.square().sum() - target.sum() ** 2).abs().sqrt() if float(target.sum()) else out.square().sum()

    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    data = [(torch.ones(1, 1), torch.zeros(1)), (torch.ones(1, 1), torch.ones(1))]
    with pytest.raises(NonFiniteError, match="batch 1"):
        ng.Objective(layer, loss, data, mode="eval").hessian() @ torch.ones(1)


def test_out_of_memory_is_said(monkeypatch):
    model, loss, batches = net("layer norm")
    operator = HessianOperator(ng.Objective(model, loss, batches, mode="train"))

    def full(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 12 bytes")

    monkeypatch.setattr(operator, "_apply", full)
    with pytest.raises(OutOfMemoryError, match=r"graph of batch 0.*smaller batches"):
        operator @ torch.ones(operator.shape[0])
    assert operator._kept is None


def test_empirical_fisher_needs_samples_first():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(0)

    data = (torch.randn(4, 3), torch.randn(4))
    objective = ng.Objective(Mean(3, 2), lambda out, _: out.square().sum(), data, mode="eval")
    with pytest.raises(DataError, match="count the 4 samples"):
        objective.empirical_fisher() @ torch.ones(8)


class Activations(nn.Module):
    """The pre-activations of one channel as the only variables, normalized over the batch."""

    def __init__(self, count):
        super().__init__()
        self.y = nn.Parameter(torch.randn(count, 1))
        self.norm = nn.BatchNorm1d(1, eps=1e-30)
        with torch.no_grad():
            self.norm.weight.fill_(1.7)
            self.norm.bias.fill_(0.4)

    def forward(self, _):
        return self.norm(self.y)[:, 0]


def test_batch_norm_hessian_by_the_activations_has_its_closed_form():
    """Eq. (40)-(42) of santurkar2018, corrected: with yh the normalized activations, m their number, s their standard
    deviation, gb the centred gradient and H the Hessian by the layer's output,

    (gamma^2 / s^2) [P H P - (1 / (m gamma)) (gb yh^T + yh gb^T - (3 / m) <g, yh> yh yh^T + <g, yh> (I - 1 1^T / m))]
    """
    m = 6
    model, mix = Activations(m), torch.randn(m, m)
    target = torch.randn(m)

    def loss(z, y):
        return (torch.tanh(mix @ z) - y).square().sum() + 0.1 * z.pow(3).sum()

    objective = ng.Objective(model, loss, (torch.zeros(m, 1), target), mode="train", parameters="y")
    ours = dense(objective.hessian())
    y = model.y.detach()[:, 0]
    gamma, beta, s = model.norm.weight.item(), model.norm.bias.item(), float(y.std(correction=0))
    yh = (y - y.mean()) / s
    z = gamma * yh + beta
    g = torch.autograd.functional.jacobian(lambda o: loss(o, target), z)
    h = torch.autograd.functional.hessian(lambda o: loss(o, target), z)
    ones, eye, along = torch.ones(m, m) / m, torch.eye(m), float(g @ yh)
    p = eye - torch.outer(yh, yh) / m - ones
    gb = g - g.mean()
    cross = torch.outer(gb, yh) + torch.outer(yh, gb) - 3 / m * along * torch.outer(yh, yh) + along * (eye - ones)
    torch.testing.assert_close(ours, gamma**2 / s**2 * (p @ h @ p - cross / (m * gamma)), rtol=1e-9, atol=1e-9)
    zero_modes = torch.stack([torch.ones(m)], 1)  # shifts; the scale direction obeys H (y - mean) = -gradient instead
    assert float((ours @ zero_modes).norm()) < 1e-9 * float(ours.norm())
    torch.testing.assert_close(ours @ (y - y.mean()), -objective.gradient()["y"][:, 0], rtol=1e-8, atol=1e-10)
