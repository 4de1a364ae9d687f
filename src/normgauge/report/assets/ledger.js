"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const form = document.getElementById("find");
  const fields = all("input, select", form);
  const cards = all(".claim");
  const sections = all("#claims > section");

  // ---- theme: a page opened from disk may have no storage; the choice is then forgotten, nothing else ----
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const remembered = {
    get() { try { return localStorage.getItem("normgauge-theme"); } catch { return null; } },
    set(mode) { try { localStorage.setItem("normgauge-theme", mode); } catch { /* not kept */ } },
  };
  if (remembered.get()) root.dataset.theme = remembered.get();
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (preference.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    remembered.set(root.dataset.theme);
  });

  // ---- finding: every word must occur, every choice must be met ------------------------------
  const chosen = () => Object.fromEntries(fields.map((field) => [field.name, field.value.trim()]));
  function show() {
    const { q, ...choice } = chosen();
    const words = (q || "").toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const card of cards) {
      const meets = Object.entries(choice).every(([name, value]) => !value || card.dataset[name] === value);
      card.hidden = !(meets && words.every((word) => card.dataset.text.includes(word)));
      found += !card.hidden;
    }
    for (const section of sections) section.hidden = !section.querySelector(".claim:not([hidden])");
    // whoever types an id wants that claim, before those of other papers that name it
    const asked = sections.find((section) => words.length === 1 && all(".claim", section).some((card) => card.id.toLowerCase() === words[0]));
    const order = asked ? [asked, ...sections.filter((section) => section !== asked)] : sections;
    const placed = all("#claims > section");
    if (order.some((section, place) => section !== placed[place])) placed[0].parentNode.append(...order);
    document.getElementById("nothing").hidden = found > 0;
    document.getElementById("found").textContent = `${found} of ${cards.length} claims`;
  }

  // ---- the address holds the view: #q=...&paper=... is a choice, #S1-T4.1 a claim -------------
  function write() {
    const kept = Object.entries(chosen()).filter(([, value]) => value);
    const address = kept.length ? "#" + new URLSearchParams(kept) : location.pathname;
    try { history.replaceState(null, "", address); } catch { /* some browsers refuse this on a file */ }
    show();
  }
  function read() {
    const name = decodeURIComponent(location.hash.slice(1));
    const place = name && document.getElementById(name);
    const wanted = new URLSearchParams(place ? "" : location.hash.slice(1));
    for (const field of fields) {
      field.value = wanted.get(field.name) || "";
      if (field.value !== (wanted.get(field.name) || "")) field.value = ""; // a value nobody has
    }
    show();
    if (!place) return;
    place.querySelector(":scope > details")?.setAttribute("open", "");
    place.scrollIntoView();
  }
  form.addEventListener("input", write);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(write));
  window.addEventListener("hashchange", read);

  // ---- folds: open in the file, so that everything reads without a script ---------------------
  const folds = all(".claim > details");
  const fold = document.getElementById("fold");
  const open = (wide) => { for (const part of folds) part.open = wide; };
  fold.addEventListener("click", () => {
    const wide = fold.getAttribute("aria-pressed") !== "true";
    fold.setAttribute("aria-pressed", String(wide));
    open(wide);
  });
  let before = [];
  window.addEventListener("beforeprint", () => { before = folds.map((part) => part.open); open(true); });
  window.addEventListener("afterprint", () => folds.forEach((part, k) => { part.open = before[k]; }));

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(input|select|textarea)$/i.test(document.activeElement?.tagName || "")) return;
    event.preventDefault();
    form.elements.q.focus();
  });

  open(false);
  read();
  root.dataset.ready = "yes";
})();
