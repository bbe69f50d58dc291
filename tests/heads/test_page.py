"""The page of a report, opened in a browser: what it shows, what it answers to, and what it must not run or fetch."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page
from torch import Tensor

from mha_ext.heads.page import FOLDER, write_page
from mha_ext.heads.report import Attention, Input, Report
from tests.commands import run
from tests.heads.browser import started_browser
from tests.heads.sample_report import (
    OTHER,
    OTHER_TOKENS,
    SENTENCE,
    TOKENS,
    large_report,
    sentence_report,
    smallest_report,
    translation_report,
    unknown_report,
)

Show = Callable[..., Page]
DASH = "\N{EN DASH}"
TALL = {"width": 1280, "height": 1800}  # what the pointer is at stays in sight
IT, BECAUSE, ANIMAL = TOKENS.index("it"), TOKENS.index("because"), TOKENS.index("animal")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """show(report, **context) is its page in a browser that has just opened it. After the test: no word on the
    console, no error, no dialog, and no request but for the file."""
    complaints: list[str] = []
    contexts = []

    def shown(report: Report, **context: Any) -> Page:
        file = tmp_path / "heads.html"
        file.write_text(write_page(report), encoding="ascii")
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        requests: list[str] = []
        page.goto(file.as_uri())
        page.wait_for_function("document.querySelector('#compare-numbers').rows.length > 0")
        complaints.extend(f"request: {url}" for url in requests if url != file.as_uri() and url[:5] != "data:")
        return page

    yield shown
    for context in contexts:
        context.close()
    assert complaints == []


def text_of(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


def number_in(text: str) -> float:
    """'6.5e−4' or '12 %', as people read it; nan for a dash."""
    text = text.replace("\N{MINUS SIGN}", "-").strip()
    if text == DASH:
        return math.nan
    return float(text[:-1].strip()) / 100 if text.endswith("%") else float(text)


def same_number(text: str, expected: float) -> bool:
    """Whether text is the number, rounded to the digits that it shows, and before to four; a dash for none."""
    shown = number_in(text)
    if not math.isfinite(expected):
        return math.isnan(shown)
    mantissa, _, exponent = text.strip("\u202f% ").partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent.replace("\N{MINUS SIGN}", "-") or 0)
    last = 10.0 ** -(decimals + (2 if "%" in text else 0))
    return abs(shown - expected) <= 0.5001 * last + 5e-5 * 10 ** math.ceil(math.log10(max(abs(expected), 1e-12)))


# Through a copy: Chromium warns of canvases that are read again and again.
READ = """(selector) => {
  const { width, height } = document.querySelector(selector);
  const copy = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(document.querySelector(selector), 0, 0);
  const data = copy.getImageData(0, 0, width, height).data;
  return data.some((byte) => byte > 0) && [width, height, [...data]];
}"""


def pixels(page: Page, selector: str) -> Tensor:
    """(height, width, 4) of a canvas, once it is painted."""
    page.locator(selector).scroll_into_view_if_needed()
    width, height, data = page.wait_for_function(READ, arg=selector).json_value()
    return torch.tensor(data).view(height, width, 4)


def levels_shown(page: Page, canvas: str, scale: str) -> tuple[Tensor, Tensor]:
    """The least and the largest level, from 0 to 1, that each pixel of a figure has on the legend; nan: none."""
    legend, image = pixels(page, f"{scale} canvas")[0], pixels(page, canvas)
    same = (image[:, :, None] == legend).all(-1)  # (height, width, 255)
    level = torch.arange(len(legend)) / (len(legend) - 1)
    least = torch.where(same, level, math.inf).amin(-1)
    most = torch.where(same, level, -math.inf).amax(-1)
    known = same.any(-1)
    return torch.where(known, least, math.nan), torch.where(known, most, math.nan)


def assert_shows(page: Page, canvas: str, scale: str, expected: Tensor) -> None:
    """Each pixel has the colour of its level, 0 to 1, in 255 steps; what is no number, a colour that no level has."""
    least, most = levels_shown(page, canvas, scale)
    assert least.shape == expected.shape
    half = 0.5 / 254 + 5e-5  # numbers other than weights are kept with four digits
    right = (least - half <= expected) & (expected <= most + half)
    assert (right | (expected.isnan() & least.isnan())).all()


def mean_of_pairs(matrix: Tensor) -> float:
    """Of the entries for two different heads."""
    return ((matrix.sum() - matrix.trace()) / (matrix.numel() - len(matrix))).item()


def select(page: Page, name: str, value: int) -> None:
    page.select_option(f"#choose-{name}", str(value))


def pinned(page: Page) -> list[str]:
    return page.locator("#head-links [aria-pressed='true']").all_inner_texts()


# The file


def test_weights_are_quantised_within_the_stated_error() -> None:
    report = large_report(layers=1, heads=2, tokens=20)
    data = json.loads(re.search(r'id="report">(.*?)</script>', write_page(report), re.DOTALL)[1])
    for text, shown in zip(report.inputs, data["inputs"], strict=True):
        weights = text.attention[0].weights.flatten()
        level = torch.tensor(list(base64.b64decode(shown["attention"][0]["weights"])))
        error = ((level / 254) ** 2 - weights).abs()
        assert (error <= weights.sqrt() / 254 + 4e-6).all() and error.max() > 0


def test_extreme_weights_have_their_levels() -> None:
    report = unknown_report()
    report.inputs[0].attention[0].weights[:] = torch.tensor([[0.0, 1.0, math.nan], [1e-6, 1.0005, -1e-4], [0.25] * 3])
    data = json.loads(re.search(r'id="report">(.*?)</script>', write_page(report), re.DOTALL)[1])
    levels = list(base64.b64decode(data["inputs"][0]["attention"][0]["weights"]))
    assert levels == [0, 254, 255, 0, 254, 0, 127, 127, 127] * 2


def test_numbers_keep_four_digits_and_what_is_none_is_null() -> None:
    report = unknown_report()
    report.inputs[0].attention[0].entropy[:] = torch.tensor([0.123456, math.inf])
    data = json.loads(re.search(r'id="report">(.*?)</script>', write_page(report), re.DOTALL)[1])
    (attention,) = data["inputs"][0]["attention"]
    assert attention["entropy"] == [0.1235, None] and attention["random_effective_rank"] is None
    assert data["layers"][0]["output_share"] is None


def test_the_file_is_ascii_and_allows_only_what_stands_in_it() -> None:
    html = write_page(sentence_report(layers=1, heads=2))
    assert html.isascii() and html.startswith("<!doctype html>")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)[1].split("; ")
    assert policy[0] == "default-src 'none'"
    assert {rule.split()[0] for rule in policy[1:]} == {
        "script-src",
        "style-src",
        "img-src",
        "base-uri",
        "form-action",
    }
    assert "unsafe" not in " ".join(policy) and "*" not in " ".join(policy)
    assert not re.search(r"<[^>]+\s(on\w+|style|src)\s*=", html)
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html


def test_scripts_touch_no_markup() -> None:
    for file in FOLDER.glob("*.js"):
        script = file.read_text(encoding="ascii")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", script), (
            file
        )
        assert "</script" not in script and "<!--" not in script, file


def replaced(report: Report, **changes: Any) -> Report:
    """The report with other values in its first layer (or `heads`, `name`) and its first attention."""
    layer_names = {field.name for field in dataclasses.fields(report.layers[0])}
    of_layer = {name: value for name, value in changes.items() if name in layer_names}
    of_attention = {name: value for name, value in changes.items() if name not in layer_names}
    first = report.inputs[0]
    attention = [dataclasses.replace(first.attention[0], **of_attention), *first.attention[1:]]
    return dataclasses.replace(
        report,
        layers=[dataclasses.replace(report.layers[0], **of_layer), *report.layers[1:]],
        inputs=[dataclasses.replace(first, attention=attention), *report.inputs[1:]],
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights": torch.rand(2, 16, 15)}, "expected weights of layer in input 0 of shape (2, 16, 16)"),
        ({"weights": torch.full((2, 16, 16), 1.5)}, "expected weights of layer in input 0 from 0 to 1, got 1.5"),
        ({"weights": torch.full((2, 16, 16), -0.5)}, "expected weights of layer in input 0 from 0 to 1, got -0.5"),
        ({"weights": torch.full((2, 16, 16), math.inf)}, "expected weights of layer in input 0 from 0 to 1, got inf"),
        ({"keys": 1}, "expected keys of layer in input 0 to be the index of a sequence with tokens, got 1"),
        ({"queries": -1}, "expected queries of layer in input 0 to be the index of a sequence with tokens, got -1"),
        ({"order": [0, 0]}, "expected order of layer in input 0 to name 2 heads once, got [0, 0]"),
        ({"similarity": torch.rand(2)}, "expected similarity of layer in input 0 of shape (2, 2), got (2,)"),
        ({"importance": torch.rand(3)}, "expected importance of layer in input 0 of shape (2,), got (3,)"),
        ({"shares": {"next": torch.rand(1)}}, "expected shares['next'] of layer in input 0 of shape (2,), got (1,)"),
        ({"output_share": torch.rand(1)}, "expected output_share of layer of shape (2,), got (1,)"),
        ({"subspace_overlap": torch.rand(2, 3)}, "expected subspace_overlap of layer of shape (2, 2), got (2, 3)"),
        (
            {"random_relative_entropy": torch.rand(1)},
            "expected random_relative_entropy of layer in input 0 of shape (2,), got (1,)",
        ),
        (
            {"random_similarity": torch.rand(2, 1)},
            "expected random_similarity of layer in input 0 of shape (2, 2), got (2, 1)",
        ),
        ({"heads": 0}, "expected a head or more in layer, got 0"),
    ],
)
def test_what_does_not_belong_together_is_refused(changes: dict[str, Any], message: str) -> None:
    report = replaced(sentence_report(layers=1, heads=2), name="layer")
    with pytest.raises(ValueError, match=re.escape(f"write_page: {message}")):
        write_page(replaced(report, **changes))


def test_no_layers_no_inputs_and_missing_layers_are_refused() -> None:
    report = sentence_report(layers=2, heads=2)
    for wrong in (dataclasses.replace(report, layers=[]), dataclasses.replace(report, inputs=[])):
        with pytest.raises(ValueError, match="write_page: expected layers and inputs, got"):
            write_page(wrong)
    with pytest.raises(ValueError, match="write_page: expected the attention of 1 layers in input 0, got 2"):
        write_page(dataclasses.replace(report, layers=report.layers[:1]))


@pytest.mark.skipif(not (FOLDER.parents[2] / "setup.py").is_file(), reason="needs the source tree")
def test_an_installed_package_has_the_page(installed: Path) -> None:
    program = "from mha_ext.heads.page import FOLDER; print(*sorted(f.name for f in FOLDER.iterdir() if f.is_file()))"
    found = run(installed, "-c", program, cwd=installed.parent).split()
    assert found == sorted(file.name for file in FOLDER.iterdir() if file.is_file())


# What is shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_top_and_grid_say_what_the_report_says(show: Show, scheme: str) -> None:
    report = sentence_report()
    page = show(report, color_scheme=scheme)
    assert page.title() == "The heads of sample-encoder" and text_of(page, "#model") == "sample-encoder"
    assert text_of(page, "#size") == "4 layers, 32 heads, 2 inputs"
    assert text_of(page, "#text") == SENTENCE and page.locator("#note").is_hidden()
    assert page.locator("#notes li").all_inner_texts() == report.notes
    for layer, attention in enumerate(report.inputs[0].attention):
        for head in range(8):
            cell = page.locator(f"[data-layer='{layer}'][data-head='{head}']")
            numbers = cell.locator(".metric .number").all_inner_texts()
            expected = [
                attention.importance[head].item(),
                attention.relative_entropy[head].item(),
                report.layers[layer].output_share[head].item(),
                attention.distance[head].item(),
            ]
            assert all(same_number(n, x) for n, x in zip(numbers, expected, strict=True)), (numbers, expected)
            label = cell.get_attribute("aria-label")
            assert label.startswith(f"Layer {layer}, head {head}: importance ")
            said = re.findall(r"(?:importance|entropy|share|distance) ([^,]+)", label)
            assert all(same_number(n, x) for n, x in zip(said, expected, strict=True)), (label, expected)
        assert_shows(page, f"[data-layer='{layer}'][data-head='3'] canvas", "#grid-legend", attention.weights[3].sqrt())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_scales_go_one_way(show: Show, scheme: str) -> None:
    page = show(sentence_report(layers=1, heads=2), color_scheme=scheme)

    def lightness(selector: str) -> Tensor:
        red, green, blue = pixels(page, f"{selector} canvas")[0, :, :3].double().unbind(-1)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    way = -1 if scheme == "light" else 1  # more is darker on white, lighter on black
    for selector in ("#grid-legend", "#similarity-legend"):
        steps = way * lightness(selector).diff()
        assert (steps >= -0.5).all() and steps.sum() > 150, selector
    page.click("#compare-a button")
    steps = way * lightness("#compare-maps .card:nth-child(3) .legend").diff()
    assert (steps[:127] <= 0.5).all() and (steps[127:] >= -0.5).all()
    assert steps[:127].sum() < -50 and steps[127:].sum() > 50
    ends = pixels(page, "#compare-maps .card:nth-child(3) .legend canvas")[0, [0, -1], :3]
    assert ends[0, 0] > ends[0, 2] and ends[1, 2] > ends[1, 0]  # orange to blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_one_head_large(show: Show, scheme: str) -> None:
    report = sentence_report()
    attention = report.inputs[0].attention[1]
    page = show(report, color_scheme=scheme)
    page.click("[data-layer='1'][data-head='6']")
    assert text_of(page, "#head-title") == "Layer 1, head 6"
    assert text_of(page, "#head-name") == "encoder.layer.1.attention.self"
    assert page.evaluate("document.activeElement.id") == "head-title"
    assert_shows(page, "#head-map canvas", "#head-legend", attention.weights[6].sqrt())
    facts = dict(zip(*(page.locator(f"#head-facts {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    others = [other for other in range(8) if other != 6]
    for name, expected in {
        "importance": attention.importance[6],
        "relative entropy": attention.relative_entropy[6],
        "W_o share": report.layers[1].output_share[6],
        "distance": attention.distance[6],
        "entropy, nats": attention.entropy[6],
        "on previous token": attention.shares["previous"][6],
        "on itself": attention.shares["self"][6],
        "on next token": attention.shares["next"][6],
        "on first token": attention.shares["first"][6],
        "CKA with others": attention.similarity[6, others].mean(),
    }.items():
        assert same_number(facts.pop(name), expected.item()), name
    assert not facts
    for side in ("rows", "columns"):
        assert page.locator(f"#head-map .heat-{side} bdi").all_inner_texts() == TOKENS


def test_the_page_opens_with_the_head_that_knows_the_example(show: Show) -> None:
    page = show(sentence_report())
    assert text_of(page, "#head-title") == "Layer 0, head 3"  # made to look from it at animal


# Pointing, clicking, keys


def line_weights(page: Page, rows: int) -> Tensor:
    """(rows,) Opacity at the right end of the lines, 0 to 1."""
    image = pixels(page, "#head-links .lines-one")
    assert image.size(0) % rows == 0
    middle = image.size(0) // rows // 2
    return image[middle :: image.size(0) // rows, -2, 3] / 255


def test_hovering_a_token_shows_its_lines_and_where_all_heads_look(show: Show) -> None:
    report = sentence_report()
    weights = report.inputs[0].attention[0].weights
    page = show(report, viewport=TALL)
    select(page, "head", 0)
    page.locator(".tokens.query button").nth(IT).hover()
    assert page.locator(".lines-one").is_visible() and page.locator(".lines-all").is_hidden()
    assert (line_weights(page, 16) - weights[0, IT]).abs().max() < 0.012
    assert text_of(page, "#strip-about") == ("What it looks at, in each head of layer 0, with the strongest named.")
    assert_shows(page, "#head-strip canvas", "#head-legend", weights[:, IT].sqrt())
    strongest = page.locator("#head-strip .strongest").all_inner_texts()
    for head in range(8):
        token, weight = strongest[head].split()
        best = int(weights[head, IT].argmax())
        assert token == TOKENS[best] and abs(float(weight) - weights[head, IT, best]) < 0.01
    weight = re.match("it \N{RIGHTWARDS ARROW} because ([0-9.]+), ", text_of(page, "#head-map .readout"))[1]
    assert abs(float(weight) - weights[0, IT, BECAUSE]) < 0.01
    page.mouse.move(0, 0)
    assert page.locator(".lines-one").is_hidden() and page.locator(".lines-all").is_visible()
    assert text_of(page, "#strip-about").startswith("The mean over all tokens")
    kept = (weights.sqrt() * 254).round().div(254).square()
    assert_shows(page, "#head-strip canvas", "#head-legend", kept.mean(1).sqrt())


def test_hovering_a_key_shows_who_looks_at_it(show: Show) -> None:
    report = sentence_report()
    weights = report.inputs[0].attention[0].weights
    page = show(report, viewport=TALL)
    page.locator(".tokens.key button").nth(ANIMAL).hover()
    assert text_of(page, "#strip-about").startswith("Who looks at animal, in each head of layer 0")
    assert_shows(page, "#head-strip canvas", "#head-legend", weights[:, :, ANIMAL].sqrt())
    assert page.locator("#head-strip .strongest").nth(3).inner_text().split()[0] == "it"


def test_a_click_pins_a_token_and_escape_lets_it_go(show: Show) -> None:
    page = show(sentence_report())
    tokens = page.locator(".tokens.query button")
    tokens.nth(IT).click()
    tokens.nth(ANIMAL).hover()
    assert pinned(page) == ["it"] and text_of(page, "#strip-about").startswith("What it looks at")
    tokens.nth(ANIMAL).click()
    assert pinned(page) == ["animal"] and text_of(page, "#strip-about").startswith("What animal looks at")
    page.keyboard.press("Escape")
    assert pinned(page) == [] and text_of(page, "#strip-about").startswith("The mean")
    tokens.nth(IT).click()
    tokens.nth(IT).click()
    assert pinned(page) == []


def test_a_cell_of_the_map_is_read_and_pins_its_row(show: Show) -> None:
    report = sentence_report()
    weight = report.inputs[0].attention[0].weights[3, IT, ANIMAL]
    page = show(report, viewport=TALL)
    canvas = page.locator("#head-map canvas")
    box = canvas.bounding_box()
    at = {"x": box["width"] * (ANIMAL + 0.5) / 16, "y": box["height"] * (IT + 0.5) / 16}
    canvas.hover(position=at)
    assert text_of(page, "#head-map .readout").split() == ["it", "\N{RIGHTWARDS ARROW}", "animal", f"{weight:.2f}"]
    assert page.locator("#head-map .marked").all_inner_texts() == ["animal", "it"]
    assert text_of(page, "#strip-about").startswith("What it looks at")
    canvas.click(position=at)
    assert pinned(page) == ["it"]


def test_the_strip_leads_to_another_head(show: Show) -> None:
    page = show(sentence_report())
    canvas = page.locator("#head-strip canvas")
    canvas.scroll_into_view_if_needed()
    canvas.click(position={"x": 5, "y": canvas.bounding_box()["height"] * 5.5 / 8})
    assert text_of(page, "#head-title") == "Layer 0, head 5"
    assert page.locator(".cell[aria-current]").get_attribute("aria-label").startswith("Layer 0, head 5")


def focused_cell(page: Page) -> tuple[int, int]:
    layer, head = page.evaluate("[document.activeElement.dataset.layer, document.activeElement.dataset.head]")
    return int(layer), int(head)


def test_the_grid_is_walked_with_arrow_keys(show: Show) -> None:
    page = show(sentence_report(layers=3, heads=4))
    start = page.locator(".cell[tabindex='0']")
    assert start.count() == 1 and start.get_attribute("aria-current") == "true"
    page.locator("[data-layer='0'][data-head='3']").click()
    page.focus("#grid-order")
    page.keyboard.press("Tab")  # the grid is one stop
    assert focused_cell(page) == (0, 3)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid" and page.evaluate("document.activeElement.matches(':focus-visible')")
    for key, place in [
        ("ArrowRight", (0, 3)),
        ("ArrowDown", (1, 3)),
        ("ArrowLeft", (1, 2)),
        ("Home", (1, 0)),
        ("ArrowLeft", (1, 0)),
        ("ArrowDown", (2, 0)),
        ("ArrowDown", (2, 0)),
        ("End", (2, 3)),
        ("ArrowUp", (1, 3)),
    ]:
        page.keyboard.press(key)
        assert focused_cell(page) == place, key
        assert page.locator(".cell[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    assert text_of(page, "#head-title") == "Layer 1, head 3"
    page.keyboard.press("Escape")
    assert focused_cell(page) == (1, 3)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    assert text_of(page, "#head-title") == "Layer 1, head 2"


def test_tokens_are_walked_with_arrow_keys(show: Show) -> None:
    page = show(sentence_report())
    page.locator(".tokens.query button").first.focus()
    for _ in range(IT):
        page.keyboard.press("ArrowDown")
    assert text_of(page, "#strip-about").startswith("What it looks at")
    page.keyboard.press("Enter")
    assert pinned(page) == ["it"]
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert text_of(page, "#strip-about").startswith("Who looks at because")
    assert page.locator("#head-links button[tabindex='0']").all_inner_texts() == ["because"]
    page.keyboard.press("Tab")
    assert text_of(page, "#strip-about").startswith("The mean")


def test_heat_maps_are_walked_with_arrow_keys(show: Show) -> None:
    report = sentence_report(layers=2, heads=4)
    similarity, order = report.inputs[0].attention[0].similarity, report.inputs[0].attention[0].order
    page = show(report)
    select(page, "layer", 0)
    page.locator("#similarity-map .heat-area").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    a, b = order[1], order[1]
    assert text_of(page, "#similarity-map .readout").startswith(f"head {a} and head {b}")
    page.keyboard.press("ArrowRight")
    b = order[2]
    expected = f"head {a} and head {b} {similarity[a, b]:.2f}"
    assert " ".join(text_of(page, "#similarity-map .readout").split()) == expected
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "compare-title"
    assert page.locator("#compare-maps h3").all_inner_texts()[:2] == [f"A: Layer 0, head {a}", f"B: Layer 0, head {b}"]


def test_keys_scroll_a_large_map_to_the_cursor(show: Show) -> None:
    page = show(large_report(layers=1, heads=1, tokens=128), reduced_motion="reduce")  # the cursor is where it will be
    area = page.locator("#head-map .heat-area")
    area.focus()
    for _ in range(100):
        page.keyboard.press("ArrowRight")
    band, box = page.locator("#head-map .band.column").bounding_box(), area.bounding_box()
    assert box["x"] < band["x"] and band["x"] + band["width"] <= box["x"] + box["width"] + 1


# The sections


def test_another_input(show: Show) -> None:
    report = sentence_report()
    page = show(report)
    select(page, "layer", 2)
    select(page, "head", 1)
    select(page, "input", 1)
    assert text_of(page, "#text") == OTHER and text_of(page, "#note") == "cut to 17 of 400 tokens"
    assert page.locator(".tokens.query button").all_inner_texts() == OTHER_TOKENS
    assert text_of(page, "#head-title") == "Layer 2, head 1"
    attention = report.inputs[1].attention[2]
    assert_shows(page, "#head-map canvas", "#head-legend", attention.weights[1].sqrt())
    cell = page.locator("[data-layer='2'][data-head='1'] .metric .number").all_inner_texts()
    assert same_number(cell[0], attention.importance[1].item())
    assert f"{attention.effective_rank:.2f} of 8" in text_of(page, "#similarity-facts")


def test_heads_are_ordered_by_a_metric(show: Show) -> None:
    report = sentence_report()
    page = show(report)

    def heads(layer: int) -> list[int]:
        row = page.locator("#grid-table .layer").nth(layer).locator(".cell")
        return [int(cell.get_attribute("data-head")) for cell in row.all()]

    assert heads(1) == list(range(8))
    for name, values in {
        "importance": [attention.importance for attention in report.inputs[0].attention],
        "entropy": [attention.relative_entropy for attention in report.inputs[0].attention],
        "distance": [attention.distance for attention in report.inputs[0].attention],
        "share": [layer.output_share for layer in report.layers],
    }.items():
        page.select_option("#grid-order", name)
        for layer in range(4):
            shown = values[layer][heads(layer)]
            assert (shown.diff() <= 1e-4).all() and sorted(heads(layer)) == list(range(8))
    page.select_option("#grid-order", "similar")
    assert heads(3) == report.inputs[0].attention[3].order


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_redundancy_matrices(show: Show, scheme: str) -> None:
    report = sentence_report()
    attention = report.inputs[0].attention[2]
    page = show(report, color_scheme=scheme)
    select(page, "layer", 2)
    order = attention.order
    assert page.locator("#similarity-map .heat-rows span").all_inner_texts() == [str(head) for head in order]
    assert_shows(page, "#similarity-map canvas", "#similarity-legend", attention.similarity[order][:, order])
    assert_shows(page, "#twin-map canvas", "#twin-legend", attention.random_similarity[order][:, order])
    for where, rank, matrix in [
        ("similarity", attention.effective_rank, attention.similarity),
        ("twin", attention.random_effective_rank, attention.random_similarity),
    ]:
        facts = page.locator(f"#{where}-facts dd").all_inner_texts()
        assert facts == [f"{rank:.2f} of 8", f"{mean_of_pairs(matrix):.2f}"]
    page.get_by_label("Jensen\N{EN DASH}Shannon").check()
    assert text_of(page, "#similarity-title") == "Layer 2: Jensen\N{EN DASH}Shannon"
    divergence = attention.divergence[order][:, order] / math.log(2)
    assert_shows(page, "#similarity-map canvas", "#similarity-legend", divergence)
    page.get_by_label("Cosine").check()
    assert_shows(page, "#similarity-map canvas", "#similarity-legend", (attention.cosine[order][:, order] + 1) / 2)
    canvas = page.locator("#similarity-map canvas")
    side = canvas.bounding_box()["width"]
    canvas.hover(position={"x": side * 4.5 / 8, "y": side * 1.5 / 8})
    expected = f"{attention.cosine[order[1], order[4]]:.2f}".replace("-", "\N{MINUS SIGN}")
    readout = text_of(page, "#similarity-map .readout").split()
    assert readout == ["head", str(order[1]), "and", "head", str(order[4]), expected]
    canvas.click(position={"x": side * 4.5 / 8, "y": side * 1.5 / 8})
    titles = page.locator("#compare-maps h3").all_inner_texts()
    assert titles == [f"A: Layer 2, head {order[1]}", f"B: Layer 2, head {order[4]}", "A minus B"]


def rows_of(page: Page, figure: str, title: str) -> list[list[str]]:
    """Label and numbers of each layer in a figure of dots."""
    table = page.locator(f"{figure} figure").filter(has_text=title).locator("tbody tr")
    return [[row.locator("th").inner_text(), row.locator(".number").inner_text()] for row in table.all()]


def test_the_mechanisms_show_this_model(show: Show) -> None:
    report = sentence_report()
    page = show(report)
    attention, layers = report.inputs[0].attention, report.layers

    def assert_rows(figure: str, title: str, values: list[tuple[float, float]]) -> None:
        for layer, ((name, numbers), expected) in enumerate(zip(rows_of(page, figure, title), values, strict=True)):
            assert name == f"Layer {layer}"
            assert all(same_number(n, x) for n, x in zip(numbers.split(" / "), expected, strict=True)), numbers

    cka = [(mean_of_pairs(a.similarity), mean_of_pairs(a.random_similarity)) for a in attention]
    assert_rows("#initialisation-figure", "Mean CKA", cka)
    ranks = [(a.effective_rank, a.random_effective_rank) for a in attention]
    assert_rows("#initialisation-figure", "Effective rank", ranks)
    overlaps = [(mean_of_pairs(layer.subspace_overlap), layer.expected_overlap) for layer in layers]
    assert_rows("#subspaces-figure", "Mean overlap", overlaps)
    importance = torch.stack([a.importance for a in attention])
    assert_shows(page, "#gradients-figure .heat canvas", "#gradients-figure .legend", importance / importance.max())
    assert "The loss here: masked words, mean over the tokens." in text_of(page, "#gradients-about")
    assert_shows(page, "#subspaces-figure .heat canvas", "#subspaces-figure .legend", layers[0].subspace_overlap)
    for layer, (_, loudest) in zip(layers, rows_of(page, "#shares-figure", "Share of each head"), strict=True):
        head, share = re.fullmatch(r"head (\d+): (.+)", loudest).groups()
        assert int(head) == int(layer.output_share.argmax())
        assert same_number(share, layer.output_share.max().item())
    dots = page.locator("#shares-figure tbody tr").first.locator(".dot.model")
    assert dots.count() == 8
    places = dots.evaluate_all("dots => dots.map((dot) => Number(dot.style.getPropertyValue('--at')))")
    share = layers[0].output_share
    ratio = torch.tensor(places) / share
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-2)


def test_each_input_is_beside_its_own_twin(show: Show) -> None:
    report = sentence_report(layers=2)
    inputs = [
        dataclasses.replace(text, attention=[dataclasses.replace(a, importance=None) for a in text.attention])
        for text in report.inputs
    ]
    page = show(dataclasses.replace(report, inputs=inputs))
    select(page, "layer", 1)
    seen = []
    for i, text in enumerate(inputs):
        select(page, "input", i)
        attention = text.attention[1]
        order = attention.order
        assert_shows(page, "#twin-map canvas", "#twin-legend", attention.random_similarity[order][:, order])
        alike = [mean_of_pairs(a.random_similarity) for a in text.attention]
        ranks = [a.random_effective_rank for a in text.attention]
        spread = [a.random_relative_entropy.mean().item() for a in text.attention]
        facts = page.locator("#twin-facts dd").all_inner_texts()
        assert facts == [f"{ranks[1]:.2f} of 8", f"{alike[1]:.2f}"]
        for figure, title, values in [
            ("#initialisation-figure", "Mean CKA", alike),
            ("#initialisation-figure", "Effective rank", ranks),
            ("#gradients-figure", "Relative entropy", spread),
        ]:
            twins = [numbers.split(" / ")[1] for _, numbers in rows_of(page, figure, title)]
            assert all(same_number(n, x) for n, x in zip(twins, values, strict=True)), (title, twins, values)
        summary = [fact.split("random twin ")[1] for fact in page.locator("#summary dd").all_inner_texts()]
        assert same_number(summary[0], sum(ranks) / 2 / 8) and same_number(summary[1], sum(alike) / 2)
        seen.append(facts)
    assert len(TOKENS) != len(OTHER_TOKENS) and seen[0] != seen[1]


def strongest(attention: Attention, head: int, allowed: list[int]) -> tuple[int, int]:
    weights = (attention.weights[head].sqrt() * 254).round()  # as they are kept: of equal ones, the first
    weights.fill_diagonal_(0)
    best = max(itertools.product(allowed, allowed), key=lambda place: weights[place])
    return best


def test_what_each_head_does(show: Show) -> None:
    report = sentence_report()
    attention = report.inputs[0].attention[0]
    page = show(report)
    for checked, allowed in ((True, list(range(1, 15))), (False, list(range(16)))):
        page.get_by_label("without [CLS], [SEP] and the like").set_checked(checked)
        expected: dict[tuple[int, int], list[int]] = {}
        for head in range(8):
            expected.setdefault(strongest(attention, head, allowed), []).append(head)
        shown = {}
        for row in page.locator("#strongest-links li").all():
            heads = re.findall(r"head (\d+)", row.locator(".chips").inner_text())
            shown[row.locator(".link").inner_text()] = [int(head) for head in heads]
        words = {f"{TOKENS[q]} \N{RIGHTWARDS ARROW} {TOKENS[k]}": heads for (q, k), heads in expected.items()}
        assert {text: sorted(heads) for text, heads in shown.items()} == words
        assert shown["it \N{RIGHTWARDS ARROW} animal"] == [3]
        assert f"8 heads, {len(words)} different strongest links" in text_of(page, "#strongest-about")
    page.locator("#strongest-links .chip").filter(has_text="head 5").click()
    assert text_of(page, "#head-title") == "Layer 0, head 5"


def test_heads_are_ranked_by_a_link_of_the_readers_choice(show: Show) -> None:
    report = sentence_report()
    weights = torch.stack([attention.weights for attention in report.inputs[0].attention])  # (layers, H, L, L)
    page = show(report)

    def assert_ranks(query: int, key: int) -> None:
        value, place = weights[:, :, query, key].flatten().sort(descending=True)
        rows = page.locator("#pair-ranking li").all()
        assert len(rows) == 12
        for i, row in enumerate(rows):
            layer, head = re.fullmatch(r"Layer (\d+), head (\d+)", row.locator("button").inner_text()).groups()
            shown = weights[int(layer), int(head), query, key].item()
            assert abs(shown - value[i].item()) < 0.003  # nearly equal ones may change places
            assert abs(float(row.locator(".number").inner_text()) - shown) < 0.01

    assert page.input_value("#pair-query") == str(IT) and page.input_value("#pair-key") == str(ANIMAL)
    assert_ranks(IT, ANIMAL)
    page.select_option("#pair-query", str(ANIMAL))
    page.select_option("#pair-key", "1")
    assert_ranks(ANIMAL, 1)
    page.locator("#pair-ranking button").first.click()
    layer, head = divmod(int(weights[:, :, ANIMAL, 1].flatten().argmax()), 8)
    assert text_of(page, "#head-title") == f"Layer {layer}, head {head}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_heads_are_compared(show: Show, scheme: str) -> None:
    report = sentence_report()
    page = show(report, color_scheme=scheme)
    for side, layer, head in (("a", 0, 0), ("b", 2, 5)):
        page.select_option(f"#compare-{side}-layer", str(layer))
        page.select_option(f"#compare-{side}-head", str(head))
    a, b = report.inputs[0].attention[0], report.inputs[0].attention[2]
    card = "#compare-maps .card:nth-child({})"
    assert_shows(page, f"{card.format(1)} .heat canvas", f"{card.format(1)} .legend", a.weights[0].sqrt())
    assert_shows(page, f"{card.format(2)} .heat canvas", f"{card.format(2)} .legend", b.weights[5].sqrt())
    difference = a.weights[0] - b.weights[5]
    least, most = levels_shown(page, f"{card.format(3)} .heat canvas", f"{card.format(3)} .legend")
    for level, sign in ((least, -1), (most, 1)):  # each weight is off by half a level, and so is the difference
        root = 2 * level - 1 + sign / 254
        value = root.sign() * root.square()
        assert (sign * (value - difference) > -1.1 * (a.weights[0].sqrt() + b.weights[5].sqrt()) / 254).all()
    elsewhere = difference.abs().sum(-1).mean() / 2
    assert abs(number_in(re.search(r"average (.+%)", text_of(page, "#compare-about"))[1]) - elsewhere) < 0.006
    canvas = page.locator(f"{card.format(1)} .heat canvas")
    side = canvas.bounding_box()["width"]
    canvas.hover(position={"x": side * 9.5 / 16, "y": side * 10.5 / 16})
    shown = [text.split()[-1] for text in page.locator("#compare-maps .readout").all_inner_texts()]
    expected = [a.weights[0, 10, 9], b.weights[5, 10, 9], difference[10, 9]]
    assert all(abs(number_in(x) - y) < 0.012 for x, y in zip(shown, expected, strict=True))
    assert page.locator("#compare-maps .band.row.shown").count() == 3
    rows = page.locator("#compare-numbers tbody tr").all_inner_texts()
    assert not any("Linear CKA" in row for row in rows)  # these are of different layers
    page.select_option("#compare-b-layer", "0")
    cells = page.locator("#compare-numbers tr").filter(has_text="Linear CKA").inner_text().split("\t")
    assert cells[-1] == f"{a.similarity[0, 5]:.2f}"


def test_one_head_on_two_inputs(show: Show) -> None:
    report = sentence_report()
    page = show(report)
    page.locator("#compare-a button").click()
    page.locator("#compare-b button").click()
    assert page.locator("#compare-maps h3").all_inner_texts()[:2] == ["A: Layer 0, head 3", "B: Layer 0, head 3"]
    assert "0.0" in text_of(page, "#compare-about")
    page.select_option("#compare-b-input", "1")
    assert page.locator("#compare-maps .card").count() == 2
    assert "different numbers of tokens" in text_of(page, "#compare-about")
    card = "#compare-maps .card:nth-child(2)"
    assert_shows(page, f"{card} .heat canvas", f"{card} .legend", report.inputs[1].attention[0].weights[3].sqrt())
    same = dataclasses.replace(report.inputs[0], sequences=[[token.upper() for token in TOKENS]])
    page = show(dataclasses.replace(report, inputs=[report.inputs[0], same]))
    page.select_option("#compare-b-input", "1")
    assert "position by position" in text_of(page, "#compare-about")


# Other reports


def test_cross_attention_has_other_tokens_on_each_side(show: Show) -> None:
    report = translation_report()
    source, target = report.inputs[0].sequences
    weights = report.inputs[0].attention[1].weights
    page = show(report, viewport=TALL)
    page.click("[data-layer='1'][data-head='1']")
    assert text_of(page, "#head-name") == "decoder.layers.0.cross_attn, cross-attention"
    assert page.locator("#head-map .heat-rows bdi").all_inner_texts() == target
    assert page.locator("#head-map .heat-columns bdi").all_inner_texts() == source
    assert_shows(page, "#head-map canvas", "#head-legend", weights[1].sqrt())
    page.locator(".tokens.query button").nth(2).hover()
    assert page.locator("#head-strip .strongest").nth(1).inner_text().split()[0] == "Hund"
    assert_shows(page, "#head-strip canvas", "#head-legend", weights[:, 2].sqrt())
    page.locator(".tokens.key button").nth(1).hover()
    assert page.locator("#head-strip .heat-columns bdi").all_inner_texts() == target
    assert_shows(page, "#head-strip canvas", "#head-legend", weights[:, :, 1].sqrt())
    assert (
        dict(zip(*(page.locator(f"#head-facts {t}").all_inner_texts() for t in ("dt", "dd")), strict=True))["distance"]
        == DASH
    )
    assert page.locator("#pair-query option").count() == 3 and page.locator("#pair-key option").count() == 5
    assert page.locator("#pair-ranking li").count() == 2  # the other layer has no such pairs
    page.select_option("#compare-b-layer", "1")
    assert page.locator("#compare-maps .card").count() == 2


def test_without_a_loss_the_entropy_tells_what_training_did(show: Show) -> None:
    report = translation_report()
    page = show(report)
    assert "no loss" in text_of(page, "#gradients-about")
    expected = [
        f"{a.relative_entropy.mean():.2f} / {a.random_relative_entropy.mean():.2f}" for a in report.inputs[0].attention
    ]
    assert [row[1] for row in rows_of(page, "#gradients-figure", "Relative entropy")] == expected


def test_what_is_not_known_is_a_dash(show: Show) -> None:
    page = show(unknown_report(), viewport=TALL)
    cell = page.locator("[data-layer='0'][data-head='1'] .metric .number")
    assert cell.all_inner_texts() == [DASH] * 4
    assert set(page.locator("#head-facts dd").all_inner_texts()) == {DASH}
    assert page.locator("#similarity-facts dd, #twin-facts dd").all_inner_texts() == [DASH] * 4
    expected = torch.tensor([[0.5, 0.25, 0.25], [math.nan] * 3, [0, 0, 1]]).sqrt()
    assert_shows(page, "#head-map canvas", "#head-legend", expected)
    assert_shows(page, "#similarity-map canvas", "#similarity-legend", torch.full((2, 2), math.nan))
    page.locator(".tokens.query button").nth(1).hover()
    assert page.locator("#head-strip .strongest").all_inner_texts() == [DASH] * 2
    assert text_of(page, "#head-map .readout") == f"b \N{RIGHTWARDS ARROW} {DASH}"
    page.locator("#head-map canvas").hover(position={"x": 5, "y": 50})
    assert text_of(page, "#head-map .readout").split()[-1] == DASH
    assert rows_of(page, "#initialisation-figure", "Mean CKA") == [["Layer 0", DASH]]
    assert "could not be read" in text_of(page, "#subspaces-figure")
    assert "could not be read" in text_of(page, "#shares-figure")
    assert "NaN" not in page.locator("body").inner_text() and "undefined" not in page.locator("body").inner_text()


def test_the_smallest_report(show: Show) -> None:
    page = show(smallest_report())
    assert text_of(page, "#size") == "1 layer, 1 head, 1 input"
    page.locator(".tokens.query button").hover()
    assert page.locator("#head-strip .strongest").inner_text().split() == ["yes", "1.00"]
    assert_shows(page, "#head-map canvas", "#head-legend", torch.ones(1, 1))
    assert "1 head, 0 different strongest links" in text_of(page, "#strongest-about")
    assert page.locator("#pair-ranking li").count() == 1
    page.focus(".cell")
    for key in ("ArrowDown", "ArrowRight", "End", "Enter"):
        page.keyboard.press(key)
    assert "NaN" not in page.locator("body").inner_text() and "undefined" not in page.locator("body").inner_text()


def test_layers_may_have_different_numbers_of_heads(show: Show) -> None:
    wide, narrow = sentence_report(layers=1, heads=6), sentence_report(layers=1, heads=2)
    both = [*wide.inputs[0].attention, *narrow.inputs[0].attention]
    report = dataclasses.replace(
        wide, layers=[*wide.layers, *narrow.layers], inputs=[dataclasses.replace(wide.inputs[0], attention=both)]
    )
    page = show(report)
    page.focus("[data-layer='0'][data-head='5']")
    page.keyboard.press("ArrowDown")
    assert focused_cell(page) == (1, 1)
    select(page, "head", 5)
    select(page, "layer", 1)
    assert text_of(page, "#head-title") == "Layer 1, head 1"
    assert page.locator("#choose-head option").count() == 2
    importance = torch.full((2, 6), math.nan)
    for layer, attention in enumerate(both):
        importance[layer, : len(attention.importance)] = attention.importance
    largest = importance.nan_to_num(0).max()
    assert_shows(page, "#gradients-figure .heat canvas", "#gradients-figure .legend", importance / largest)


def test_many_heads_and_long_inputs(show: Show) -> None:
    report = large_report()
    html = write_page(report)
    assert len(html) < 8e6
    page = show(report, viewport=TALL)
    assert text_of(page, "#size") == "12 layers, 144 heads, 2 inputs"
    assert page.locator(".cell").count() == 144
    weights = report.inputs[0].attention[0].weights
    page.locator(".tokens.query button").nth(10).hover()
    assert text_of(page, "#strip-about").startswith("What word10 looks at")
    assert_shows(page, "#head-strip canvas", "#head-legend", weights[:, 10].sqrt())
    pooled = torch.nn.functional.max_pool2d(weights, 2)  # of 128 x 128 weights, the small map has 64 x 64 pixels
    assert_shows(page, "[data-layer='0'][data-head='3'] canvas", "#grid-legend", pooled[3].sqrt())
    select(page, "layer", 11)
    select(page, "input", 1)
    assert_shows(page, "#head-map canvas", "#head-legend", report.inputs[1].attention[11].weights[0].sqrt())


HOSTILE = [
    '</script><img src=x onerror="window.hacked=1">',
    "<!--<script>window.hacked=2</script>",
    "<b>bold</b>",
    '"><svg onload=alert(1)>',
    "' onmouseover='window.hacked=3",
    "javascript:alert(2)",
    "${window.hacked=4}",
    "$data $$ \\u003c \\",
    "&lt;i&gt;&amp;",
    "]]>",
    "\u2028\u2029",
    "\u202egnirts",
    "\x00\x07",
    "\ud800",
    "\N{PILE OF POO}\u0301",
    "",
    " ",
    "\n",
    "x" * 300,
    "__proto__",
    "[CLS]",
]


def hostile_report() -> Report:
    count = len(HOSTILE)
    own = sentence_report(layers=1, heads=2)
    attention = dataclasses.replace(
        own.inputs[0].attention[0], weights=torch.full((2, count, count), 1 / count), shares={}
    )
    page = Input(text=" ".join(HOSTILE), sequences=[HOSTILE], attention=[attention], note=HOSTILE[0])
    layer = dataclasses.replace(own.layers[0], name=HOSTILE[0])
    return Report(HOSTILE[0], [layer], [page, page], loss=HOSTILE[3], notes=HOSTILE)


def test_hostile_text_is_shown_and_does_not_run(show: Show) -> None:
    page = show(hostile_report())
    plain = show(unknown_report())
    tags = "[...new Set([...document.querySelectorAll('*')].map((e) => e.localName))].sort()"
    assert set(page.evaluate(tags)) <= {*plain.evaluate(tags), "ul", "li", "ol"}
    names = "[...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())"
    assert not [name for name in page.evaluate(names) if name.startswith(("on", "src"))]
    assert page.evaluate("document.scripts.length") == 2
    first = HOSTILE[0]
    for selector in ("#model", "#note", "#head-name"):
        assert text_of(page, selector) == first
    assert page.title() == f"The heads of {first}"
    assert HOSTILE[3] in text_of(page, "#gradients-about")
    options = page.locator("#pair-query option").all_text_contents()
    for i, token in enumerate(HOSTILE):
        if token.strip() and token.isprintable():
            assert options[i] == f"{i}  {token}"
    page.locator(".tokens.query button").nth(0).hover()
    assert page.locator("#strip-about bdi").text_content() == first
    assert text_of(page, "#head-map .readout").startswith(first)
    for i in range(len(HOSTILE)):
        page.locator(".tokens.key button").nth(i).click()
        assert page.locator("#head-links [aria-pressed='true']").get_attribute("data-index") == str(i)
    for name, value in (("#choose-input", "1"), ("#grid-order", "importance"), ("#compare-b-input", "1")):
        page.select_option(name, value)
    assert page.evaluate("window.hacked") is None


def test_the_policy_stops_what_is_put_in_later(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "heads.html"
    file.write_text(write_page(smallest_report()))
    page = browser.new_page()
    page.goto(file.as_uri())
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s);"
        " const b = document.createElement('button'); b.setAttribute('onclick', 'window.hacked = 2');"
        " document.body.append(b); b.click() }"
    )
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("fetch('data:,x').then(() => 'fetched', () => 'refused')") == "refused"
    page.close()


# Screens


def test_the_most_alike_pair_of_each_layer(show: Show) -> None:
    report = sentence_report()
    page = show(report)
    rows = page.locator("#alike-pairs tr")
    assert rows.count() == len(report.layers)
    for layer, attention in enumerate(report.inputs[0].attention):
        cells = rows.nth(layer).locator("td")
        matrix = attention.similarity.clone().fill_diagonal_(-1)
        pair = sorted(divmod(int(matrix.argmax()), len(matrix)))
        twin = attention.random_similarity.clone().fill_diagonal_(-1).max()
        texts = [f"heads {pair[0]} and {pair[1]}", f"{matrix.max():.2f}", f"{twin:.2f}"]
        assert cells.all_inner_texts() == texts
    last = len(report.layers) - 1
    rows.nth(last).locator("button").click()
    matrix = report.inputs[0].attention[last].similarity.clone().fill_diagonal_(-1)
    a, b = sorted(divmod(int(matrix.argmax()), len(matrix)))
    for side, head in (("A", a), ("B", b)):
        assert f"{side}: Layer {last}, head {head}" in page.inner_text("#compare")


def test_the_theme_follows_the_system_and_the_button(show: Show) -> None:
    report = sentence_report(layers=1, heads=2)
    weights = report.inputs[0].attention[0].weights
    page = show(report)
    ground = "getComputedStyle(document.body).backgroundColor"
    light, light_map = page.evaluate(ground), pixels(page, "#head-map canvas")
    assert page.get_attribute("#theme", "aria-pressed") == "false"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    page.click("#theme")
    assert page.evaluate(ground) == light != dark
    page.click("#theme")
    assert page.evaluate(ground) == dark and page.get_attribute("#theme", "aria-pressed") == "true"
    assert_shows(page, "#head-map canvas", "#head-legend", weights[int(page.input_value("#choose-head"))].sqrt())
    assert not torch.equal(pixels(page, "#head-map canvas"), light_map)
    assert page.evaluate("document.cookie") == ""
    page.emulate_media(color_scheme="light")
    page.reload()
    assert page.evaluate(ground) == light  # nothing is stored


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1) }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
    const x = c[i] / 255;
    return sum + share * (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  }, 0);
  const grounds = (e) => (e ? [...grounds(e.parentElement), getComputedStyle(e).backgroundColor] : []);
  const found = [];
  for (const e of document.body.querySelectorAll('*')) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!text || !e.checkVisibility() || e.matches('script, option, .skip, noscript *')) continue;
    const ground = grounds(e);
    const [a, b] = [light(rgb([...ground, getComputedStyle(e).color])), light(rgb(ground))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    found.push([contrast, e.className + ' ' + e.textContent.slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(show: Show, scheme: str) -> None:
    page = show(sentence_report(), color_scheme=scheme)
    page.select_option("#grid-order", "importance")
    page.locator(".tokens.query button").nth(IT).click()
    found = page.evaluate(CONTRAST)
    assert len(found) > 500
    assert min(found)[0] >= 4.5, min(found)


OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter((e) => {
  if (e.parentElement.closest('.scroll') || e.closest('.skip, option') || !e.checkVisibility()) return false;
  const { left, right, width } = e.getBoundingClientRect();
  return width > 0 && (right > innerWidth + 0.5 || left < -0.5);
}).map((e) => `${e.localName}.${e.className} ${e.textContent.slice(0, 20)}`)"""


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_overflows_the_screen(show: Show, width: int) -> None:
    long = dataclasses.replace(sentence_report(layers=1, heads=16), model="organisation/" + "a-very-long-name-" * 8)
    for report in (sentence_report(), long, translation_report(), unknown_report(), hostile_report()):
        page = show(report, viewport={"width": width, "height": 640}, device_scale_factor=2, is_mobile=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, report.model
        assert page.evaluate("innerWidth") == width
        assert page.evaluate(OVERFLOWING) == [], report.model


def test_touching_a_token_pins_it(show: Show) -> None:
    page = show(sentence_report(), viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    token = page.locator(".tokens.query button").nth(IT)
    token.tap()
    assert pinned(page) == ["it"] and text_of(page, "#strip-about").startswith("What it looks at")
    token.tap()
    assert pinned(page) == []
    page.locator("#similarity-map canvas").tap()
    assert page.evaluate("document.activeElement.id") == "compare-title"
    page.locator("[data-layer='0'][data-head='1']").tap()
    assert text_of(page, "#head-title") == "Layer 0, head 1"


def test_motion_is_reduced_where_it_is_asked_for(show: Show) -> None:
    behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
    moving = "getComputedStyle(document.querySelector('#head-map .band')).transitionDuration"
    page = show(sentence_report(layers=1, heads=2), reduced_motion="reduce")
    assert page.evaluate(behaviour) == "auto" and page.evaluate(moving) == "0s"
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(behaviour) == "smooth" and page.evaluate(moving) != "0s"


def test_every_control_has_a_name(show: Show) -> None:
    page = show(sentence_report())
    nameless = (
        "[...document.querySelectorAll('button, select, input, [tabindex=\"0\"]')]"
        ".filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert page.evaluate(nameless) == []
    twice = (
        "() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);"
        " return ids.filter((id, i) => ids.indexOf(id) !== i) }"
    )
    assert page.evaluate(twice) == []
