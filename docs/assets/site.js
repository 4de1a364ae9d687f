// Wide tables scroll inside their frame; the keyboard must reach it.
addEventListener("load", () => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (frame.scrollWidth <= frame.clientWidth) continue;
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "table");
  }
});
