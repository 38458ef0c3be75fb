"""The paper's sizes, and what docs/models.md says about them and about adding a mixer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mesanet import presets
from mesanet.config.model import SIGNED_MIXERS, ModelConfig
from mesanet.mixers import MIXERS
from mesanet.mixers.linear import GLA
from mesanet.model.backbone import LanguageModel
from mesanet.model.files import load_model, save_model
from mesanet.model.parameters import compare_parameters, count_parameters, parameter_table


@pytest.mark.parametrize(("name", "millions"), [("small", 145), ("medium", 435), ("large", 935)])
def test_the_sizes_are_the_papers_and_every_mixer_has_as_many_parameters_as_attention(name: str, millions: int) -> None:
    for count in compare_parameters([name], [*MIXERS, "hawk-mesa"]):
        assert count.to_attention == pytest.approx(1, abs=0.01), count
        assert count.parameters == pytest.approx(millions * 1e6, rel=0.011), count


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_the_command_prints(repository: Path) -> None:
    text = (repository / "docs" / "models.md").read_text()
    table = text.split("<!-- the output of: mesanet model parameters -->\n")[1].split("\n<!-- end -->")[0]
    assert table == parameter_table(compare_parameters(presets.SIZES, [*MIXERS, "hawk-mesa"]))


def test_a_count_is_the_number_of_elements_of_a_real_model() -> None:
    config = presets.mad("hawk-mesa")
    assert count_parameters(config) == sum(parameter.numel() for parameter in LanguageModel(config).parameters())


@pytest.mark.parametrize("name", presets.MODELS)
def test_every_preset_takes_every_pattern(name: str) -> None:
    for mixers in ("gla", "hawk-mesa", ("mesa", "attention")):
        assert presets.model(name, mixers).mixers == presets.pattern(mixers)


def test_the_parity_model_has_about_a_million_parameters() -> None:
    config = presets.parity()
    assert (config.ridge_initial, config.ridge_lower_bound, config.gamma_range) == (50, 49, "signed")
    assert count_parameters(config) == pytest.approx(1e6, rel=0.2)


def test_a_misspelt_preset_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'small'"):
        presets.model("smal")


@pytest.mark.parametrize("name", presets.MODELS)
def test_every_preset_can_be_built_with_every_mixer(name: str) -> None:
    signed = {mixer for mixer, kind in MIXERS.items() if kind.signed_gates}
    for mixer in MIXERS:
        config = presets.model(name, mixer)
        assert (config.gamma_range == "signed") == (name == "parity" and mixer in signed)
        assert count_parameters(config) > 0


def test_a_signed_mixer_that_is_added_at_run_time_tracks_states(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extra(GLA):
        """Signed as its parent is."""

    class Unsigned(GLA):
        """Not signed, though its parent is."""

        signed_gates = False

    monkeypatch.setitem(MIXERS, "extra", Extra)
    monkeypatch.setitem(MIXERS, "unsigned", Unsigned)
    assert presets.parity(("extra", "mesa")).gamma_range == "signed"
    assert presets.parity(("extra", "unsigned")).gamma_range == "positive"
    LanguageModel(presets.parity("extra"))


def test_the_signed_mixers_are_known_before_any_mixer_is_imported() -> None:
    assert set(SIGNED_MIXERS) == {mixer for mixer, kind in MIXERS.items() if kind.signed_gates}


@pytest.mark.parametrize("name", ["mad", "parity"])
def test_the_small_presets_are_about_as_near_as_the_docs_say(name: str) -> None:
    for count in compare_parameters([name], [*MIXERS, "hawk-mesa"]):
        assert count.to_attention == pytest.approx(1, abs=0.031 if "hawk" in count.mixers else 0.016), count


def from_the_docs(repository: Path, title: str) -> str:
    """The example after this comment."""
    text = (repository / "docs" / "models.md").read_text()
    found = re.search(rf"<!-- test: {title} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def eleventh_mixer(repository: Path) -> Iterator[str]:
    """What the docs tell to write, run as it stands there."""
    code = from_the_docs(repository, "an eleventh mixer")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    known = set(MIXERS)
    exec(code, {"__name__": "docs"})
    (name,) = set(MIXERS) - known
    yield name
    del MIXERS[name]
    # A name that is gone is unknown again, to configs too.
    with pytest.raises(ValueError, match="mixers: got"):
        ModelConfig(mixers=(name,))


def test_an_eleventh_mixer_is_ten_lines(eleventh_mixer: str, tmp_path: Path) -> None:
    config = ModelConfig(mixers=(eleventh_mixer,), layers=2, width=32, heads=2, key_size=16, vocabulary=61)
    model = LanguageModel(config).eval()
    tokens = torch.randint(61, (2, 12))
    whole, _ = model(tokens)
    first, cache = model(tokens[:, :5])
    second, _ = model(tokens[:, 5:], cache)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=1e-4, rtol=0)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = False
    padded, _ = model(tokens, mask=mask)
    torch.testing.assert_close(padded[:1, 4:], model(tokens[:1, 4:])[0], atol=1e-4, rtol=0)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert torch.equal(load_model(save_model(model, tmp_path))(tokens)[0], model(tokens)[0])


@pytest.mark.slow
def test_an_eleventh_mixer_in_the_library_passes_every_test_of_the_others(repository: Path, tmp_path: Path) -> None:
    """In a copy of the repository, at the places that the docs name; the suites then run over it by themselves."""
    for part in ("src", "tests", "docs"):
        shutil.copytree(repository / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    code, cost = from_the_docs(repository, "an eleventh mixer"), from_the_docs(repository, "its cost")
    (line,) = [line for line in code.splitlines() if line.startswith("MIXERS")]
    found = re.fullmatch(r'MIXERS\["(\w+)"\] = (\w+)', line)
    assert found is not None
    name, kind = found.groups()
    body = code.replace(line, "").replace("import MIXERS, HeadMixer", "import HeadMixer")
    package = tmp_path / "src" / "mesanet"
    body = body.replace("from mesanet.mixers import", "from mesanet.mixers.base import")
    (package / "mixers" / f"{name}.py").write_text(body.rstrip() + "\n\n" + cost)
    for path, before, after in [
        (package / "mixers" / "__init__.py", "\nMIXERS: ", f"from mesanet.mixers.{name} import {kind}\n\nMIXERS: "),
        (package / "mixers" / "__init__.py", '    "mesa": Mesa,\n', f'    "mesa": Mesa,\n    "{name}": {kind},\n'),
        (package / "config" / "model.py", '    "mesa",\n', f'    "mesa",\n    "{name}",\n'),
    ]:
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
    suites = ["tests/mixers", "tests/model", "tests/bench/test_costs.py", "tests/test_presets.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites, "-k", name]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    # The suite of the mixers alone has more than this.
    assert int(passed.group(1)) > 15
