"""A whole comparison of tiny models, from text to the page in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mesanet.compare import compare
from mesanet.compare.corpus import describe_corpus, entropy
from mesanet.compare.presets import DEMO_MIXERS, compare_preset
from mesanet.config.compare import CompareConfig
from mesanet.config.data import PrepareConfig
from mesanet.data.dataset import open_dataset
from mesanet.data.preparation import prepare
from mesanet.errors import UserError
from mesanet.report.page import build_report
from mesanet.training.presets import mixer_patterns

# The first test to need them trains the models, which takes a while on a busy machine.
pytestmark = pytest.mark.timeout(1200)
FIGURES = ("training", "by_position", "extrapolation", "solver", "speed")


def test_entropy() -> None:
    assert entropy(np.array([1, 1, 0, 2])) == pytest.approx(1.5 * np.log(2))


def test_the_corpus_is_counted_shard_by_shard(config: CompareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesanet.compare.corpus.PART", 7)
    assert config.data is not None
    dataset = open_dataset(config.data)
    tokens = [int(t) for split in (dataset.train, dataset.validation) for n in range(len(split)) for t in split[n]]
    corpus = describe_corpus(dataset)
    assert corpus["tokens"] == len(tokens)
    shares = np.array(list(Counter(tokens).values())) / len(tokens)
    # Sums of at most 257 float64 terms below 1.
    assert corpus["unigram_entropy"] == pytest.approx(-sum(p * np.log(p) for p in shares), abs=1e-12)


def test_the_demo_compares_three() -> None:
    assert compare_preset("demo", Path("out")).mixers == DEMO_MIXERS
    everything = compare_preset("small-15b", Path("out")).mixers
    assert {"mesa", "attention", "hawk-mesa", "sliding_window"} <= set(everything)


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(ValueError, match="solver_tolerances"):
        CompareConfig(preset="demo", mixers=("mesa",), out=Path("out"), solver_tolerances=(0.0,))
    with pytest.raises(ValueError, match="accumulation"):
        CompareConfig(preset="demo", mixers=("mesa",), out=Path("out"), accumulation=0)
    with pytest.raises(ValueError, match="there is no mixer 'messa'"):
        compare(CompareConfig(preset="demo", mixers=("messa",), out=Path("out")))


@pytest.mark.parametrize(
    ("names", "models"),
    [
        (("mesa,attention",), ("mesa", "attention")),
        (("hawk-mesa", "hawk,mesa"), ("hawk-mesa", "hawk", "mesa")),
        (("mesa, gla", "mesa"), ("mesa", "gla")),
    ],
)
def test_commas_separate_models_and_dashes_the_layers_of_one(names: tuple[str, ...], models: tuple[str, ...]) -> None:
    assert mixer_patterns(names) == models
    with pytest.raises(UserError, match="expected at least one name"):
        mixer_patterns((",",))


def test_processes_that_were_not_told_to_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="there are 2 processes: let them share the work with --parallel ddp"):
        compare(CompareConfig(preset="demo", mixers=("mesa",), out=Path("out")))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CompareConfig:
    folder = tmp_path_factory.mktemp("compare")
    random = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(" ".join(random.choice(words, 500)))
    out = folder / "data"
    prepare(PrepareConfig(sources=(str(texts),), out=out, tokenizer="bytes", validation_fraction=0.5), quiet=True)
    return CompareConfig(
        preset="demo",
        mixers=("mesa", "attention"),
        out=folder / "out",
        data=out,
        steps=4,
        tokens=4096,
        longest=2,
        longest_tokens=4096,
        solver_steps=(0, 2),
        solver_tolerances=(0.5, 1e-2),
        solver_tokens=1024,
        sample_tokens=8,
    )


def test_data_without_held_out_text_are_refused_before_anything_is_written(
    config: CompareConfig, tmp_path: Path
) -> None:
    """And the same folder then takes the comparison on data that have some."""
    assert config.data is not None
    source = config.data.parent / "texts"
    empty = tmp_path / "empty"
    options = PrepareConfig(sources=(str(source),), out=empty, tokenizer="bytes", validation_fraction=0.0)
    prepare(options, quiet=True)
    with pytest.raises(UserError, match=r"no held-out text .* with a larger --validation-fraction"):
        compare(replace(config, data=empty, out=tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


def test_data_that_are_too_short_leave_the_folder_free(config: CompareConfig, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    short = PrepareConfig(sources=(str(tmp_path / "short.txt"),), out=tmp_path / "short", tokenizer="bytes")
    prepare(replace(short, validation_fraction=0.0), quiet=True)
    with pytest.raises(UserError, match="sequence_length"):
        compare(replace(config, data=tmp_path / "short", out=tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


def test_every_mixer_is_checked_before_the_first_is_trained(config: CompareConfig, tmp_path: Path) -> None:
    too_many = "-".join(["hawk", "mesa"] * 3)
    with pytest.raises(ValueError, match="layers"):
        compare(replace(config, mixers=("attention", too_many), out=tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def page(config: CompareConfig) -> Path:
    return compare(config, quiet=True)


def stamps(folder: Path) -> dict[str, int]:
    """When each record was written."""
    kept = [
        path for path in folder.glob("runs/**/*.json") if path.name != "run.json" and path.parent.parent.name == "runs"
    ]
    kept += folder.glob("runs/*/evaluations/*.json")
    kept = [path for path in kept if path.name != "config.json"]
    return {str(path): path.stat().st_mtime_ns for path in kept}


@pytest.mark.slow
def test_everything_is_recorded(page: Path, config: CompareConfig) -> None:
    for mixers in config.mixers:
        run = config.out / "runs" / mixers
        assert (run / "model" / "model.safetensors").is_file()
        sample = json.loads((run / "sample.json").read_text())
        assert sample["text"]
        # The tokens that came out, of which the first is read with the prompt.
        assert sample["tokens"] <= config.sample_tokens
        assert sample["tokens_per_second"] == pytest.approx((sample["tokens"] - 1) / sample["seconds"])
        evaluations = [json.loads(path.read_text()) for path in (run / "evaluations").glob("*.json")]
        assert len(evaluations) == (6 if mixers == "mesa" else 2)
        assert {record["settings"]["length"] for record in evaluations} == {512, 1024}
    for name in FIGURES:
        assert (page.parent / "figures" / f"{name}.svg").stat().st_size > 1000
        assert (page.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_page_needs_nothing_beside_it(page: Path) -> None:
    text = page.read_text()
    assert text.count("<svg") == len(FIGURES)
    assert "src=" not in text
    assert "<script" not in text
    assert "@import" not in text
    for expected in ("Mesa", "Attention", "NLL relative to attention", "unigram entropy"):
        assert expected in text


@pytest.mark.slow
def test_the_same_command_does_nothing_twice(page: Path, config: CompareConfig) -> None:
    before, text = stamps(config.out), page.read_text()
    assert len(before) >= 8 + 2
    compare(config, quiet=True)
    assert stamps(config.out) == before
    # What a kill between two stages leaves behind.
    missing = next((config.out / "runs" / "mesa" / "evaluations").glob("*tolerance0.5*"))
    missing.unlink()
    (config.out / "runs" / "attention" / "sample.json").unlink()
    compare(config, quiet=True)
    again = stamps(config.out)
    assert again.keys() == before.keys()
    assert {path for path in before if again[path] != before[path]} == {
        str(missing),
        str(config.out / "runs" / "attention" / "sample.json"),
    }
    assert [line for line in page.read_text().splitlines() if "NLL relative" in line] == [
        line for line in text.splitlines() if "NLL relative" in line
    ]


@pytest.mark.slow
def test_other_settings_are_refused(page: Path, config: CompareConfig) -> None:
    with pytest.raises(UserError, match="holds another comparison: steps is 4 there and 5 here"):
        compare(replace(config, steps=5), quiet=True)


@pytest.mark.slow
def test_the_report_alone_comes_from_the_records(page: Path, config: CompareConfig) -> None:
    before = page.read_text()
    shutil.rmtree(page.parent)
    assert build_report(config.out) == page
    assert page.read_text() == before
    with pytest.raises(UserError, match="holds no comparison"):
        build_report(config.out / "runs")


MEASURE = """
<pre id="boxes"></pre>
<script>
const found = {};
for (const figure of document.querySelectorAll("figure")) {
  const box = figure.querySelector("svg").getBoundingClientRect();
  const inside = [...figure.querySelectorAll("svg path, svg use")].filter((part) => {
    const own = part.getBoundingClientRect();
    return own.width + own.height > 0 && own.right <= box.right + 1 && own.left >= box.left - 1;
  });
  found[figure.id] = [box.width, box.height, inside.length];
}
document.getElementById("boxes").textContent = JSON.stringify(found);
</script>
"""


@pytest.mark.slow
def test_a_browser_shows_every_figure(page: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium here; Debian has it as the package chromium")
    measured = tmp_path / "measured.html"
    measured.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2000", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", measured.as_uri()]
    dom = subprocess.run([browser, *words], check=True, capture_output=True, text=True, timeout=200).stdout
    boxes = json.loads(dom.split('<pre id="boxes">')[1].split("</pre>")[0])
    assert list(boxes) == list(FIGURES)
    for name, (width, height, parts) in boxes.items():
        assert width > 500, name
        assert height > 100, name
        # Lines are paths, and letters and markers uses of them: axes alone have dozens.
        assert parts > 40, name
