"""`normgauge watch`: the page of a monitored run, live on this machine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import typer

from normgauge.errors import StoreError


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder given to ng.Monitor as a sink.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="Write the page and leave, without serving it.")] = False,
    out: Annotated[Path | None, typer.Option(help="The page to write [default: monitor.html in the folder].")] = None,
) -> None:
    """Serve the live page of a monitored run on this machine; Ctrl-C writes it as one offline file."""
    from normgauge.documents import write_whole
    from normgauge.monitor import LOG_NAME
    from normgauge.report import watch_page

    log, title = folder / LOG_NAME, f"Training run {folder.resolve().name}"
    if not log.is_file():
        rule = "the folder must hold the log of a monitored run"
        raise StoreError("watch", rule, str(folder), "Start one: ng.Monitor(model, optimizer, sinks=['run'])")

    try:
        if not once:
            pages = {"/": partial(watch_page, "", title, live=True), "/log": partial(log.read_text, encoding="utf-8")}
            with ThreadingHTTPServer(("127.0.0.1", port), _handler(pages)) as server:
                typer.echo(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends and writes the page)")
                server.serve_forever()
    except KeyboardInterrupt:
        pass  # the page is written below: that is what Ctrl-C is for here
    except OSError as error:
        raise StoreError("watch", "the port must be free", f"{port} ({error})", "Leave --port out") from error
    finally:
        page = folder / "monitor.html" if out is None else out
        write_whole(page, watch_page(log.read_text(encoding="utf-8"), title))
        typer.echo(page)


@contextmanager
def serve_live(page: Callable[[], str], say: Callable[[str], object]) -> Iterator[None]:
    """Serve a page on a free port of 127.0.0.1 meanwhile, and say where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler({"/": page})) as server:
        say(f"http://127.0.0.1:{server.server_address[1]}/ shows the runs as they finish")
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def _handler(pages: Mapping[str, Callable[[], str]]) -> type[BaseHTTPRequestHandler]:
    """Return a handler of these pages: the root as HTML, others as text."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in pages:
                self.send_error(404)
                return
            text = pages[self.path]()
            self.send_response(200)
            self.send_header("Content-Type", f"text/{'html' if self.path == '/' else 'plain'}; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Stay silent: the terminal shows the address."""

    return Pages
