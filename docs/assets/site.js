// Wide tables, formulas, code and figures scroll inside their frame; the keyboard must reach it, at whatever width the
// window has now.
const named = {
  table: ".md-typeset__scrollwrap", formula: ".md-typeset math", code: ".md-typeset pre > code", figure: ".md-typeset p:has(> img)",
};
function reach() {
  for (const [name, frames] of Object.entries(named))
    for (const frame of document.querySelectorAll(frames)) {
      const scrolls = frame.scrollWidth > frame.clientWidth;
      if (scrolls === frame.hasAttribute("tabindex")) continue;
      frame.toggleAttribute("tabindex", scrolls);
      if (!scrolls) { frame.removeAttribute("role"); frame.removeAttribute("aria-label"); continue; }
      frame.setAttribute("tabindex", "0");
      if (name !== "formula" && name !== "code") { frame.setAttribute("role", "region"); frame.setAttribute("aria-label", name); }
    }
}
addEventListener("load", reach);
addEventListener("resize", reach);
// A page within a page says how tall it is, and so does not scroll by itself.
addEventListener("message", ({ source, data }) => {
  for (const frame of document.querySelectorAll("iframe"))
    if (frame.contentWindow === source && data?.height > 0) frame.style.height = `${data.height}px`;
});
// The theme's search opens as a dialog without a name.
document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
