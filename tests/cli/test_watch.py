"""`normgauge watch`: live on loopback, one file afterwards, a sentence for the wrong folder."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from browser import ask, needs_browser, visit

LINES = [
    {"step": 1, "values": {"normgauge/loss/mean": 2.0, "normgauge/weights/norm_median": 1.0}},
    {"warning": {"id": "NG03", "step": 1, "where": "</script><script>alert(1)</script>", "sentence": "it moves."}},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_page_is_live_until_interrupted_and_whole_afterwards(folder):
    command = [sys.executable, "-m", "normgauge", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[0]
            assert address.startswith("http://127.0.0.1:")
            assert urllib.request.urlopen(address + "log").read().decode().count("\n") == 2
            assert b"const live = true" in urllib.request.urlopen(address).read()
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(address + "../../etc/passwd")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    page = (folder / "monitor.html").read_text()
    assert "const live = false" in page
    assert "alert(1)" in page
    assert "<script>alert" not in page


@needs_browser
def test_a_browser_follows_the_run_and_opens_the_file_afterwards(folder):
    command = [sys.executable, "-m", "normgauge", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[0]
            first = visit(address)
            with (folder / "monitor.jsonl").open("a") as log:
                log.write(json.dumps({"step": 7, "values": {"normgauge/loss/mean": 1.0}}) + "\n")
            second = visit(address)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "Step 1, 2 readings." in first
    assert "Step 7, 2 readings." in second
    assert re.search('id="state"[^>]*>live, ', second)
    assert "NG03 at step 1" in second
    assert "&lt;script&gt;alert(1)" in second
    found = ask(
        folder / "monitor.html",
        """found.summary = document.getElementById("summary").textContent;
        found.lines = all("path.line").length;
        found.asked = performance.getEntriesByType("resource").filter((e) => !e.name.startsWith("data:")).length;""",
    )
    assert found == {"summary": "Step 7, 2 readings.", "lines": 2, "asked": 0}


def test_once_writes_without_serving_and_a_wrong_folder_is_a_sentence(folder, tmp_path):
    run = [sys.executable, "-m", "normgauge", "watch"]
    assert subprocess.run([*run, str(folder), "--once", "--out", str(tmp_path / "a.html")]).returncode == 0
    assert (tmp_path / "a.html").stat().st_size > 1000
    wrong = subprocess.run([*run, str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "ng.Monitor" in wrong.stderr
    assert "Traceback" not in wrong.stderr
