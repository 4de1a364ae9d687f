"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const state = { hidden: new Set(), views: new Map() };
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // A page opened from disk may have no storage; the theme is then forgotten, nothing else.
  const remembered = {
    get() { try { return localStorage.getItem("normgauge-theme"); } catch { return null; } },
    set(mode) { try { localStorage.setItem("normgauge-theme", mode); } catch { /* not kept */ } },
  };
  const mode = () => root.dataset.theme || (preference.matches ? "dark" : "light");

  // ---- charts -------------------------------------------------------------------------------
  function visible(kind, row) {
    if (!("series" in row) || kind === "intervals") return true;
    if (state.hidden.has(row.series)) return false;
    if (kind !== "curve" || !("setting" in row)) return true;
    const wanted = document.getElementById("setting")?.value || data.chosen[row.series];
    return wanted === undefined ? Object.keys(data.chosen).length === 0 : row.setting === wanted;
  }

  async function draw(box) {
    const entry = data.charts[box.dataset.chart];
    const figure = box.closest("figure");
    if (figure.hidden) return;
    state.views.get(box)?.finalize();
    const spec = structuredClone(entry.spec);
    let rows = 0;
    for (const [name, values] of Object.entries(spec.datasets || {})) {
      spec.datasets[name] = values.filter((row) => visible(entry.kind, row));
      rows += spec.datasets[name].filter((row) => "series" in row).length;
    }
    box.dataset.rows = rows;
    if (rows === 0) {
      box.className = "chart";
      box.innerHTML = '<p class="empty">Nothing to show for this choice.</p>';
      return;
    }
    spec.description = entry.title;
    spec.width = "container";
    spec.autosize = { type: "fit-x", contains: "padding" };
    spec.config = { ...data.themes[mode()], background: "transparent" };
    const result = await window.vegaEmbed(box, spec, {
      renderer: "svg",
      ast: true, // expressions are interpreted: the page forbids making code of strings
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: entry.title,
      tooltip: { theme: "custom", disableDefaultStyle: false },
    });
    box.querySelector("summary")?.setAttribute("aria-label", `Save the chart: ${entry.title}`);
    state.views.set(box, result);
  }
  const drawAll = () => Promise.all(all("[data-chart]").map(draw));

  // ---- theme --------------------------------------------------------------------------------
  if (remembered.get()) root.dataset.theme = remembered.get();
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = mode() === "dark" ? "light" : "dark";
    remembered.set(root.dataset.theme);
    drawAll();
  });
  preference.addEventListener("change", drawAll);

  // ---- switches -----------------------------------------------------------------------------
  for (const chip of all("[data-arm]")) {
    chip.addEventListener("click", () => {
      const show = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", String(show));
      state.hidden[show ? "delete" : "add"](chip.dataset.arm);
      drawAll();
    });
  }
  document.getElementById("setting")?.addEventListener("change", drawAll);

  const metric = document.getElementById("metric");
  function pickMetric() {
    for (const box of all(".figure-final [data-chart]")) {
      box.closest("figure").hidden = box.dataset.chart !== metric.value;
    }
  }
  if (metric) {
    pickMetric();
    metric.addEventListener("change", () => { pickMetric(); drawAll(); });
  }

  for (const chip of all("[data-runs]")) {
    chip.addEventListener("click", () => {
      for (const other of all("[data-runs]")) other.setAttribute("aria-pressed", String(other === chip));
      for (const row of all("#runs-table tbody tr")) {
        row.hidden = chip.dataset.runs === "bad" && row.dataset.ok === "yes";
      }
    });
  }

  // ---- columns: six at first, all in print and without scripts ------------------------------
  const chooser = document.getElementById("columns");
  const headings = all("#comparison-table thead th");
  if (chooser && headings.length > 6) {
    chooser.hidden = false;
    headings.forEach((heading, column) => {
      if (column === 0) return; // the arm always stays
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: column < 6 });
      const show = () => {
        for (const row of all("#comparison-table tr")) row.cells[column].classList.toggle("off", !box.checked);
        const shown = headings.filter((th) => !th.classList.contains("off")).length;
        chooser.firstElementChild.textContent = `Columns: ${shown} of ${headings.length}`;
      };
      const label = document.createElement("label");
      label.append(box, heading.textContent);
      chooser.lastElementChild.append(label);
      box.addEventListener("change", show);
      show();
    });
  }

  // ---- sorting ------------------------------------------------------------------------------
  const key = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  }
  for (const heading of all("thead th[data-first]")) {
    heading.querySelector("button").addEventListener("click", () => {
      const other = { ascending: "descending", descending: "ascending" };
      const order = other[heading.getAttribute("aria-sort")] || heading.dataset.first;
      for (const th of heading.parentNode.cells) th.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", order);
      const body = heading.closest("table").tBodies[0];
      const column = heading.cellIndex;
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        if (x === "" || y === "") return (x === "") - (y === ""); // what is missing stays last either way
        return sign * compare(x, y);
      });
      body.append(...rows);
    });
  }

  // ---- copying ------------------------------------------------------------------------------
  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentNode.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        window.getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }

  drawAll().then(() => { root.dataset.ready = "yes"; });
})();
