# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium for tests of the page: started offline, looked into, driven by keys."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
WIDE, PHONE = 1280, 390


@contextmanager
def started() -> Iterator[Any]:
    """Start a browser of its own profile, or skip where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    for name, path in found.items():
        if path is None:
            pytest.skip(f"{name} is not installed (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(found["chromedriver"]))
        try:
            driver.get("about:blank")  # leave the start page, which loads files of its own
            yield driver
        finally:
            driver.quit()


def look(driver: Any, *, width: int = WIDE, dark: bool = False, media: str = "") -> None:
    """Set the window's width in CSS pixels, the reader's colours and the medium."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})


def visit(driver: Any, page: Path, **how: Any) -> None:
    """Load a page afresh; what was logged before is forgotten."""
    look(driver, **how)
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(page.as_uri())


def asked(driver: Any) -> list[str]:
    """Return every address asked for since the log was read last."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


def requests(driver: Any, page: Path) -> list[str]:
    """Return the addresses asked for after the page itself, data URIs apart.

    What was under way before it (Chromium's own start page) is not the page's doing.
    """
    log = asked(driver)
    assert page.as_uri() in log, "the log of requests is empty"
    later = log[log.index(page.as_uri()) + 1 :]
    return [a for a in later if a != page.as_uri() and not a.startswith("data:")]


def complaints(driver: Any) -> list[str]:
    """Return warnings and errors of the console since the visit."""
    return [e["message"] for e in driver.get_log("browser") if e["level"] in ("WARNING", "SEVERE")]


def find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def texts(driver: Any, selector: str) -> list[str]:
    """Return the texts of what is shown of a selector."""
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter((e) => e.checkVisibility()).map((e) => e.textContent.trim())",
        selector,
    )


def focused(driver: Any) -> Any:
    return driver.switch_to.active_element


def press(driver: Any, *keys: str) -> None:
    """Press keys one after another on whatever has the focus."""
    from selenium.webdriver import ActionChains

    chain = ActionChains(driver, duration=0)
    for key in keys:
        chain.send_keys(key)
    chain.perform()


def wait_until(driver: Any, script: str) -> None:
    """Wait until a script returns something true."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(driver, 10).until(lambda one: one.execute_script(script))
