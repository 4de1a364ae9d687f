"""The same curvature tasks by normgauge and by its peers; each tool counts its products itself.

A task returns (eigenvalues or None, eigenvectors as rows or None, products). Settings marked "tuned" were found by
hand for these two problems, as an expert user would; "default" are the tools' own.
"""

import importlib
import importlib.util
import warnings

import torch

warnings.filterwarnings("ignore")


class Ours:
    """normgauge."""

    def __init__(self, model, loss, x, y):
        """Keep the problem."""
        import normgauge as ng

        self.ng, self.objective = ng, ng.Objective(model, loss, (x, y), mode="eval")

    def hvp(self):
        """Return a function v -> H v with everything prepared."""
        operator = self.objective.hessian()
        return lambda v: operator @ v

    def top(self, k, setting):
        """Return the k largest eigenpairs."""
        found = self.ng.spectrum(self.objective, top=k)
        return found.top, found.vectors, found.matvecs

    def slq(self):
        """Run fifty steps of Lanczos quadrature."""
        return None, None, self.ng.density(self.objective, iterations=50).cost.products

    def trace(self, probes):
        """Estimate the trace; `probes=None` asks for a standard error of 5%."""
        if probes is None:
            return None, None, self.ng.trace(self.objective, relative_error=0.05).probes
        return None, None, self.ng.trace(self.objective, relative_error=1e-12, probes=probes).probes


class PyHessian:
    """PyHessian 0.1."""

    def __init__(self, model, loss, x, y):
        """Count calls of its product."""
        module = importlib.import_module("pyhessian.hessian")  # the package hides it behind a class of that name
        self.problem, self.module, self.count = (model, loss, (x, y)), module, 0
        original = module.hessian_vector_product

        def counted(*args):
            self.count += 1
            return original(*args)

        self.product = original
        module.hessian_vector_product = counted
        torch.eig = _eig  # removed from torch; PyHessian's release still calls it

    def _new(self):
        model, loss, data = self.problem
        self.count = 0
        model.zero_grad()
        return self.module.hessian(model, loss, data=data, cuda=False)

    def hvp(self):
        """Return the cached product."""
        inner = self._new()
        sizes = [p.numel() for p in inner.params]

        def apply(v):
            pieces = [piece.view(p.shape) for piece, p in zip(v.split(sizes), inner.params, strict=True)]
            return self.product(inner.gradsH, inner.params, pieces)

        return apply

    def top(self, k, setting):
        """Deflated power iteration; it stops on the change of the eigenvalue."""
        options = {} if setting == "default" else {"tol": 1e-6, "maxIter": 500}
        values, vectors = self._new().eigenvalues(top_n=k, **options)
        return values, torch.stack([torch.cat([p.reshape(-1) for p in v]) for v in vectors]), self.count

    def slq(self):
        """Run fifty steps."""
        self._new().density(iter=50, n_v=1)
        return None, None, self.count

    def trace(self, probes):
        """Take a fixed number of probes."""
        self._new().trace(maxIter=probes, tol=0.0)
        return None, None, self.count


def _eig(matrix, eigenvectors):
    values, vectors = torch.linalg.eigh(matrix)
    return torch.stack([values, torch.zeros_like(values)], 1), vectors


class Curvlinops:
    """curvlinops 3, with SciPy's eigsh for eigenvalues."""

    def __init__(self, model, loss, x, y):
        """Keep the problem."""
        from curvlinops import HessianLinearOperator

        self.make = lambda: HessianLinearOperator(
            model, loss, list(model.parameters()), [(x, y)], check_deterministic=False
        )

    def hvp(self):
        """Return its product."""
        operator = self.make()
        return lambda v: operator @ v

    def top(self, k, setting):
        """Use eigsh: its default tolerance is machine precision; tuned: 1e-3."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator, eigsh

        inner, count = self.make().to_scipy(dtype=np.float32), [0]

        def apply(v):
            count[0] += 1
            return inner @ v

        wrapped = LinearOperator(inner.shape, matvec=apply, dtype=np.float32)
        start = np.random.default_rng(0).standard_normal(inner.shape[0]).astype(np.float32)
        options = {} if setting == "default" else {"tol": 1e-3}
        values, vectors = eigsh(wrapped, k=k, which="LA", v0=start, **options)
        order = values.argsort()[::-1]
        return values[order].tolist(), torch.from_numpy(vectors.T[order].copy()), count[0]

    def slq(self):
        """Fifty steps without reorthogonalization."""
        from curvlinops.papyan2020traces.spectrum import fast_lanczos

        fast_lanczos(self.make(), 50)
        return None, None, 50

    def trace(self, probes):
        """Take a fixed number of probes."""
        from curvlinops import hutchinson_trace

        hutchinson_trace(self.make(), probes)
        return None, None, probes


class Eigenthings:
    """hessian-eigenthings 1.0."""

    def __init__(self, model, loss, x, y, steps=None):
        """Count products of its operator; `steps` is what the tuned Lanczos is told, by number of eigenvalues."""
        import hessian_eigenthings as he

        self.he, self.count = he, 0
        self.make = lambda: he.HessianOperator(model, [(x, y)], he.supervised_loss(loss))
        self.steps = steps or {1: 20, 5: 25}

    def _new(self):
        operator, self.count = self.make(), 0
        original = operator.matvec

        def counted(v):
            self.count += 1
            return original(v)

        operator.matvec = counted
        return operator

    def hvp(self):
        """Return its product."""
        return self.make().matvec

    def top(self, k, setting):
        """Lanczos; the number of steps has to be told (default 2k)."""
        steps = None if setting == "default" else self.steps[k]
        found = self.he.lanczos(self._new(), k=k, which="LA", seed=0, max_iter=steps)
        return found.eigenvalues.tolist(), found.eigenvectors, self.count

    def power(self, k):
        """Deflated power iteration at its defaults."""
        found = self.he.deflated_power_iteration(self._new(), k=k, seed=0)
        return found.eigenvalues.tolist(), found.eigenvectors, self.count

    def slq(self):
        """Fifty steps, one run."""
        self.he.spectral_density(self._new(), num_runs=1, lanczos_steps=50, seed=0)
        return None, None, self.count

    def trace(self, probes):
        """Take a fixed number of probes."""
        self.he.hutchinson(self._new(), num_samples=probes, seed=0)
        return None, None, self.count


class Backpack:
    """backpack's Hessian-free helper, with the gradient's graph kept."""

    def __init__(self, model, loss, x, y):
        """Keep the problem."""
        self.problem = model, loss, x, y

    def hvp(self):
        """Return its product."""
        from backpack.hessianfree.hvp import hessian_vector_product

        model, loss, x, y = self.problem
        params = list(model.parameters())
        value = loss(model(x), y)
        slopes = torch.autograd.grad(value, params, create_graph=True)
        sizes = [p.numel() for p in params]

        def apply(v):
            pieces = [piece.view(p.shape) for piece, p in zip(v.split(sizes), params, strict=True)]
            return hessian_vector_product(value, params, pieces, grad_params=slopes)

        return apply


TOOLS = {
    "normgauge": (Ours, "normgauge"),
    "pyhessian": (PyHessian, "pyhessian"),
    "curvlinops": (Curvlinops, "curvlinops"),
    "hessian-eigenthings": (Eigenthings, "hessian_eigenthings"),
    "backpack": (Backpack, "backpack"),
}


def available():
    """Return the tools that are installed, by name."""
    return {name: tool for name, (tool, module) in TOOLS.items() if importlib.util.find_spec(module)}
