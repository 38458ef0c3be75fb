"""The report from hand-made records: no model is needed."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesanet.errors import UserError
from mesanet.io import read_json, write_json_atomic, write_text_atomic
from mesanet.report.comparison import read_comparison
from mesanet.report.evaluations import counterpart, plain_table, positions_table
from mesanet.report.figures import solver_effort
from mesanet.report.page import build_report
from mesanet.report.style import mixer_colours
from mesanet.report.tables import extrapolation_table, perplexity_table, solver_table

pytest.importorskip("matplotlib")

LENGTH, LONGEST = 32, 128


def settings(length: int, max_tokens: int) -> dict[str, Any]:
    return {
        "length": length,
        "at_least": 0,
        "whole": False,
        "max_tokens": max_tokens,
        "seed": 0,
        "packed": False,
        "split": "validation",
        "precision": "float32",
        "piece": 2048,
        "data": "data",
    }


def evaluation(
    nll: float, length: int, max_tokens: int, steps: int | None = None, solver: dict[str, Any] | None = None
) -> dict[str, Any]:
    sums = (nll + 1 / np.arange(1, length + 1)) * 4
    return {
        "kind": "evaluation",
        "created": "2026-01-01",
        "data": {"name": "text", "fingerprint": "same/validation", "documents": 2},
        "model": {"parameters": 1000, "weights_sha256": "0"},
        "settings": settings(length, max_tokens),
        "override": {
            "max_steps": steps,
            "tolerance": None if steps is None else 0.0,
            "preconditioner": None if steps is None else "none",
        },
        "solver": solver,
        "steps": None if steps is None else {"mean": steps},
        "tokens_per_second": 100.0,
        "summary": {
            "nll": sums.sum() / 4 / length,
            "perplexity": float(np.exp(sums.sum() / 4 / length)),
            "tokens": 4 * length,
            "windows": 4,
        },
        "positions": {"sum": sums.tolist(), "count": [4] * length},
        "windows": {"tokens": [length] * 4, "nll": [sums.sum() / 4 + d for d in (-1, 0, 0, 1)]},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = {
        "preset": "demo",
        "mixers": ["mesa", "attention", "hawk"],
        "length": LENGTH,
        "history": [
            {
                "machine": "a machine, 1 threads",
                "command": ["mesanet", "compare", "<demo>"],
                "mesanet": "0",
                "torch": "0",
            }
        ],
        "settings": {},
        "created": "2026-01-01",
        "data": "same",
        "run": {
            "data": {"batch_size": 2, "sequence_length": LENGTH},
            "training": {"steps": 5, "tokens": None},
            "model": {"layers": 1, "width": 8, "heads": 1, "key_size": 8, "vocabulary": 16},
        },
        "evaluations": {
            "position": settings(LENGTH, 1000),
            "extrapolation": settings(LONGEST, 2000),
            "solver": settings(LENGTH, 500),
        },
    }
    write_json_atomic(tmp_path / "compare.json", plan)
    corpus = {"name": "text", "documents": 9, "tokens": 999, "unigram_entropy": 2.5, "fingerprint": "f" * 64}
    write_json_atomic(tmp_path / "corpus.json", corpus)
    for number, mixers in enumerate(("mesa", "attention")):
        run = tmp_path / "runs" / mixers
        write_json_atomic(run / "config.json", {"training": {"peak_learning_rate": 0.002}})
        lines = [
            f'{{"kind": "train", "step": {s}, "tokens": {64 * s}, "loss": {3 - s / 10}, "tokens_per_second": {50 + s}}}'
            for s in range(1, 6)
        ]
        lines += ['{"kind": "validation", "step": 5, "tokens": 320, "loss": 2.6}', '{"kind": "tr']
        write_text_atomic(run / "metrics.jsonl", "\n".join(lines))
        write_json_atomic(run / "evaluations" / "a.json", evaluation(2 + number / 10, LENGTH, 1000))
        write_json_atomic(run / "evaluations" / "b.json", evaluation(2 + number / 10, LONGEST, 2000))
        sample = {"prompt": "<b>", "text": "text & more", "tokens_per_second": 9.0, "model": {"weights_sha256": "0"}}
        write_json_atomic(run / "sample.json", sample)
    for steps in (0, 2, 4):
        solver = {"max_steps": steps, "tolerance": 0.0, "preconditioner": None}
        record = evaluation(2.5 - steps / 10, LENGTH, 500, steps, solver)
        write_json_atomic(tmp_path / "runs" / "mesa" / "evaluations" / f"steps{steps}.json", record)
    return tmp_path


def test_a_page_with_every_figure(folder: Path) -> None:
    page = build_report(folder)
    text = page.read_text()
    assert text.count("<svg") == 5
    assert "&lt;b&gt;</span>text &amp; more" in text
    assert "&lt;demo&gt;" in text
    for name in ("training", "by_position", "extrapolation", "solver", "speed"):
        ElementTree.parse(page.parent / "figures" / f"{name}.svg")
    # Every id stands once, and every reference has its target.
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids))
    targets = {part.split('"')[0] for part in text.split('href="#')[1:]} | {
        part.split(")")[0] for part in text.split("url(#")[1:]
    }
    assert targets <= set(ids)


def test_the_same_records_give_the_same_bytes(folder: Path) -> None:
    first = build_report(folder).read_bytes()
    assert build_report(folder).read_bytes() == first


def test_the_difference_to_attention_is_paired(folder: Path) -> None:
    table = perplexity_table(read_comparison(folder))
    assert table.head[-1] == "NLL relative to attention"
    # The windows of both models differ by the same amount each, so that the error of the difference is zero.
    assert [row[-1] for row in table.rows] == ["-0.1000 ± 0.0000", ""]
    assert [row[2] for row in table.rows] == ["0.002", "0.002"]
    assert table.rows[0][3] == "54"
    assert table.best == [None, None, None, 0, 0, 0, None]


def test_extrapolation_is_the_mean_so_far(folder: Path) -> None:
    table = extrapolation_table(read_comparison(folder))
    assert table.head == ["model", "32", "64", "128"]
    for column, length in enumerate((32, 64, 128), start=1):
        expected = np.exp(2 + (1 / np.arange(1, length + 1)).mean())
        assert table.rows[0][column] == f"{expected:.2f}"


def test_a_report_of_what_there_is(folder: Path) -> None:
    """While a comparison is still going on, figures without records are left out."""
    for path in folder.glob("runs/*/evaluations/*.json"):
        path.unlink()
    (folder / "corpus.json").unlink()
    (folder / "runs" / "mesa" / "metrics.jsonl").unlink()
    text = build_report(folder).read_text()
    assert text.count("<svg") == 2
    with pytest.raises(UserError, match="holds no comparison"):
        build_report(folder / "runs")


def changed(record: dict[str, Any], **parts: dict[str, Any]) -> dict[str, Any]:
    """A newer record that differs in these parts of its parts."""
    return {**record, "created": "2026-02-02", **{name: {**record[name], **part} for name, part in parts.items()}}


OTHERS = {
    "data": {"data": {"fingerprint": "other/validation"}},
    "split": {"data": {"fingerprint": "same/train"}, "settings": {"split": "train"}},
    "precision": {"settings": {"precision": "bfloat16"}},
    "piece": {"settings": {"piece": 64}},
    "length": {"settings": {"length": 2 * LENGTH}},
    "packed": {"settings": {"packed": True}},
    "solver": {"override": {"preconditioner": "auto"}},
    "weights": {"model": {"weights_sha256": "old"}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_was_evaluated_otherwise_is_not_shown(folder: Path, other: str) -> None:
    """A newer record of other data, settings or weights takes the place of none that the comparison made."""
    for name in ("mesa", "attention"):
        write_json_atomic(folder / "runs" / name / "evaluated.json", {"weights_sha256": "0"})
    before = build_report(folder).read_bytes()
    solver = {"max_steps": 2, "tolerance": 0.0, "preconditioner": None}
    for number, record in enumerate((evaluation(9.0, LENGTH, 1000), evaluation(9.0, LENGTH, 500, 2, solver))):
        parts = OTHERS[other]
        write_json_atomic(folder / "runs" / "mesa" / "evaluations" / f"z{number}.json", changed(record, **parts))
    assert build_report(folder).read_bytes() == before


def test_the_newest_of_equal_records_counts_once(folder: Path) -> None:
    solver = {"max_steps": 2, "tolerance": 0.0, "preconditioner": None}
    again = changed(evaluation(1.25, LENGTH, 500, 2, solver))
    write_json_atomic(folder / "runs" / "mesa" / "evaluations" / "again.json", again)
    rows = solver_table(read_comparison(folder).runs[0]).rows
    assert [row[0] for row in rows] == ["0 steps", "2 steps", "4 steps"]
    assert rows[1][2] == f"{again['summary']['nll']:.4f}"


def test_another_run_is_compared_with_the_model_that_it_has_now(tmp_path: Path) -> None:
    asked = evaluation(2.0, 16, 10)
    records = {
        "a_stale": changed(evaluation(7.0, 16, 10), model={"weights_sha256": "old"}),
        "b_older": evaluation(3.0, 16, 10),
        "c_newest": changed(evaluation(2.5, 16, 10)),
        "d_half": changed(evaluation(8.0, 16, 10), settings={"precision": "bfloat16"}),
    }
    for name, record in records.items():
        write_json_atomic(tmp_path / "evaluations" / f"{name}.json", record)
    assert counterpart(tmp_path, asked, "0") == records["c_newest"]
    with pytest.raises(UserError, match="run the same `mesanet eval` on it first"):
        counterpart(tmp_path, asked, "trained since")


def test_what_is_no_comparison_yet_says_so(folder: Path) -> None:
    for path in folder.glob("runs/*/config.json"):
        path.unlink()
    with pytest.raises(UserError, match="has no model yet"):
        build_report(folder)
    write_json_atomic(folder / "compare.json", {})
    with pytest.raises(UserError, match=r"compare\.json is damaged: it has no 'preset'"):
        build_report(folder)


def lacking(path: Path, *names: str) -> None:
    """Take a part out of a record."""
    record = read_json(path)
    inner = record
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    write_json_atomic(path, record)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("compare.json", ("run", "model", "heads")),
        ("corpus.json", ("tokens",)),
        ("runs/mesa/config.json", ("training", "peak_learning_rate")),
        ("runs/mesa/sample.json", ("text",)),
        ("runs/mesa/evaluations/a.json", ("summary", "nll")),
        ("runs/mesa/evaluations/steps2.json", ("override", "preconditioner")),
    ],
)
def test_records_that_lack_something_are_named(folder: Path, file: str, names: tuple[str, ...]) -> None:
    lacking(folder / file, *names)
    with pytest.raises(UserError, match=rf"{Path(file).name} is damaged: .* has no '{names[-1]}'"):
        build_report(folder)


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff"])
@pytest.mark.parametrize("file", ["compare.json", "corpus.json", "runs/mesa/config.json", "runs/mesa/sample.json"])
def test_files_that_are_no_records_are_named(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{Path(file).name} is (damaged|not valid JSON)"):
        build_report(folder)


@pytest.mark.parametrize("line", ["[1]", '{"kind": "train"}', '{"kind": "train", "step": 1, "tokens": 9}', "x"])
def test_a_line_of_the_metrics_that_lacks_something_is_named(folder: Path, line: str) -> None:
    path = folder / "runs" / "mesa" / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1 is damaged"):
        build_report(folder)


def test_every_model_that_solves_has_its_curve(folder: Path) -> None:
    shutil.copytree(folder / "runs" / "mesa", folder / "runs" / "hawk-mesa")
    plan = read_json(folder / "compare.json")
    write_json_atomic(folder / "compare.json", {**plan, "mixers": ["mesa", "attention", "hawk-mesa"]})
    figure = solver_effort(read_comparison(folder))
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.partition(":")[0] for title in titles[::2]] == ["Mesa", "Hawk-Mesa"]
    for axes in figure.axes[::2]:
        (curve,) = axes.get_lines()
        assert curve.get_xdata().tolist() == [0, 2, 4]


def test_the_page_says_how_all_were_optimised(folder: Path) -> None:
    assert "optimised alike" in build_report(folder).read_text()
    write_json_atomic(folder / "runs" / "mesa" / "config.json", {"training": {"peak_learning_rate": 0.001}})
    text = build_report(folder).read_text()
    assert "optimised alike" not in text
    assert "peak learning rate in the table" in text
    assert "<td>0.001</td>" in text
    assert "<td>0.002</td>" in text


def test_plain_tables() -> None:
    assert plain_table(["a", "bb"], [["x", "1"], ["yyy", "22"]]) == "a    bb\n-------\nx     1\nyyy  22"
    text = positions_table(evaluation(2.0, 8, 10), evaluation(2.5, 8, 10), buckets=4)
    assert text.splitlines()[2].split() == ["1", "4", "3.0000", "20.086", "3.0000", "20.086", "-0.5000"]
    assert len(text.splitlines()) == 6


def test_patterns_have_colours_of_their_own() -> None:
    patterns = ["mesa", "mesa-gla", "gla-mesa", "hawk-mesa", "mesa-hawk", "gla-hawk"]
    assert len(set(mixer_colours(patterns).values())) == len(patterns)


def test_a_bucket_without_tokens_has_a_dash() -> None:
    record = {"positions": {"sum": [0.0, 0.0, 2.0, 4.0], "count": [0, 0, 2, 2]}}
    for base in (None, record):
        lines = positions_table(record, base, buckets=2, scale="linear").splitlines()
        assert lines[2].split() == ["1-2", "0", *["-"] * (4 if base is None else 5)]
        assert lines[3].split()[2:] == ["1.5000", "4.482", "1.5000", "4.482", *([] if base is None else ["+0.0000"])]
