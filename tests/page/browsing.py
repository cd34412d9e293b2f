"""A browser for the tests of the page, and a watch over each open tab.

`find_browser` names the program: Chromium, or with the variable PAGE_BROWSER=firefox the Firefox of the system, which
Playwright drives by WebDriver BiDi. `Visit` is one open tab: its page, its requests and its complaints. The browser
resolves one name, to this machine, so nothing of the page can leave it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Request, expect, sync_playwright

IS_FIREFOX = os.environ.get("PAGE_BROWSER") == "firefox"
FIREFOX_VERSION = 153  # that knows what Playwright asks of it
NAMES: tuple[str, ...] = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
if IS_FIREFOX:
    NAMES = ("firefox-esr", "firefox")
FOREIGN = "foreign.test"  # a name that somebody else made point to this machine
RULES = f"MAP {FOREIGN} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ARGUMENTS = (f"--host-resolver-rules={RULES}", "--disable-background-networking")
PREFERENCES: dict[str, str | float | bool] = {
    "dom.events.testing.asyncClipboard": True,  # no question before the clipboard is read
    "network.dns.localDomains": FOREIGN,
    "network.proxy.type": 1,  # nothing but this machine, which needs no proxy, is reached
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "network.proxy.no_proxies_on": f"localhost,127.0.0.1,{FOREIGN}",
}
DRIVER_PART = Path(__file__).with_name("firefox.cjs")
# Playwright sets the value of a field in Firefox in a way that React does not notice; this is as typing does it.
INSERT_TEXT = """() => Object.defineProperty(window, "__pw_bidiInsertText", {
  get: () => (text) => void document.execCommand("insertText", false, text),
  set: () => {},
})"""
# Firefox has no command that makes it a touch screen, so the page is told that it is one.
TOUCH = """() => {
  const match = window.matchMedia;
  window.matchMedia = (query) => match.call(window, query.includes("hover: none") ? "all" : query);
}"""
# Firefox does not report the body of a request, so the page notes it.
NOTE_SENT = """() => {
  const send = window.fetch;
  window.sent = [];
  window.fetch = (path, options) => {
    if (typeof options?.body === "string") window.sent.push([String(path), options.body]);
    return send(path, options);
  };
}"""
# Firefox does not report a saved file either.
NOTE_SAVED = """() => {
  const [click, make, blobs] = [HTMLAnchorElement.prototype.click, URL.createObjectURL, new Map()];
  window.saved = [];
  URL.createObjectURL = (blob) => {
    const url = make.call(URL, blob);
    blobs.set(url, blob);
    return url;
  };
  HTMLAnchorElement.prototype.click = function () {
    if (!this.download) return click.call(this);
    void blobs.get(this.href).text().then((text) => window.saved.push([this.download, text]));
  };
}"""
WAIT_MS = 20_000  # for what a busy machine does in the end
OWN_SCHEMES = ("data", "blob", "about")
HARMLESS = ("Failed to load resource",)  # an error status of a reply, which tests check if it matters
REFUSED = "The page’s settings blocked"  # how Firefox tells, late, of the policy; in Chromium all faults count


def find_browser() -> str | None:
    """The browser to drive: that of the variable CHROMIUM or FIREFOX, of the system, or Playwright's Chromium."""
    named = os.environ.get("FIREFOX" if IS_FIREFOX else "CHROMIUM")
    if named:
        return named
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None or IS_FIREFOX:
        return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def find_age(program: str) -> str | None:
    """Return why Playwright cannot drive a Firefox that is older than its commands; None if it can."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120, check=False).stdout
    version = re.search(r"Firefox (\d+)", told)
    if version is None or int(version[1]) >= FIREFOX_VERSION:
        return None
    return f"{program} is version {version[1]}, and {FIREFOX_VERSION} is wanted (Debian: apt-get update, then install)"


@contextmanager
def start_browser(program: str) -> Iterator[Browser]:
    """Start a browser without windows; as root Chromium runs without its sandbox, which the superuser cannot have."""
    arguments = [*ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    if IS_FIREFOX:
        os.environ["NODE_OPTIONS"] = f"--require {DRIVER_PART}"
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT_MS)
        if IS_FIREFOX:
            browser = playwright.firefox.launch(
                channel="moz-firefox",
                executable_path=program,
                firefox_user_prefs=PREFERENCES,
                args=["--remote-allow-system-access"],  # for the preference that firefox.cjs sets
            )
        else:
            browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


def make_context(browser: Browser, **options: Any) -> BrowserContext:
    """A context that remembers nothing, without service workers unless `options` allow them."""
    context = browser.new_context(**{"service_workers": "block", **options})
    if IS_FIREFOX:
        context.add_init_script(f"({INSERT_TEXT})(); ({NOTE_SENT})(); ({NOTE_SAVED})()")
        if options.get("has_touch"):
            context.add_init_script(f"({TOUCH})()")
    else:  # Firefox has a preference for that
        context.grant_permissions(["clipboard-read", "clipboard-write"])
    return context


def read_sent(request: Request) -> Any:
    """The JSON that a request of the page carried; in Firefox, the last one to its path."""
    text, path = request.post_data, urlsplit(request.url).path
    if text is None and IS_FIREFOX:
        text = request.frame.page.evaluate("(path) => window.sent.findLast(([to]) => path.endsWith(to))?.[1]", path)
    return json.loads(text or "{}")


@dataclass
class Saved:
    """A file that the page had the browser save."""

    name: str = ""
    text: str = ""


@contextmanager
def saving(page: Page) -> Iterator[Saved]:
    """Yield a file that is filled in, at the end of the block, with what the page saved in it."""
    saved = Saved()
    if IS_FIREFOX:
        before = page.evaluate("() => window.saved.length")
        yield saved
        page.wait_for_function("(before) => window.saved.length > before", arg=before)
        saved.name, saved.text = page.evaluate("() => window.saved.at(-1)")
        return
    with page.expect_download() as waiting:
        yield saved
    saved.name, saved.text = waiting.value.suggested_filename, Path(waiting.value.path()).read_text()


@dataclass
class Visit:
    """One open tab. `requests` are the addresses that it asked for; `faults` is what must stay empty."""

    page: Page
    origin: str
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def foreign_requests(self) -> list[str]:
        """Addresses outside the server that the page came from."""
        return [url for url in self.requests if not self._is_own(url)]

    def watch(self) -> None:
        """Note requests, errors that nobody caught, and what the browser refused or complained of."""
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", self._note_error)
        self.page.on("console", self._note)

    def check(self) -> None:
        """Fail if the page had a fault or asked another server."""
        assert not self.faults, self.faults
        assert not self.foreign_requests, self.foreign_requests

    def _note_error(self, error: Error) -> None:
        if not (IS_FIREFOX and REFUSED in str(error)):
            self.faults.append(f"uncaught: {error}")

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(HARMLESS):
            self.faults.append(f"console: {message.text}")

    def _is_own(self, url: str) -> bool:
        return url.startswith(f"{self.origin}/") or urlsplit(url).scheme in OWN_SCHEMES


def open_tab(context: BrowserContext, origin: str, path: str = "/") -> Visit:
    """A new tab of `context` at `path`, watched from its beginning."""
    context.set_default_timeout(WAIT_MS)
    visit = Visit(context.new_page(), origin)
    visit.watch()
    visit.page.goto(f"{origin}{path}")
    return visit
