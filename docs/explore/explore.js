"use strict";
(() => {
  const F = formulas, D = measured, STEPS = 60, GRID = 96;
  const $ = (id) => document.getElementById(id);
  const SVG = (name, attributes = {}, parent = null) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const show = (value, digits = 3) =>
    !Number.isFinite(value) ? "-" : Math.abs(value) < 1e-12 ? "0" :
    Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5 ? value.toExponential(1) : String(+value.toPrecision(digits));
  const state = { scene: 0, settings: {}, start: [...D.start], timer: 0 };
  const arms = { plain: {}, sphere: {} };

  // --- the two trainings
  const running = () => {
    const y = D.points.map(({ x }) => F.dot(x, state.start)), centre = F.mean(y);
    return { mean: centre, var: F.mean(y.map((value) => (value - centre) ** 2)) };
  };
  const options = () => ({ ...state.settings, gamma: D.gamma, running: running() });
  const nextBatch = (k) => F.batch(D.points, D.order, state.settings.batch, k);
  function restart() {
    for (const arm of Object.values(arms)) arm.w = [...state.start], arm.path = [], arm.squares = [];
    record();
  }
  function record() {
    for (const arm of Object.values(arms)) {
      const at = F.unit(arm.w, nextBatch(arm.path.length), options());
      const whole = F.unit(arm.w, D.points, options());
      arm.now = { ...at, norm: F.norm(arm.w), whole: whole.loss };
      arm.path.push({ w: [...arm.w], norm: arm.now.norm, loss: whole.loss, angle: null });
      arm.squares.push(F.dot(arm.w, arm.w) * F.dot(at.gradient, at.gradient));
    }
  }
  function step() {
    if (arms.plain.path.length > STEPS) return stop();
    const { rate, decay } = state.settings;
    for (const [name, arm] of Object.entries(arms)) {
      const before = arm.w;
      arm.w = name === "plain" ? F.sgdStep(before, arm.now.gradient, rate, decay) : F.sphereStep(before, arm.now.gradient, rate);
      const cosine = F.dot(before, arm.w) / (F.norm(before) * F.norm(arm.w));
      arm.path.at(-1).angle = (Math.acos(Math.min(1, cosine)) * 180) / Math.PI;
    }
    record();
    draw();
  }
  function stop() {
    clearInterval(state.timer);
    state.timer = 0;
    $("play").textContent = "Play";
  }

  // --- planes: a heat map of the loss below, arrows above
  const planes = {};
  for (const name of Object.keys(arms)) {
    const box = $(`${name}-plane`), canvas = document.createElement("canvas");
    canvas.width = canvas.height = GRID;
    canvas.setAttribute("aria-hidden", "true");
    const svg = SVG("svg", { viewBox: "-1 -1 2 2" });
    if (name === "sphere") svg.setAttribute("role", "img");
    const part = (kind, attributes) => SVG(kind, attributes, svg);
    const color = `var(--${name})`;
    planes[name] = {
      box, canvas, svg,
      axisX: part("path", { d: "M-1 0H1M0 -1V1", stroke: "var(--muted)", "stroke-width": 0.004 }),
      circle: part("circle", { fill: "none", stroke: color, "stroke-width": 0.006, "stroke-opacity": 0.7 }),
      ray: part("line", { stroke: "var(--text)", "stroke-width": 0.008, "stroke-dasharray": "0.03 0.03" }),
      trail: part("polyline", { fill: "none", stroke: color, "stroke-width": 0.012, "stroke-linejoin": "round" }),
      dots: part("g", { fill: color }),
      gradient: part("path", { fill: "none", stroke: "var(--text)", "stroke-width": 0.016, "stroke-linecap": "round", "stroke-linejoin": "round" }),
      arrow: part("line", { x1: 0, y1: 0, stroke: color, "stroke-width": 0.026, "stroke-linecap": "round" }),
      tip: part("circle", { r: 0.034, fill: color, stroke: "var(--card)", "stroke-width": 0.012 }),
    };
    box.append(canvas, svg);
  }
  const handle = SVG("g", { class: "handle", tabindex: 0, role: "slider", "aria-label": "Weight: left and right turn it, up and down change its length", "aria-valuemin": -180, "aria-valuemax": 180 }, planes.plain.svg);
  const ring = SVG("circle", { class: "ring", r: 0.075, fill: "transparent", stroke: "transparent" }, handle);
  const grip = SVG("circle", { r: 0.17, fill: "transparent" }, handle);

  let view = 2.2;
  const toPlane = ([x, y]) => [x / view, -y / view];
  function shade() {
    const settings = options(), low = [], range = { min: Infinity, max: -Infinity };
    for (let row = 0; row < GRID; row++)
      for (let column = 0; column < GRID; column++) {
        const w = [((column + 0.5) / GRID * 2 - 1) * view, (1 - (row + 0.5) / GRID * 2) * view];
        const value = F.unit(w, D.points, settings).loss;
        low.push(value);
      }
    const sorted = [...low].sort((a, b) => a - b);
    range.min = sorted[0], range.max = sorted[Math.floor(sorted.length * 0.97)];
    const dark = matchesDark(), from = dark ? [70, 110, 180] : [90, 140, 205], to = dark ? [23, 26, 33] : [250, 251, 253];
    for (const plane of Object.values(planes)) {
      const context = plane.canvas.getContext("2d"), image = context.createImageData(GRID, GRID);
      low.forEach((value, k) => {
        const share = Math.min(1, Math.sqrt((value - range.min) / (range.max - range.min || 1)));
        const level = Math.round(share * 12) / 12;  // steps are easier to follow than a smooth ramp
        for (let c = 0; c < 3; c++) image.data[4 * k + c] = from[c] + (to[c] - from[c]) * level;
        image.data[4 * k + 3] = 255;
      });
      context.putImageData(image, 0, 0);
    }
  }
  const matchesDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  function drawPlane(name) {
    const plane = planes[name], arm = arms[name], [x, y] = toPlane(arm.w), length = arm.now.norm;
    const far = 2 / Math.hypot(x, y);
    const set = (node, values) => Object.entries(values).forEach(([key, value]) => node.setAttribute(key, value));
    set(plane.circle, { r: length / view });
    set(plane.ray, { x1: 0, y1: 0, x2: x * far, y2: y * far });
    set(plane.arrow, { x2: x, y2: y });
    set(plane.tip, { cx: x, cy: y });
    set(plane.trail, { points: arm.path.map(({ w }) => toPlane(w).join(",")).join(" ") });
    plane.dots.replaceChildren(...arm.path.slice(0, -1).map(({ w }) => {
      const [cx, cy] = toPlane(w);
      return SVG("circle", { cx, cy, r: 0.012 });
    }));
    const size = F.norm(arm.now.gradient), direction = size > 1e-9 ? F.scale(arm.now.gradient, -1 / size) : [0, 0];
    const reach = Math.min(0.5, Math.max(0.12, (size * length) / 1.5)) * (size > 1e-4 ? 1 : 0);
    const end = [x + direction[0] * reach, y - direction[1] * reach], back = 0.06;
    const barb = (turn) => {
      const angle = Math.atan2(-direction[1], direction[0]) + turn;
      return `M${end[0]} ${end[1]}L${end[0] - back * Math.cos(angle)} ${end[1] - back * Math.sin(angle)}`;
    };
    plane.gradient.setAttribute("d", reach ? `M${x} ${y}L${end[0]} ${end[1]}${barb(0.5)}${barb(-0.5)}` : "");
    if (name === "sphere") plane.svg.setAttribute("aria-label", `Weight on a sphere of radius ${show(length)}, loss ${show(arm.now.whole)}`);
  }

  // --- numbers and curves
  const rows = [
    ["loss at w", (arm) => show(arm.now.loss, 4)],
    ["loss at w / 2", (arm) => show(F.unit(F.scale(arm.w, 0.5), nextBatch(arm.path.length - 1), options()).loss, 4)],
    ["loss at 2 w", (arm) => show(F.unit(F.scale(arm.w, 2), nextBatch(arm.path.length - 1), options()).loss, 4)],
    ["angle of gradient and w", (arm) => {
      const size = F.norm(arm.now.gradient);
      if (size < 1e-9) return "no gradient";
      return `${((Math.acos(F.dot(arm.w, arm.now.gradient) / (size * arm.now.norm)) * 180) / Math.PI).toFixed(1)}°`;
    }],
    ["length²", (arm) => show(arm.now.norm ** 2, 4)],
    ["length² after the step", (arm, name) => {
      const { rate, decay } = state.settings;
      const next = name === "plain" ? F.sgdStep(arm.w, arm.now.gradient, rate, decay) : F.sphereStep(arm.w, arm.now.gradient, rate);
      return show(F.dot(next, next), 4);
    }],
    ["by the law", (arm, name) => name === "sphere" ? show(arm.now.norm ** 2, 4) :
      show(F.afterSgdStep((1 - state.settings.rate * state.settings.decay) ** 2 * arm.now.norm ** 2, F.dot(arm.now.gradient, arm.now.gradient), state.settings.rate), 4)],
    ["effective rate", (arm) => show(F.sgdEffectiveRate(state.settings.rate, arm.now.norm))],
    ["steps done", (arm) => String(arm.path.length - 1)],
  ];
  const cells = rows.map(([label, read]) => {
    const line = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row", head.textContent = label;
    line.append(head);
    const values = Object.keys(arms).map((name) => [name, line.appendChild(document.createElement("td"))]);
    $("facts").append(line);
    return () => values.forEach(([name, cell]) => (cell.textContent = read(arms[name], name)));
  });

  function chart(box, series, { log = false, label, last = STEPS, level = null, height = 150, width = 260 }) {
    const left = 40, bottom = 20, all = series.flatMap(({ values }) => values.map(([, y]) => y)).concat(level ?? []).filter(Number.isFinite);
    if (!all.length) all.push(0, 1);  // before the first step nothing has turned
    const map = log ? (y) => Math.log10(Math.max(y, 1e-9)) : (y) => y;
    let low = Math.min(...all.map(map)), high = Math.max(...all.map(map));
    if (!log) low = Math.min(low, 0);
    if (!(high - low > 1e-9)) low -= 0.5, high += 0.5;
    const pad = (high - low) * 0.06;
    if (log || low < 0) low -= pad;
    high += pad;
    const X = (x) => left + (x / last) * (width - left - 4), Y = (y) => 6 + (1 - (map(y) - low) / (high - low)) * (height - bottom - 6);
    const svg = SVG("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    const ticks = [0, 0.5, 1].map((share) => low + share * (high - low)).map((value) => (log ? 10 ** value : value));
    for (const tick of ticks) {
      SVG("path", { d: `M${left} ${Y(tick)}H${width - 4}`, stroke: "var(--line)" }, svg);
      SVG("text", { x: left - 5, y: Y(tick) + 4, "text-anchor": "end" }, svg).textContent = show(tick, 2);
    }
    for (const x of [0, last / 2, last]) SVG("text", { x: X(x), y: height - 4, "text-anchor": x === last ? "end" : "middle" }, svg).textContent = x;
    if (level !== null && Number.isFinite(level)) SVG("path", { d: `M${left} ${Y(level)}H${width - 4}`, stroke: "var(--text)", "stroke-dasharray": "4 4" }, svg);
    for (const { values, color, dots } of series) {
      const shown = values.filter(([, y]) => Number.isFinite(y));
      if (dots) for (const [x, y] of shown) SVG("circle", { cx: X(x), cy: Y(y), r: 3.4, fill: color, stroke: "var(--card)", "stroke-width": 1.2 }, svg);
      else SVG("polyline", { points: shown.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "), fill: "none", stroke: color, "stroke-width": 2, "stroke-linejoin": "round" }, svg);
    }
    box.replaceChildren(svg);
  }
  function drawCharts() {
    const { rate, decay } = state.settings, untouched = state.scene !== null, scene = D.scenes[state.scene ?? 0];
    const of = (read) => Object.entries(arms).map(([name, arm]) => ({ color: `var(--${name})`, values: arm.path.map((point, k) => [k, read(point)]) }));
    const dotted = (read) => !untouched ? [] : Object.keys(arms).map((name) => ({
      color: `var(--${name})`, dots: true, values: scene[name].map((row, k) => [k, read(row)]).filter(([k]) => k % 6 === 0),
    }));
    const tail = arms.plain.squares, G = F.mean(tail.slice(-Math.max(1, Math.ceil(tail.length / 2))));
    const settled = decay > 0 && tail.length > 5 && state.settings.normalizer !== "none" && state.settings.normalizer !== "eval" ? F.sgdEquilibrium(rate, decay, G).norm : null;
    const now = (name, read) => `${name}: plain ${show(read(arms.plain.path.at(-1)))}, sphere ${show(read(arms.sphere.path.at(-1)))}`;
    const length = (point) => point.norm, effective = (point) => F.sgdEffectiveRate(rate, point.norm), loss = (point) => point.loss;
    chart($("chart-norm"), [...of(length), ...dotted(([norm]) => norm)], { label: now("length of the weight", length), level: settled });
    chart($("chart-rate"), [...of(effective), ...dotted(([norm]) => rate / norm ** 2)], { log: true, label: now("effective rate", effective) });
    chart($("chart-angle"), of((point) => point.angle ?? NaN), { label: "degrees turned per step" });
    chart($("chart-loss"), [...of(loss), ...dotted(([, value]) => value)], { label: now("loss", loss) });
  }
  function drawNetwork() {
    const values = D.network[$("network-decay").value];
    chart($("chart-network"), [
      { color: "var(--plain)", values: values.map(([step, , law]) => [step, law]) },
      { color: "var(--sphere)", dots: true, values: values.map(([step, square]) => [step, square]).filter((_, k) => k % 3 === 0) },
    ], { label: `mean squared length of the rows, from ${values[0][1]} to ${values.at(-1)[1]} in 300 steps`, last: 300, height: 190, width: 620 });
  }

  function draw() {
    const longest = Math.max(...Object.values(arms).flatMap(({ path }) => path.map(({ norm }) => norm)));
    const wanted = 2.2 * 1.5 ** Math.max(0, Math.ceil(Math.log(longest / 2) / Math.log(1.5)));
    if (wanted !== view) (view = wanted), shade();
    for (const name of Object.keys(arms)) drawPlane(name);
    const [x, y] = toPlane(arms.plain.w), degrees = (Math.atan2(arms.plain.w[1], arms.plain.w[0]) * 180) / Math.PI;
    for (const node of [ring, grip]) node.setAttribute("cx", x), node.setAttribute("cy", y);
    handle.setAttribute("aria-valuenow", Math.round(degrees));
    handle.setAttribute("aria-valuetext", `${Math.round(degrees)} degrees, length ${show(arms.plain.now.norm)}, loss ${show(arms.plain.now.loss)}`);
    cells.forEach((fill) => fill());
    drawCharts();
  }

  // --- what people touch
  const readers = {
    rate: (raw) => +(10 ** raw).toPrecision(2),
    decay: (raw) => (raw <= -4 ? 0 : +(10 ** raw).toPrecision(2)),
    batch: (raw) => raw,
    eps: (raw) => +(10 ** raw).toPrecision(2),
  };
  const writers = { rate: Math.log10, decay: (value) => (value ? Math.log10(value) : -4), batch: (value) => value, eps: Math.log10 };
  function settle() {
    for (const name of Object.keys(readers)) {
      $(name).value = writers[name](state.settings[name]);
      $(`${name}-out`).textContent = show(state.settings[name], 2);
    }
    $("normalizer").value = state.settings.normalizer;
    $("eps").disabled = !["batch", "eval"].includes(state.settings.normalizer);
  }
  function begin(scene) {
    stop();
    const { normalizer, rate, decay, batch, eps, text } = D.scenes[scene];
    Object.assign(state, { scene, settings: { normalizer, rate, decay, batch, eps }, start: [...D.start] });
    $("story").textContent = text;
    mark();
    settle();
    restart();
    shade();
    draw();
  }
  const buttons = D.scenes.map(({ name }, k) => {
    const button = document.createElement("button");
    button.type = "button", button.textContent = `${k + 1}. ${name}`;
    button.addEventListener("click", () => begin(k));
    $("scenes").append(button);
    return button;
  });
  const mark = () => buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === state.scene)));
  const changed = (reshade) => {
    state.scene = null;  // measured dots belong to the scenes as they were set
    mark();
    restart();
    if (reshade) shade();
    draw();
  };
  for (const [name, read] of Object.entries(readers))
    $(name).addEventListener("input", (event) => {
      state.settings[name] = read(+event.target.value);
      settle();
      changed(name === "eps");
    });
  $("normalizer").addEventListener("change", (event) => {
    state.settings.normalizer = event.target.value;
    settle();
    changed(true);
  });
  $("step").addEventListener("click", () => (stop(), step()));
  $("reset").addEventListener("click", () => (stop(), restart(), draw()));
  $("play").addEventListener("click", () => {
    if (state.timer) return stop();
    if (arms.plain.path.length > STEPS) restart();
    $("play").textContent = "Pause";
    state.timer = setInterval(step, 110);
  });
  const moveTo = (w) => {
    const length = Math.min(20, Math.max(0.05, F.norm(w)));
    state.start = F.scale(w, length / (F.norm(w) || 1));
    stop();
    changed(state.settings.normalizer === "eval");
  };
  const fromPointer = (event) => {
    const box = planes.plain.svg.getBoundingClientRect();
    return [((event.clientX - box.x) / box.width * 2 - 1) * view, (1 - (event.clientY - box.y) / box.height * 2) * view];
  };
  planes.plain.svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" && !handle.contains(event.target)) return;  // a finger elsewhere scrolls the page
    planes.plain.svg.setPointerCapture(event.pointerId);
    moveTo(fromPointer(event));
  });
  planes.plain.svg.addEventListener("pointermove", (event) => {
    if (planes.plain.svg.hasPointerCapture(event.pointerId)) moveTo(fromPointer(event));
  });
  handle.addEventListener("keydown", (event) => {
    const turn = { ArrowLeft: 1, ArrowRight: -1 }[event.key] ?? 0, grow = { ArrowUp: 1.1, ArrowDown: 1 / 1.1 }[event.key] ?? 1;
    if (!turn && grow === 1) return;
    event.preventDefault();
    const angle = (turn * 5 * Math.PI) / 180, [x, y] = arms.plain.w;
    moveTo(F.scale([x * Math.cos(angle) - y * Math.sin(angle), x * Math.sin(angle) + y * Math.cos(angle)], grow));
  });
  for (const decay of Object.keys(D.network).sort((a, b) => a - b)) $("network-decay").append(new Option(decay, decay));
  $("network-decay").addEventListener("change", drawNetwork);
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = matchesDark() ? "light" : "dark";
    shade();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", shade);

  const tell = () => parent.postMessage({ height: Math.ceil(document.documentElement.getBoundingClientRect().height) }, "*");
  if (parent !== window) new ResizeObserver(tell).observe(document.documentElement);
  drawNetwork();
  begin(Math.min(D.scenes.length, Math.max(1, +new URLSearchParams(location.hash.slice(1)).get("scene") || 1)) - 1);
  if (location.hash.includes("play")) for (let k = 0; k < STEPS; k++) step();
})();
