"use strict";
// The formulas of normgauge.theory, on arrays of numbers. tests/docs/test_explore.py runs both on random values.
const formulas = (() => {
  const sum = (a) => a.reduce((total, value) => total + value, 0);
  const mean = (a) => sum(a) / a.length;
  const dot = (a, b) => a.reduce((total, value, i) => total + value * b[i], 0);
  const norm = (a) => Math.hypot(...a);
  const scale = (a, factor) => a.map((value) => value * factor);
  const plus = (a, b, factor = 1) => a.map((value, i) => value + factor * b[i]);

  // theory.batchnorm_calculus
  function standardize(y, eps = 0) {
    const centre = mean(y), centred = y.map((value) => value - centre);
    const s = Math.sqrt(dot(centred, centred) / y.length + eps);
    return { yh: scale(centred, 1 / s), s };
  }
  function pullbackGradient(y, g, gamma = 1, eps = 0) {
    const { yh, s } = standardize(y, eps), average = mean(g), along = dot(g, yh) / y.length;
    return g.map((value, i) => (gamma / s) * (value - average - yh[i] * along));
  }
  // theory.scale_invariance
  function radialDerivative(y, g, gamma = 1, eps = 0) {
    const { yh, s } = standardize(y, eps);
    return (gamma * dot(g, yh) * eps) / (s * s);
  }
  // theory.norm_growth
  const afterSgdStep = (squaredNorm, squaredGradient, rate) => squaredNorm + rate * rate * squaredGradient;
  // theory.weight_dynamics
  const sgdEffectiveRate = (rate, length) => rate / (length * length);
  const sgdAngle = (rate, length, gradient) => Math.atan2(rate * gradient, length);
  function sgdEquilibrium(rate, decay, G) {
    if (decay === 0 || rate === 0) return { norm: Infinity, angle: 0, relaxation: Infinity };
    return {
      norm: ((rate * G) / ((2 - rate * decay) * decay)) ** 0.25,
      angle: Math.sqrt(2 * rate * decay),
      relaxation: 1 / (4 * rate * decay),
    };
  }

  // One unit on a batch: z = gamma n(X w), loss = mean log(1 + exp(-t z)), and its gradient in w.
  function unit(w, points, { normalizer, gamma, eps, running }) {
    const y = points.map(({ x }) => dot(x, w));
    const length = norm(w);
    let z;
    if (normalizer === "batch") z = scale(standardize(y, eps).yh, gamma);
    else if (normalizer === "eval") z = y.map((value) => (gamma * (value - running.mean)) / Math.sqrt(running.var + eps));
    else if (normalizer === "weight") z = scale(y, gamma / length);
    else z = scale(y, gamma);
    const margins = z.map((value, i) => points[i].t * value), m = points.length;
    const loss = mean(margins.map((a) => Math.max(-a, 0) + Math.log1p(Math.exp(-Math.abs(a)))));
    const g = margins.map((a, i) => -points[i].t / (m * (1 + Math.exp(a))));
    let v;
    if (normalizer === "batch") v = pullbackGradient(y, g, gamma, eps);
    else if (normalizer === "eval") v = scale(g, gamma / Math.sqrt(running.var + eps));
    else v = scale(g, normalizer === "weight" ? gamma / length : gamma);
    let gradient = w.map((_, j) => dot(v, points.map(({ x }) => x[j])));
    if (normalizer === "weight") gradient = plus(gradient, w, -dot(gradient, w) / (length * length));
    return { loss, gradient, y, g };
  }
  // torch.optim.SGD without momentum, decay added to the gradient; normgauge.optim.SphereSGD
  const sgdStep = (w, gradient, rate, decay = 0) => plus(scale(w, 1 - rate * decay), gradient, -rate);
  function sphereStep(w, gradient, rate) {
    const radius = norm(w), tangent = plus(gradient, w, -dot(w, gradient) / (radius * radius));
    const moved = plus(w, tangent, -rate);
    return scale(moved, radius / norm(moved));
  }
  // Batch number k of size m from a fixed order of the points.
  const batch = (points, order, m, k) => Array.from({ length: m }, (_, i) => points[order[(k * m + i) % order.length]]);

  return {
    mean, dot, norm, scale, plus, standardize, pullbackGradient, radialDerivative, afterSgdStep, sgdEffectiveRate,
    sgdAngle, sgdEquilibrium, unit, sgdStep, sphereStep, batch,
  };
})();
if (typeof module !== "undefined") module.exports = formulas;
