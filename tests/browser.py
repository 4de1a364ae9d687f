"""A real browser for a page on disk: headless Chromium without network, asked by a script put into the page."""

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=127.0.0.1:9",  # nothing listens there: a request would fail, and be listed by the page
    "--virtual-time-budget=20000",
    "--dump-dom",
)
_PROBE = """<script>
(async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const until = async (test) => { for (let k = 0; k < 100 && !test(); k++) await pause(50); return test(); };
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const hover = (node) => {
    const box = node.getBoundingClientRect();
    const at = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
    const hit = document.elementFromPoint(at.clientX, at.clientY) || node;
    for (const kind of ["over", "move"]) {
      hit.dispatchEvent(new PointerEvent("pointer" + kind, at));
      hit.dispatchEvent(new MouseEvent("mouse" + kind, at));
    }
  };
  const found = {};
  try { %s } catch (error) { found.error = String(error); }
  const report = document.createElement("pre");
  report.id = "probe";
  report.textContent = JSON.stringify(found);
  document.body.append(report);
})();
</script>"""


def visit(address: str) -> str:
    """Return what a page served on this machine looks like after a few seconds; loopback needs no proxy."""
    flags = [flag for flag in _FLAGS if not flag.startswith("--virtual-time")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            CHROMIUM,
            *flags,
            "--timeout=4000",
            "--virtual-time-budget=4000",
            f"--user-data-dir={folder}/profile",
        ]
        done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout


def ask(page: Path, script: str, *, width: int = 1400, height: int = 2400, fragment: str = "") -> dict:
    """Open a copy of the page (at `#fragment`), run the script in it, and return what it put into `found`."""
    head, end, tail = page.read_text(encoding="utf-8").rpartition("</body>")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(head + _PROBE % script + end + tail, encoding="utf-8")
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
        address = copy.as_uri() + (f"#{fragment}" if fragment else "")
        done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)
    answer = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert answer, f"the browser gave no answer: {done.stderr[-800:]}"
    found = json.loads(unescape(answer.group(1)))
    assert "error" not in found, found["error"]
    return found
