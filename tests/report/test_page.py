"""The page without a browser: what stands in it, that it is whole, and that texts of models stay texts."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from mlrl.report.__main__ import main
from tests.report.runs import node, two_turns, write_run

HOSTILE = "</script><script>alert('run')</script><img src=x onerror=alert(1)> \u2028 & \ud800"


class Page(HTMLParser):
    """Elements of a page, and the content of its data blocks and scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.data: dict[str, str] = {}
        self.programs = 0
        self.text = ""
        self.inside: tuple[str, dict] = ("", {})  # the script or style element being read
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.inside = self.elements[-1]

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside = ("", {})

    def handle_data(self, content):
        tag, attributes = self.inside
        if tag == "script" and attributes.get("type") == "application/json":
            self.data[attributes["id"]] = content
        elif tag == "script":
            self.programs += bool(content.strip())
        elif tag != "style":
            self.text += content


def report(*words) -> None:
    main([str(word) for word in words])


def read(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def curve_rows():
    for step in range(1, 5):
        yield {
            "step": step,
            "turn_1/reward_mean": step / 4,
            "turn_1/expected_return": step / 4,
            "turn_1/agent_0/loss": None if step == 2 else 0.5,
            "turn_1/agent_1/loss": -0.5,
            "time/step_s": 10.0,
            "time/rollout_s": 4.0,
            "time/reward_s": 1.0,
        }


@pytest.fixture
def team(tmp_path):
    """Two seeds of one experiment, the first with completions, and another run."""
    for seed in (0, 1):
        rows = [{**row, "turn_1/expected_return": row["turn_1/expected_return"] + seed} for row in curve_rows()]
        folder = write_run(tmp_path / f"team-{seed}", rows, seed=seed)
        if seed == 0:
            folder.write_completions(two_turns(first=HOSTILE), "train", 1)
    write_run(tmp_path / "other", list(curve_rows()), discount=0.5)
    return tmp_path


def test_a_page_of_several_runs(team, capsys):
    report(team / "team-0", team / "team-1", team / "other")
    assert capsys.readouterr().out == f"written to {team / 'report.html'}\n"  # the folder that holds them
    page = read(team / "report.html")
    assert "team (2 runs)" in page.text and "discount" in page.text
    curves = json.loads(page.data["curves"])
    assert curves["groups"] == ["team (2 runs)", "other"]
    charts = {chart["title"]: chart["lines"] for chart in curves["charts"]}
    figures = [attributes for tag, attributes in page.elements if tag == "figure"]
    assert [figure["aria-label"] for figure in figures] == list(charts) == ["Reward", "Policy loss", "Seconds a step"]
    assert [(line["group"], line["run"], line["main"]) for line in charts["Reward"]] == [
        (0, "team-0", False), (0, "team-1", False), (0, "", True), (1, "other", True),
    ]  # fmt: skip
    assert charts["Reward"][2]["y"] == [0.25, 0.5, 0.75, 1] and charts["Reward"][2]["low"] == [0.25, 0.5, 0.75, 1]
    assert curves["axes"][charts["Reward"][0]["axis"]] == [[1, 2, 3, 4], [10, 20, 30, 40]]
    assert charts["Policy loss"][0]["y"] == [0.5, None, 0.5, 0.5]  # null is a gap
    assert "team-0 · agent 0: 1 of 4 values are NaN or infinite" in page.text
    # returns ran from 0.25 to 1 and from 1.25 to 2: 0.75 → 1.5, and the two last ones deviate by 1/√2
    assert re.search(r"training reward\s*0\.75\s*1\.5\s*± 0\.7071 over 2 runs\s*\+0\.75", page.text)
    assert re.search(r"sampling 4 s \(40 %\)\s*rewards 1 s \(10 %\)\s*update and other 5 s \(50 %\)", page.text)


def test_a_batch_that_was_drawn_during_the_step_before_is_told_by_what_was_waited_for(tmp_path):
    write_run(tmp_path / "ahead", [{**row, "time/rollout_wait_s": 0.5} for row in curve_rows()])
    report(tmp_path / "ahead")
    text = read(tmp_path / "ahead" / "report.html").text
    assert re.search(r"waiting for rollouts 0\.5 s \(5 %\)\s*update and other 9\.5 s \(95 %\)", text)


def test_a_run_in_rounds_plays_between_its_steps(tmp_path):
    """Its sampling is no part of a step, its steps share an env_step, and it has candidates in place of generations."""
    rows = [{"step": 0, "env_step": 320, "preference/num_pairs": 40.0, "time/rollout_s": 223.0, "time/reward_s": 0.1}]
    rows += [{"step": step, "env_step": 320, "preference/loss": 0.7, "time/step_s": 28.0} for step in (1, 2)]
    write_run(tmp_path / "a", rows, num_generations=None, preference_num_candidates=4)
    report(tmp_path / "a")
    text = (tmp_path / "a/report.html").read_text()
    assert "1 turn, 4 candidates an item" in text and "K = None" not in text
    assert "Time of a step" not in text and 'value="0" selected>step' in text


def test_shares_that_are_zero_throughout_are_one_line(tmp_path):
    zero = {"turn_1/agent_0/truncated_fraction": 0.0, "turn_1/agent_0/clip_fraction": 0.0, "nonfinite_fraction": 0.0}
    folder = write_run(tmp_path / "a", [row | zero for row in curve_rows()])
    report(folder.path)
    page = read(folder.path / "report.html")
    titles = ["Reward", "Policy loss", "Seconds a step"]
    assert [chart["title"] for chart in json.loads(page.data["curves"])["charts"]] == titles
    figures = [attributes for tag, attributes in page.elements if tag == "figure"]
    assert [(figure["aria-label"], figure["data-chart"]) for figure in figures] == list(zip(titles, "012", strict=True))
    assert "Zero throughout: Truncated responses, Clipped tokens." in page.text
    assert "Zero throughout: Skipped updates." in page.text


def test_texts_of_models_are_data_and_never_run(team):
    report(team / "team-0")
    text = (team / "team-0" / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.programs == 1 and "alert('run')" in text
    assert not [tag for tag, _ in page.elements if tag == "img"]
    (tree,) = json.loads(page.data["trees-0-0"])
    assert tree["nodes"][0]["responses"][0][0] == HOSTILE  # whole, half a surrogate pair included
    assert "<script>alert('run')" in page.text  # as an example in the table, escaped


def test_nothing_is_fetched_and_only_our_program_may_run(team):
    report(team / "other")
    page = read(team / "other" / "report.html")
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object") and "src" not in attributes, tag
        assert attributes.get("href", "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert re.fullmatch(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]+='", policy)


def test_the_page_keeps_to_its_limit_and_says_so(tmp_path):
    folder = write_run(tmp_path / "a", list(curve_rows()))
    for step in range(1, 9):
        trees = [node(item, [], [0.0, 1.0], [["x" * 4000, "y" * 4000]]) for item in range(8)]
        folder.write_completions(trees, "train", step)
    report(folder.path, "--max_mb", 0.4)
    assert (folder.path / "report.html").stat().st_size < 400_000
    page = read(folder.path / "report.html")
    shown = sum(step["trees"] for step in json.loads(page.data["index"])[0]["steps"])
    assert 8 <= shown < 64 and f"{shown} of 64 kept trees" in page.text
    assert "This page is limited to 0.4 MB" in page.text


def test_a_run_that_has_just_begun(tmp_path):
    folder = write_run(tmp_path / "a", [])
    folder.metrics.unlink(missing_ok=True)
    report(folder.path)
    page = read(folder.path / "report.html")
    for text in ("metrics.jsonl is missing", "No metrics yet", "No completions were kept", "0 of 0 kept trees"):
        assert text in page.text


def test_an_agent_that_says_nothing_is_named(team):
    report(team / "team-0")  # agent 1 writes nothing in half of its responses
    assert "agent 1 answers with nothing: 50% of its responses at step 1" in read(team / "team-0/report.html").text
    assert "agent 0 answers with nothing" not in read(team / "team-0/report.html").text


def test_since_when_an_agent_says_nothing(tmp_path):
    folder = write_run(tmp_path / "a", list(curve_rows()))

    def write(split, step, empty):
        texts = [["a", "b", "c", "d"], ["x"] * (4 - empty) + [""] * empty]
        folder.write_completions([node(0, [], [0.0, 0.5, 1.0, 0.0], texts, advantages=None)], split, step)

    write("eval", 0, 0)
    write("train", 1, 1)
    write("train", 3, 3)
    write("eval", 3, 4)
    report(folder.path)
    text = read(folder.path / "report.html").text
    assert (
        "agent 1 answers with nothing: 75% of its responses at step 3 and 100% of its responses in the evaluation at "
        "step 3; first seen at step 1 (25%)"
    ) in text
    assert "agent 0 answers with nothing" not in text
    assert text.count("(empty)") == 2  # its example at step 3, where most are, and the line that says so
    (tmp_path / "a/completions/eval-000003.jsonl").unlink()
    write("eval", 3, 0)
    write("train", 3, 0)
    report(folder.path)
    assert "answers with nothing" not in read(folder.path / "report.html").text  # it found its words again


def test_an_agent_that_says_far_less_than_another_is_named(tmp_path):
    folder = write_run(tmp_path / "a", list(curve_rows()))
    texts = [["word " * 20] * 10, ["no"] * 9 + [""]]  # one response of ten is empty
    folder.write_completions([node(0, [], [0.0] * 9 + [1.0], texts, advantages=None)], "train", 1)
    report(folder.path)
    text = read(folder.path / "report.html").text
    assert "agent 1 answers with nothing: 10% of its responses at step 1" in text
    (tmp_path / "a/completions/train-000001.jsonl").unlink()
    folder.write_completions([node(0, [], [0.0, 1.0], [["word " * 20] * 2, ["no", "yes"]])], "train", 1)
    report(folder.path)
    text = read(folder.path / "report.html").text
    # 100 tokens (characters, in these tests) beside (2 + 3)/2
    assert "agent 1 writes 2.5 tokens a response, a tenth or less of another (step 1)" in text
    assert "agent 0 writes" not in text


@pytest.mark.parametrize("kind, start", [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_curves_as_images(team, kind, start, capsys):
    pytest.importorskip("matplotlib")
    report(team / "team-0", team / "team-1", "--report", kind, "--output", team / "paper")
    files = sorted((team / "paper" / "figures").iterdir())
    names = ("time_step_s", "turn_1_loss", "turn_1_reward_mean")
    assert [file.name for file in files] == [f"{name}.{kind}" for name in names]
    assert all(file.read_bytes().startswith(start) for file in files)
    assert not (team / "paper" / "report.html").exists()
    clean = write_run(team / "clean", [row | {"nonfinite_fraction": 0.0} for row in curve_rows()])
    report(clean.path, "--report", kind)
    assert "nonfinite_fraction" not in {file.stem for file in (clean.path / "figures").iterdir()}


def test_mistakes_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        report(tmp_path / "absent")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"mlrl.report: error: runs='{tmp_path / 'absent'}': there is no such")
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        report(write_run(tmp_path / "a", []).path, "--report", "png")
    assert "the runs have no metrics yet" in capsys.readouterr().err


def test_needs_no_torch():
    code = "import sys, mlrl.report.__main__, mlrl.report.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
