"""The report in a real browser: what the viewer does when it is searched, sorted, filtered, pointed at and typed to.

    make test-browser
    python -m tests.tools.report.browser --out FOLDER    # screenshots and the record, in FOLDER
    python -m tests.tools.report.browser --run runs/x    # also the images of a run's own report

Needs Chromium; a machine without one is told so. Every check is a function of the open page; the first that fails ends
the script with its name.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

from archon.data.shapes import scenes
from archon.tools.report import write_comparison, write_report
from archon.training.metrics import IMAGES_FOLDER, MetricsWriter, TrajectoryWriter
from tests.tools.report.chromium import Page

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"><b>bold</b>'
STEPS, PER_GROUP = 6, 8
Check = Callable[[Page], None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def small_run(folder: Path) -> Path:
    """Six groups of eight: rewards 0 to 7 eighths, one hostile answer, one of two turns and two versions; one of them
    of an evaluation."""
    folder.mkdir()
    with (
        closing(MetricsWriter(folder / "metrics.jsonl")) as metrics,
        closing(TrajectoryWriter(folder / "trajectories.jsonl")) as writer,
    ):
        for step in range(1, STEPS + 1):
            metrics.write(step, {"reward": step / STEPS, "seconds/rollout": 1.0, "staleness_max": step % 2})
            for sample in range(PER_GROUP):
                text = HOSTILE if (step, sample) == (2, 3) else f"answer {step}.{sample}"
                tokens = [text] if text == HOSTILE else list(text)
                logprobs = [-0.05, -0.4, -1.2, -2.5, -4.0, -7.5]
                extra = {
                    "length": len(tokens) + sample,
                    "advantage": (sample - 3.5) / 8,
                    "split": "eval" if step == 4 else "train",
                    "tokens": tokens,
                    "logprobs": [logprobs[i % 6] for i in range(len(tokens))],
                    "version": step - 1,
                    "answer": "7√3",
                    "stop_reason": "length" if sample == 2 else "stop",
                }
                if (step, sample) == (6, 7):
                    text, given = "no1yes", "again"
                    extra |= {
                        "tokens": ["no", "1", given, "yes"],
                        "logprobs": [-0.1, -0.2, None, -6.0],
                        "turn_ids": [0, 0, -1, 1],
                        "versions": [4, 4, -1, 5],
                        "length": 3,
                    }
                writer.write(step, step, f"prompt of step {step}: {HOSTILE}", text, sample / 8, **extra)
    return folder


def large_run(folder: Path, groups: int = 2000) -> Path:
    """Sixteen thousand answers of a hundred tokens, and one group of very long ones."""
    folder.mkdir()
    draw = random.Random(0)
    MetricsWriter(folder / "metrics.jsonl").write(1, {"reward": 0.5})
    with (folder / "trajectories.jsonl").open("w", encoding="utf-8") as file:
        for group in range(groups):
            for _ in range(PER_GROUP):
                n = 8000 if group == groups - 1 else 100
                logprobs = [round(-3 * draw.random(), 2) for _ in range(n)]
                record = {"step": group, "group": group, "prompt": "p" * 300, "completion": "word " * n}
                record |= {"reward": draw.random(), "length": n, "tokens": ["word "] * n, "logprobs": logprobs}
                file.write(json.dumps(record) + "\n")
    return folder


def image_run(folder: Path) -> Path:
    """Three groups of four answers to questions about drawn scenes; the second question has two images, and a image
    of the third is lost."""
    (folder / IMAGES_FOLDER).mkdir(parents=True)
    MetricsWriter(folder / "metrics.jsonl").write(1, {"reward": 0.5})
    drawn = scenes("test")
    with closing(TrajectoryWriter(folder / "trajectories.jsonl")) as writer:
        for step in (1, 2, 3):
            (_, question, answer), names = drawn[2 * step], list[str]()
            for scene, _, _ in drawn[2 * step : 2 * step + (2 if step == 2 else 1)]:
                data = scene.image()
                names.append(f"{sha256(data).hexdigest()[:16]}.png")
                (folder / IMAGES_FOLDER / names[-1]).write_bytes(data)
            if step == 3:
                names.append("0123456789abcdef.png")
            for sample in range(4):
                given = answer if sample % 2 else "none"
                writer.write(step, step, question, given, float(sample % 2), answer=answer, images=names, length=2)
    return folder


def rows(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.list .row')].map(r => r.innerText.replace(/\\s+/g, ' '))")


def select(page: Page, label: str, text: str) -> None:
    page.run(
        f"(() => {{ const s = document.querySelector('select[aria-label={label}]');"
        f" s.value = [...s.options].find(o => o.text === {json.dumps(text)}).value;"
        " s.dispatchEvent(new Event('change')); })()"
    )


def search(page: Page, text: str) -> None:
    page.run(
        "(() => { const s = document.querySelector('.bar input'); s.focus(); s.value = '';"
        " s.dispatchEvent(new Event('input')); })()"
    )
    if text:
        page.ask("Input.insertText", text=text)
    page.run("new Promise(done => setTimeout(done, 300))")


def card(page: Page, script: str) -> object:
    """An expression over `c`, the chosen answer's card."""
    return page.run(f"(() => {{ const c = document.querySelector('.sample.chosen'); return {script}; }})()")


@check
def everything_is_listed_newest_step_first(page: Page) -> None:
    assert page.run("document.querySelector('.where').textContent") == "48 of 48 match"
    listed = rows(page)
    assert len(listed) == 48 and listed[0].startswith("step 6 · reward 0 · advantage"), listed[:2]
    assert listed[-1].startswith("step 1 · reward 0.875"), listed[-1]
    assert "All 48 trajectories" in page.run("document.querySelector('.note').textContent")
    assert page.run("document.querySelectorAll('.chart').length") >= 3


@check
def texts_of_the_run_are_only_text(page: Page) -> None:
    search(page, "onerror")
    select(page, "step", "step 2")
    select(page, "order", "highest reward first")
    assert len(rows(page)) == 8, "the prompts of step 2 hold it"
    assert HOSTILE in page.run("document.querySelector('.prompt .text').textContent")
    assert page.run("[...document.querySelectorAll('.token')].some(t => t.textContent.startsWith('</script>'))")
    assert page.run("document.querySelectorAll('main img, main b:not(.legend b), main script').length") == 0
    assert not page.reported("Page.javascriptDialogOpening")


@check
def search_finds_prompts_and_answers(page: Page) -> None:
    search(page, "ANSWER 3.5")
    assert [row.split(" answer")[-1] for row in rows(page)] == [" 3.5"], rows(page)
    assert page.run("document.querySelector('.where').textContent") == "1 of 48 match"
    search(page, "prompt of step 3")
    assert len(rows(page)) == 8
    search(page, "nowhere to be found")
    assert rows(page) == [] and page.run("document.querySelector('.view').children.length") == 0


@check
def orders_sort_the_list(page: Page) -> None:
    def numbers(name: str) -> list[float]:
        return [float(row.split(f"{name} ")[1].split(" ")[0]) for row in rows(page)]

    for text, name, descending in [
        ("highest reward first", "reward", True),
        ("lowest reward first", "reward", False),
        ("highest advantage first", "advantage", True),
        ("lowest advantage first", "advantage", False),
        ("oldest step first", "step", False),
        ("newest step first", "step", True),
    ]:
        select(page, "order", text)
        assert numbers(name) == sorted(numbers(name), reverse=descending), text
    select(page, "order", "longest first")
    lengths = [int(row.split(" tokens")[0].split(" ")[-1]) for row in rows(page)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


@check
def filters_by_step_and_split(page: Page) -> None:
    select(page, "split", "eval")
    assert len(rows(page)) == 8 and all(row.startswith("step 4") for row in rows(page))
    select(page, "split", "train")
    assert len(rows(page)) == 40
    select(page, "step", "step 5")
    assert len(rows(page)) == 8 and all(row.startswith("step 5") for row in rows(page))


@check
def filters_by_reward_length_and_end(page: Page) -> None:
    select(page, "reward", "highest reward, 0.875")
    assert len(rows(page)) == 6 and all("reward 0.875" in row for row in rows(page))
    select(page, "reward", "lowest reward, 0")
    assert len(rows(page)) == 6
    select(page, "reward", "any reward")
    select(page, "end", "ended by length")
    assert len(rows(page)) == 6 and all(row.endswith(".2") for row in rows(page)), rows(page)
    select(page, "end", "any end")
    texts = page.run("[...document.querySelector('select[aria-label=length]').options].map(o => o.text)")
    for index, (compare, word) in enumerate([(float.__ge__, "from"), (float.__le__, "up to")], start=1):
        select(page, "length", texts[index])
        bound, lengths = (
            float(texts[index].split(word)[1]),
            [float(row.split(" tokens")[0].split()[-1]) for row in rows(page)],
        )
        assert lengths and len(lengths) < 30 and all(compare(length, bound) for length in lengths), (texts, lengths)


@check
def tokens_are_colored_by_their_logprob(page: Page) -> None:
    select(page, "step", "step 1")
    colors = card(page, "[...c.querySelectorAll('.token')].slice(0, 6).map(t => getComputedStyle(t).backgroundColor)")
    assert isinstance(colors, list) and len(set(colors)) == 6, colors
    assert colors[0] == "rgba(0, 0, 0, 0)", "a likely token bears no color"
    strength = [float(color.rstrip(")").split(" ")[-1]) for color in colors]
    assert strength == sorted(strength), colors
    legend = page.run("[...document.querySelectorAll('.scale .token')].map(t => getComputedStyle(t).backgroundColor)")
    assert legend[:6] == colors


@check
def the_pointer_reads_a_token(page: Page) -> None:
    select(page, "step", "step 1")
    page.point(".sample.chosen [data-token='2']")
    expected = 'token 3 of 10 · "s" · logprob -1.2, p = 30.1 % · version 0'
    assert page.run("document.querySelector('.reading').textContent") == expected
    assert card(page, "c.querySelector('[data-token=\"2\"]').title") == expected


@check
def arrow_keys_read_tokens_and_rows(page: Page) -> None:
    select(page, "step", "step 1")
    page.run("document.querySelector('.list .row').focus()")
    page.press("ArrowDown", 40)
    page.press("ArrowDown", 40)
    assert page.run("document.activeElement.innerText").endswith("answer 1.2")
    assert page.run("document.activeElement.getAttribute('aria-current')") == "true"
    assert card(page, "c.querySelector('.text').textContent") == "answer 1.2"
    page.press("End", 35)
    assert page.run("document.activeElement.innerText").endswith("answer 1.7")
    page.press("ArrowDown", 40)
    assert page.run("document.activeElement.innerText").endswith("answer 1.7"), "the list ends there"
    page.run("document.querySelector('.sample.chosen .tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight", 39)
    page.press("ArrowLeft", 37)
    assert page.run("document.querySelector('.reading').textContent").startswith('token 2 of 10 · "n"')


@check
def everything_can_be_reached_by_tab(page: Page) -> None:
    search(page, "")
    reached = []
    for _ in range(12):
        page.press("Tab", 9)
        reached.append(page.run("document.activeElement.className || document.activeElement.tagName"))
    for wanted in ("SELECT", "row", "SUMMARY", "text tokens"):
        assert wanted in reached, reached
    assert reached.count("row") == 1, "the list is one stop"


@check
def turns_and_versions_are_told_apart(page: Page) -> None:
    search(page, "no1yes")
    parts = card(page, "[...c.querySelector('.tokens').children].map(e => e.className + '|' + e.textContent)")
    assert parts == [
        "turn|turn 1",
        "version|v4",
        "token p0|no",
        "token p1|1",
        "turn|model input, not trained",
        "token input|again",
        "turn|turn 2",
        "version|v5",
        "token p5|yes",
    ], parts
    chips = card(page, "[...c.querySelectorAll('.chip')].map(e => e.textContent)")
    assert isinstance(chips, list) and {"2 turns", "versions 4–5", "3 tokens"} <= set(chips), chips
    page.point(".sample.chosen .token.input")
    assert "model input, not trained" in page.run("document.querySelector('.reading').textContent")


@check
def the_prompt_folds_and_stays_folded(page: Page) -> None:
    assert page.run("document.querySelector('details.prompt').open") is True
    page.run("document.querySelector('details.prompt summary').focus()")
    page.press("Enter", 13, "\r")
    assert page.run("document.querySelector('details.prompt').open") is False
    page.run("document.querySelectorAll('.list .row')[20].click()")
    assert page.run("document.querySelector('details.prompt').open") is False


@check
def dark_and_light_both_can_be_read(page: Page) -> None:
    def contrasts() -> list[float]:
        """Of the plain text of an answer, and of each class of tokens."""
        script = (
            "[document.querySelector('.sample'), ...document.querySelectorAll('.scale .token:not(.input)')]"
            ".map(e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor])"
        )
        (ink, paper), *tokens = [[channels(color) for color in pair] for pair in page.run(script)]
        return [contrast(ink, paper), *(contrast(own, over(ground, paper)) for own, ground in tokens)]

    select(page, "step", "step 1")
    for wanted in (True, False):
        page.dark(wanted)
        paper = page.run("getComputedStyle(document.querySelector('.sample')).backgroundColor")
        assert (luminance(channels(paper)) < 0.1) is wanted, paper
        plain, *colored = contrasts()
        assert plain >= 7 and min(colored) >= 4.5, (plain, colored)


def channels(color: str) -> list[float]:
    """Red, green, blue and opacity of `rgb(r, g, b)` or `rgba(r, g, b, a)`, from 0 to 1."""
    parts = [float(part) for part in color.partition("(")[2].rstrip(")").split(",")]
    return [part / 255 for part in parts[:3]] + (parts[3:] or [1.0])


def over(ground: list[float], paper: list[float]) -> list[float]:
    return [ground[3] * a + (1 - ground[3]) * b for a, b in zip(ground[:3], paper[:3], strict=True)]


def luminance(color: list[float]) -> float:
    """Relative luminance (WCAG 2)."""
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(ink: list[float], paper: list[float]) -> float:
    dark, light = sorted((luminance(ink), luminance(paper)))
    return (light + 0.05) / (dark + 0.05)


def check_images(page: Page, file: Path) -> int:
    """Every image of every group is decoded, and shown large enough to see, above the answers. Returns how many."""
    page.open(file)
    seen = set[str]()
    for index in range(len(rows(page))):
        page.run(f"document.querySelectorAll('.list .row')[{index}].click()")
        found = page.run(
            "Promise.all([...document.querySelectorAll('.image')].map(async image => {"
            " await image.decode(); const box = image.getBoundingClientRect();"
            " const answers = document.querySelector('.samples').getBoundingClientRect();"
            " return [image.naturalWidth, image.naturalHeight, box.width, box.height, answers.top - box.bottom,"
            " image.src, image.alt]; }))"
        )
        assert found, f"row {index} has no image"
        for number, (width, height, shown_width, shown_height, above, source, alt) in enumerate(found, 1):
            assert width > 0 and height > 0 and min(shown_width, shown_height) >= 96 and above >= 0, found
            assert abs(shown_width / shown_height - width / height) < 0.05, "a image keeps its shape"
            assert alt == f"image {number} of the prompt"
            seen.add(source)
    return len(seen)


def check_image_run(page: Page, file: Path) -> None:
    """Pictures above the answers; one whose file is lost says so."""
    assert check_images(page, file) == 4
    search(page, "")
    for step, shown, lost in ((1, 1, 0), (2, 2, 0), (3, 1, 1)):
        select(page, "step", f"step {step}")
        assert page.run("document.querySelectorAll('.image').length") == shown
        texts = page.run("[...document.querySelectorAll('.images .label')].map(e => e.textContent)")
        assert texts == ["image 2 is not shown"] * lost, texts
    select(page, "step", "step 2")


def check_large(page: Page, file: Path) -> dict[str, float]:
    """A dump of sixteen thousand answers: the page opens, is searched and sorted without freezing."""
    size = file.stat().st_size
    seconds = {"load": page.open(file)}
    note = page.run("document.querySelector('.note').textContent")
    assert "of 16,000 trajectories" in note and "evenly spaced" in note, note
    assert page.run("document.querySelectorAll('.list .row').length") == 200
    assert page.run("document.querySelectorAll('.token').length") < 30_000
    assert "first 4096 of 8000 tokens" in page.run("document.querySelector('.chips').innerText.replace(',', '')")
    for name, script in {
        "sort": "(() => { const s = document.querySelector('select[aria-label=order]'); s.value = 'best';"
        " s.dispatchEvent(new Event('change')); })()",
        "choose": "document.querySelectorAll('.list .row')[100].click()",
        "more": "document.querySelector('.more button').click()",
    }.items():
        started = time.monotonic()
        page.run(f"{script}; document.body.offsetHeight")
        seconds[name] = time.monotonic() - started
    assert page.run("document.querySelectorAll('.list .row').length") == 400
    started = time.monotonic()
    search(page, "word")
    seconds["search"] = time.monotonic() - started - 0.3
    assert size < 20_000_000, size
    assert seconds["load"] < 10 and max(seconds[name] for name in ("sort", "choose", "more", "search")) < 2, seconds
    return {"megabytes": size / 1e6} | seconds


def check_comparison(page: Page, file: Path) -> None:
    """Two runs on one page: settings, curves of both, and the prompts that changed, as text alone."""
    page.open(file)
    titles = page.run("[...document.querySelectorAll('section:not([hidden]) > h2')].map(e => e.textContent)")
    assert titles == ["What was trained", "Settings that differ", "Prompts"], titles
    assert page.run("document.querySelectorAll('.chart .line').length") == 2
    assert "Both runs answered 3 prompts" in page.run("document.body.innerText")
    assert page.run("document.querySelectorAll('main img, main script').length") == 0


def check_phone(out: Path, files: dict[str, Path]) -> None:
    """At a width of 390 pixels nothing is wider than the window, in light and in dark."""
    with Page(390, 844) as page:
        for name, file in files.items():
            page.open(file)
            for theme in ("light", "dark"):
                page.dark(theme == "dark")
                page.screenshot(out / f"phone-{name}-{theme}.png")
            assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), name
        assert not page.reported("Runtime.exceptionThrown", "Log.entryAdded")


def screenshot(page: Page, file: Path) -> None:
    page.run("document.querySelector('#trajectories').scrollIntoView()")
    page.screenshot(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/browser"), help="folder of the pages and screenshots")
    parser.add_argument("--run", type=Path, help="folder of a run with images whose report is seen too")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    work = out / time.strftime("%Y%m%d-%H%M%S")
    work.mkdir()
    [small] = write_report(small_run(work / "small"), curves=False)
    [large] = write_report(large_run(work / "large"), curves=False)
    [pictured] = write_report(image_run(work / "pictured"), curves=False)
    compared = write_comparison(work / "pictured", image_run(work / "again"))
    with Page() as page:
        for function in CHECKS:
            page.open(small)
            function(page)
            print(f"ok  {function.__name__.replace('_', ' ')}", flush=True)
        page.open(small)
        search(page, "step 6")
        for name in ("light", "dark"):
            page.dark(name == "dark")
            screenshot(page, work / f"viewer-{name}.png")
        page.dark(False)
        check_image_run(page, pictured)
        screenshot(page, work / "images.png")
        print("ok  images are decoded, and stand above the answers")
        check_comparison(page, compared)
        print("ok  two runs are compared on one page")
        check_phone(work, {"report": small, "images": pictured, "comparison": compared})
        print("ok  the pages fit a phone")
        if options.run is not None:
            [of_run] = write_report(options.run, curves=False)
            print(f"ok  {check_images(page, of_run)} images of {options.run}")
            screenshot(page, work / "images-run.png")
        measured = {name: round(value, 2) for name, value in check_large(page, large).items()}
        print(f"ok  a dump of 16,000 answers: {measured}")
        asked = {e["request"]["url"].partition(":")[0] for e in page.reported("Network.requestWillBeSent")}
        assert asked == {"file", "data"}, f"the page asked for {asked}, not only for itself and images within it"
        wrong = list(page.reported("Runtime.exceptionThrown", "Log.entryAdded"))
        assert not wrong, wrong
        print("ok  no request, no exception, no complaint of the content security policy")
        record = {"browser": page.version, "checks": [f.__name__ for f in CHECKS], "large": measured}
    (work / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{record['browser']}: {len(CHECKS) + 5} checks; pages, screenshots and record in {work}")


if __name__ == "__main__":
    main()
