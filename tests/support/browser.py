"""Chromium without a window, for the tests of the HTML report. Skips them where it is not installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.processes import HANG_S, wait_for

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
         "--force-prefers-reduced-motion")


class Page:
    """One page in a browser: what is on it, and what a reader does with it."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path: Path, address: str = "") -> None:
        """Open a file from disk and wait until it can be used; `address`: what follows the #."""
        self.driver.get("about:blank")  # or a new address alone would only be followed
        self.driver.get(f"file://{path}" + (f"#{address}" if address else ""))
        self.wait("document.body.dataset.ready === 'true'")

    def js(self, expression: str):
        """The value of an expression."""
        return self.driver.execute_script(f"return ({expression})")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        wait_for(lambda: self.js(condition), condition)

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({selector!r}).textContent")

    def texts(self, selector: str) -> list[str]:
        return self.js(f"[...document.querySelectorAll({selector!r})].map((item) => item.textContent)")

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def press(self, *keys: str) -> None:
        """Type on whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def logged(self) -> list[str]:
        """Errors and warnings of the console since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile folder; skips the test where there is none."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1440,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        driver.set_script_timeout(HANG_S)
        driver.set_page_load_timeout(HANG_S)
        yield Page(driver)
    finally:
        driver.quit()
