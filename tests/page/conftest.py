"""A browser, servers, and tabs that are watched, for the flows of the page.

Every test gets a fresh context, so storage and databases are empty. When a tab that a fixture opened closes, it must
have had no error and asked nobody but the server; a test that provokes one empties `visit.faults` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import IS_FIREFOX, Visit, find_age, find_browser, make_context, open_tab, start_browser
from page_server import PageServer
from playwright.sync_api import Browser, BrowserContext, Page

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "src" / "mlxr" / "server" / "page" / "index.html"
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
# Colours are judged once they stop changing. A new width or theme is told with the next frame, which may start changes.
SETTLED = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  await Promise.all(document.getAnimations()
    .filter(animation => animation instanceof CSSTransition)
    .map(animation => animation.finished.catch(() => {})));
}"""
MakePageServer = Callable[..., PageServer]
OpenTab = Callable[..., Visit]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--demand-browser", action="store_true", help="fail where there is no browser instead of skipping")
    parser.addoption("--save-pictures", action="store_true", help="write the pictures of the documentation")


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Chromium, or with PAGE_BROWSER=firefox Firefox, for all tests."""
    missing = None if BUILT.exists() else "the page is not built; `make page` builds it"
    program = find_browser()
    if program is None:
        missing = "no Chromium was found; install it (Debian: apt install chromium), or name one in CHROMIUM"
        if IS_FIREFOX:
            missing = "no Firefox was found; install it (Debian: apt install firefox-esr), or name one in FIREFOX"
    elif IS_FIREFOX and missing is None:
        missing = find_age(program)
    if missing is not None:
        if request.config.getoption("--demand-browser"):
            pytest.fail(missing)
        pytest.skip(missing)
    assert program is not None
    with start_browser(program) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with the demo model for all tests of a file; start it again if you kill it."""
    server = PageServer(tmp_path_factory.mktemp("server")).start()
    yield server
    server.kill()


@pytest.fixture
def make_server(browser: Browser, tmp_path: Path) -> Iterator[MakePageServer]:
    """Servers with settings of their own, for one test: `make_server(api_keys="k")`."""
    made: list[PageServer] = []

    def make(**settings: object) -> PageServer:
        folder = tmp_path / f"server-{len(made)}"
        folder.mkdir()
        made.append(PageServer(folder, settings))
        return made[-1].start()

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that remembers nothing; tabs of one test share it."""
    with make_context(browser, viewport={"width": 1280, "height": 800}, accept_downloads=True) as context:
        yield context


@pytest.fixture
def tab(browser: Browser, context: BrowserContext) -> Iterator[OpenTab]:
    """Opens tabs: `tab(server)`, `tab(server, "/#/models")`, or with a browser of its own, `tab(server, width=360)`.

    Other options of its own browser: `height`, `color_scheme` ("dark" or "light"), `reduced_motion`, `has_touch`.
    """
    opened: list[Visit] = []
    contexts: list[BrowserContext] = []

    def open_one(server: PageServer, path: str = "/", **options: object) -> Visit:
        chosen = context
        if options:
            size = {"width": options.pop("width", 1280), "height": options.pop("height", 800)}
            chosen = make_context(browser, viewport=size, **options)
            contexts.append(chosen)
        opened.append(open_tab(chosen, server.url, path))
        return opened[-1]

    yield open_one
    for visit in opened:
        visit.check()
    for own in contexts:
        own.close()


@pytest.fixture
def visit(tab: OpenTab, server: PageServer) -> Visit:
    """One tab with the page of the server that the file's tests share."""
    return tab(server)


@pytest.fixture
def page(visit: Visit) -> Page:
    """The page in that tab."""
    return visit.page


@pytest.fixture
def find_violations() -> Callable[[Page], list[str]]:
    """A function that lists the violations that axe-core finds in a page, on every level."""
    if not AXE.exists():
        pytest.skip(f"{AXE.relative_to(ROOT)} is not there; `npm ci` in web/ installs it")
    program = AXE.read_text()

    def find(page: Page) -> list[str]:
        page.evaluate(f"() => {{ {program} }}")
        page.evaluate(SETTLED)
        found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
        return [
            f"{row['impact']}: {row['id']}: {row['help']}: {[node['target'] for node in row['nodes']]}"
            for row in found["violations"]
        ]

    return find
