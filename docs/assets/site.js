// Wide tables and formulas scroll inside their frame; the keyboard must reach it, at whatever width the window has now.
const named = { table: ".md-typeset__scrollwrap", formula: ".md-typeset math" };
function reach() {
  for (const [name, frames] of Object.entries(named))
    for (const frame of document.querySelectorAll(frames)) {
      const scrolls = frame.scrollWidth > frame.clientWidth;
      if (scrolls === frame.hasAttribute("tabindex")) continue;
      frame.toggleAttribute("tabindex", scrolls);
      if (!scrolls) { frame.removeAttribute("role"); frame.removeAttribute("aria-label"); continue; }
      frame.setAttribute("tabindex", "0");
      if (name === "table") { frame.setAttribute("role", "region"); frame.setAttribute("aria-label", name); }
    }
}
addEventListener("load", reach);
addEventListener("resize", reach);
// The theme's search opens as a dialog without a name.
document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
