"""The page in a real browser: every control, hostile answers, a phone's width, and the pictures for the documents."""

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from page_server import KEY, PageServer
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

SECONDS = 60
TOOLS = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'


class Browser:
    """Headless Chromium on the page, with the few verbs that the checks need."""

    def __init__(self, url: str, width: int = 1100, height: int = 800) -> None:
        options = webdriver.ChromeOptions()
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.add_argument("--force-device-scale-factor=1")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.resize(width, height)
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: condition(), what)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def set(self, selector: str, value: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(value + Keys.TAB)

    def press(self, label: str, within: str = "body") -> None:
        buttons = [each for each in self.all(f"{within} button") if each.text == label and each.is_displayed()]
        buttons[-1].click()

    def say(self, text: str) -> None:
        self.one("#prompt").send_keys(text + Keys.ENTER)

    def idle(self) -> None:
        self.until(lambda: self.one("#send").is_displayed(), "the answer ends")

    def answer(self, text: str) -> Any:
        """Says `text`, waits for the whole answer, and gives its element."""
        before = len(self.all(".message"))
        self.say(text)
        self.until(lambda: len(self.all(".message")) == before + 2, "an answer begins")
        self.idle()
        return self.all(".message")[-1]

    def picture(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))


def check(condition: object, what: str) -> None:
    print(("ok    " if condition else "FAIL  ") + what, flush=True)
    if not condition:
        sys.exit(1)


def check_key(page: Browser) -> None:
    page.until(lambda: "API key" in page.one("#notice").text, "the page asks for a key")
    check(page.one("#settings").is_displayed(), "without a key the settings open and the page asks for one")
    page.set("#api-key", KEY)
    page.until(lambda: len(page.all("#model option")) == 2, "models listed")
    stored = page.run("return [sessionStorage.length, Object.keys(localStorage).some(k => k.includes('key'))]")
    check(stored[0] == 1 and not stored[1], "the key is kept for this tab alone unless asked otherwise")
    page.press("Settings")


def check_answers(page: Browser, server: PageServer) -> None:
    answer = page.answer("say markdown")
    found = [bool(answer.find_elements(By.CSS_SELECTOR, each)) for each in ("h4", "strong", "em", "ol ul", "table td")]
    check(all(found), "markdown becomes headings, lists and tables")
    check("<b>not bold</b>" in answer.find_element(By.CSS_SELECTOR, ".code pre").text, "code stays as written")
    reasoning = answer.find_element(By.CSS_SELECTOR, "details.reasoning")
    check(reasoning.get_attribute("open") is None and "reader wants" in reasoning.get_attribute("textContent"),
          "reasoning is folded")  # fmt: skip
    figures = answer.find_element(By.CSS_SELECTOR, ".figures").text
    check("first token" in figures and "tokens/s" in figures, f"figures are shown: {figures}")
    check(page.one("#status").get_attribute("textContent").startswith("Answer: "), "the live region tells the answer")
    link = answer.find_element(By.CSS_SELECTOR, "blockquote a")
    check("noopener" in link.get_attribute("rel"), "links open without an opener")

    hostile = page.answer("say hostile")
    inside = hostile.find_elements(By.CSS_SELECTOR, ".text :is(img, script, svg, i, iframe)")
    links = [each.get_attribute("href") for each in hostile.find_elements(By.CSS_SELECTOR, ".text a")]
    check(not inside and page.run("return window.broken === undefined"), "hostile markup stays text")
    check(links == ["https://example.org/pixel.png"], "only safe links are links, and pictures are not fetched")

    last = page.all(".message")[-2]
    last.find_element(By.XPATH, ".//button[text()='Edit']").click()
    box = page.one("textarea.edit")
    box.clear()
    box.send_keys("say markdown again")
    page.press("Save and send")
    page.idle()
    check(len(page.all(".message")) == 4 and page.all(".message")[-1].find_elements(By.CSS_SELECTOR, "table"),
          "an edited message is sent again")  # fmt: skip
    asked = len(server.llm.prompts)
    page.press("Retry", "#log")
    page.until(lambda: len(server.llm.prompts) == asked + 1, "asked again")
    page.idle()
    check(len(page.all(".message")) == 4 and server.llm.prompts[-1] == server.llm.prompts[-2], "retry asks the same")


def check_stop(page: Browser, server: PageServer) -> None:
    page.say("say endless")
    page.until(lambda: "tick" in page.all(".message")[-1].text, "the answer streams")
    check(page.one("#stop").is_displayed(), "Stop is shown while an answer comes")
    page.one("#stop").click()
    page.until(lambda: server.llm.num_running == 0, "the server stops")
    page.idle()
    check("stopped" in page.all(".message")[-1].text, "Stop ends the request on the server too")
    page.say("say endless")
    page.until(lambda: server.llm.num_running == 1, "the answer streams")
    page.one("body").send_keys(Keys.ESCAPE)
    page.until(lambda: server.llm.num_running == 0, "the server stops")
    check(True, "Escape stops")


def check_settings(page: Browser, server: PageServer) -> None:
    page.press("New chat")
    check(not page.all(".message"), "a new chat is empty")
    page.press("Settings")
    page.set("[data-setting=system]", "Talk like a sailor")
    page.set("[data-setting=tools]", TOOLS)
    page.set("[data-setting=max_tokens]", "300")
    Select(page.one("#model")).select_by_index(1)
    page.press("Settings")
    call = page.answer("say call")
    folded = call.find_element(By.CSS_SELECTOR, "details.call")
    check("get_weather" in folded.text and '"city": "Bern"' in folded.get_attribute("textContent"),
          "a tool call is folded and readable")  # fmt: skip
    check("Talk like a sailor" in server.llm.prompts[-1], "the system prompt is sent")
    page.one("textarea[data-call]").send_keys("say markdown")
    page.press("Send results")
    page.until(lambda: len(page.all(".message")) == 4, "the result is sent")
    page.idle()
    check("Sums" in page.all(".message")[-1].text, "the model goes on with the tool's result")
    page.press("Settings")
    page.set("[data-setting=tools]", "[")
    page.press("Settings")
    wrong = page.answer("say markdown")
    check("tools is not valid JSON" in wrong.text, "a setting that is wrong is named")
    page.press("Settings")
    page.set("[data-setting=tools]", "")
    page.set("[data-setting=temperature]", "0")
    page.press("Settings")
    page.driver.refresh()
    page.until(lambda: len(page.all("#model option")) == 2, "models listed")
    check(page.one("[data-setting=system]").get_attribute("value") == "Talk like a sailor"
          and len(page.all(".message")) >= 6, "settings and conversation outlive a reload")  # fmt: skip
    page.press("Settings")
    for name in ("system", "max_tokens"):
        page.set(f"[data-setting={name}]", "")
    page.press("Settings")
    page.press("New chat")


def check_long(page: Browser) -> None:
    page.run(
        "window.longest = 0; new PerformanceObserver(list => { for (const entry of list.getEntries())"
        " window.longest = Math.max(window.longest, entry.duration); }).observe({ type: 'longtask' });"
    )
    answer = page.answer("say long")
    count = len(answer.find_elements(By.CSS_SELECTOR, ".text > p"))
    check(count == 150, f"a long answer arrives whole; longest task of the page {page.run('return window.longest')} ms")
    page.press("New chat")


def check_accessible(page: Browser) -> None:
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, select, textarea, a')].filter(e => !(e.textContent.trim()"
        " || e.labels?.length || e.getAttribute('aria-label'))).map(e => e.outerHTML)"
    )
    check(not unnamed, f"every control has a name {unnamed}")
    page.run("document.querySelector('.skip').focus()")
    names = []
    for _ in range(10):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        names.append(page.run("return document.activeElement.id || document.activeElement.tagName"))
    order = ["show-chat", "show-server", "model", "new-chat", "theme", "toggle-settings", "log", "prompt", "send"]
    check(names[: len(order)] == order, f"the keyboard reaches every part in order: {names}")


def check_phone(page: Browser) -> None:
    page.resize(390, 800)
    wide = page.run("return document.documentElement.scrollWidth")
    check(wide <= 390, f"nothing is wider than a phone ({wide})")


def load(url: str, ended: threading.Event) -> None:
    """Requests to the real engine, for the graphs to show."""
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True}
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS) as client:
        while not ended.is_set():
            client.post(f"{url}/v1/completions", json=body).raise_for_status()


def check_graphs(page: Browser, server: PageServer) -> None:
    ended = threading.Event()
    workers = [threading.Thread(target=load, args=(server.url, ended)) for _ in range(6)]
    for worker in workers:
        worker.start()
    try:
        page.one("#show-server").click()
        lines = "return [...document.querySelectorAll('figure svg')].map(e => e.getAttribute('aria-label'))"
        page.until(lambda: len(page.all("figure")) == 6 and "–" not in "".join(page.run(lines) or ["–"]), "all figures")
        drawn = "return document.querySelector('figure path').getAttribute('d').split('L').length"
        page.until(lambda: page.run(drawn) > 35, "graphs fill")
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    for label in page.run(lines):
        print("     ", label)
    check(True, "six graphs of live figures")


def check_console(page: Browser) -> None:
    lines = [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]
    lines = [line for line in lines if "v1/models" not in line and "400 (Bad Request)" not in line]
    check(not lines, f"no error and no breach of the policy in the console {lines}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    pictures = parser.parse_args().pictures
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        server = PageServer(Path(folder))
        page = Browser(server.url)
        try:
            run_all(page, server, pictures)
        finally:
            page.driver.quit()
            server.close()
    print(f"all well, {time.monotonic() - started:.0f} s")


def run_all(page: Browser, server: PageServer, pictures: Path | None) -> None:
    def picture(name: str) -> None:
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            page.picture(pictures / f"{name}.png")

    check_key(page)
    check_answers(page, server)
    check_stop(page, server)
    check_settings(page, server)
    check_long(page)
    check_accessible(page)
    page.answer("say markdown")
    page.run("document.activeElement.blur(); document.getElementById('log').scrollTop = 0")
    page.one("#theme").click()
    picture("page-chat")
    page.one("#theme").click()
    check_phone(page)
    picture("page-phone")
    page.resize(1100, 800)
    page.one("#theme").click()
    check_graphs(page, server)
    picture("page-server")
    check_console(page)


if __name__ == "__main__":
    sys.exit(main())
