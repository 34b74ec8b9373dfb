"""Needle texts say what they promise, and the command measures a run with them."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from nsa_core.data.tokenizer import ByteTokenizer
from nsa_core.evaluate.__main__ import as_text, default_lengths, main, picture
from nsa_core.evaluate.ablation import cut_branches
from nsa_core.evaluate.heat_map import LEFT, TOP, HeatMap, draw
from nsa_core.evaluate.needle import DEPTHS, NeedleCell, NeedleTable, measure_needles, write_text
from nsa_core.model.transformer import LanguageModel
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from tests.core.evaluate.run_case import make_run, save
from tests.core.model.cases import SIZES, small_config

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made = make_run(tmp_path_factory.mktemp("run"))
    save(made, read_manifest(made).config, 5)
    return made


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_tokens", [96, 200, 513])
def test_a_text_has_its_needle_at_its_depth_and_asks_for_it_at_the_end(
    num_tokens: int, depth
) -> None:
    text = write_text(BYTES, num_tokens, depth, seed=3)
    written = BYTES.decode(text.with_needle)
    number = written[-5:]
    needle_at = written.index("The number of the ")
    assert number.isdecimal()
    assert written.count(number) == 2
    assert written[needle_at : text.needle_end].endswith(f"is {number}. ")
    assert written[text.needle_end :].count("The number of the ") == 1
    last_place = num_tokens - text.num_answer - (written.rindex(" is ") - written.rindex("\n") + 3)
    assert needle_at == pytest.approx(depth * (last_place - text.needle_end + needle_at), abs=1)
    assert len(text.with_needle) == len(text.without) == num_tokens


def test_the_twin_without_the_needle_says_the_number_only_as_the_answer() -> None:
    text = write_text(BYTES, 300, 0.5, seed=1)
    without = BYTES.decode(text.without)
    assert without.count(without[-5:]) == 1
    assert text.without[-60:] == text.with_needle[-60:]


def test_texts_of_different_seeds_ask_for_different_numbers() -> None:
    numbers = {
        BYTES.decode(write_text(BYTES, 200, 0.5, seed).with_needle)[-5:] for seed in range(9)
    }
    assert len(numbers) == 9
    assert all(10_000 <= int(number) < 100_000 for number in numbers)


def test_a_text_too_short_for_its_needle_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least .* tokens, not 60"):
        write_text(BYTES, 60, 0.0, seed=0)


class Reader(LanguageModel):
    """Knows the text: gives the next byte of the needle if it is there, else a wrong one."""

    def hidden(self, tokens_BT: torch.Tensor, packing=None):
        wanted = torch.full(tokens_BT.shape, 32)
        for row, ids in enumerate(tokens_BT.tolist()):
            written = bytes(ids)
            number = written[: written.rindex(b"\n")].rpartition(b" is ")[2][:5]
            if number.isdigit():
                wanted[row, -5:] = torch.tensor(list(number))
        return torch.nn.functional.one_hot(wanted, 257).float().flatten(0, 1) * 9

    @property
    def head_weight(self):
        return torch.eye(257)


def test_a_model_that_reads_the_needle_is_right_and_saves_nats() -> None:
    table = measure_needles(
        Reader(small_config(vocab_size=257)), BYTES, "fp32", lengths=[100, 200], num_trials=3
    )
    assert {cell.accuracy for cell in table.cells} == {1.0}
    assert all(cell.saved_nats > 5 for cell in table.cells)
    assert table.lengths == (100, 200)


def judge(**sizes):
    """Whether each depth is beyond the window of a 200 token text, and the texts it was told of."""
    model = Reader(small_config(vocab_size=257, **sizes))
    table = measure_needles(model, BYTES, "fp32", lengths=[200], num_trials=6)
    texts = {d: [write_text(BYTES, 200, d, seed) for seed in range(6)] for d in DEPTHS}
    return {cell.depth: cell.is_beyond_window for cell in table.cells}, texts


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 8, 20, 60, 200])
def test_beyond_the_window_is_a_needle_that_no_chain_of_windows_carries_to_the_question(
    window: int, num_layers: int
) -> None:
    beyond, texts = judge(nsa=SIZES | {"window": window}, num_layers=num_layers)
    for depth, told in texts.items():
        carried = []
        for text in told:
            question_start = BYTES.decode(text.with_needle).rindex("\n")
            reach = question_start  # each layer reads itself and the window - 1 tokens before
            for _ in range(num_layers):
                reach -= window - 1
            carried.append(text.needle_end - 1 >= reach)
        assert beyond[depth] == (not any(carried))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_needle_beyond_the_window_changes_nothing_that_windows_alone_tell_the_question(
    depth,
) -> None:
    """The star is held against what a model really computes with its two other branches cut."""
    text = write_text(BYTES, 200, depth, seed=2)
    start = len(text.with_needle) - text.num_answer - text.num_question
    assert bytes(text.with_needle[start:]).startswith(b"\nThe number of the ")
    twin = list(text.with_needle)
    twin[text.needle_end - 1] += 1
    rows = torch.tensor([text.with_needle, twin])
    gap = start - text.needle_end
    for window in sorted({1, 2, gap // 3 + 1, gap // 3 + 2, gap}):
        if window < 1:
            continue
        model = LanguageModel(
            small_config(vocab_size=257, num_layers=3, nsa=SIZES | {"window": window}), seed=0
        ).double()
        with torch.no_grad(), cut_branches(model, "compressed", "selected"):
            one, other = model.hidden(rows).view(2, 200, -1)[:, start:]
        is_changed = bool((one - other).abs().max() > 1e-12)  # sums are rounded to 1e-15
        assert text.is_beyond(3 * (window - 1)) == (not is_changed)


def test_a_needle_right_before_the_question_has_no_star(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """The window of this run is 8 and the question longer, but its first tokens see the needle."""
    config = read_manifest(run).config.model
    assert (config.nsa.window, config.num_layers) == (8, 1)
    assert main(["needle", "--run", str(run.root), "--lengths", "128", "--trials", "2"]) == 0
    *rows, legend = capsys.readouterr().out.splitlines()[1:]
    assert [row.endswith("*") for row in rows] == [True, True, True, True, False]
    assert legend.endswith("* beyond all layers' windows")


def test_nothing_is_beyond_the_window_of_a_dense_model() -> None:
    beyond, _ = judge(attention="dense", nsa=SIZES | {"window": 1})
    assert not any(beyond.values())


def test_a_cell_is_beyond_the_window_only_if_every_text_of_it_is() -> None:
    """Names of places differ in length: at this window some texts of one cell are, others not."""
    _, texts = judge()
    gaps = {
        len(text.with_needle) - text.num_answer - text.num_question - text.needle_end
        for text in texts[0.0]
    }
    assert len(gaps) > 1
    for gap, expected in ((min(gaps), True), (max(gaps), False)):
        beyond, _ = judge(nsa=SIZES | {"window": gap + 1}, num_layers=1)
        assert beyond[0.0] is expected


def test_a_model_that_cannot_read_saves_nothing() -> None:
    torch.manual_seed(0)
    table = measure_needles(
        LanguageModel(small_config(vocab_size=257)), BYTES, "fp32", lengths=[120], num_trials=4
    )
    assert max(cell.accuracy for cell in table.cells) == 0
    assert max(abs(cell.saved_nats) for cell in table.cells) < 0.05


def test_default_lengths_leave_out_what_a_needle_does_not_fit() -> None:
    assert default_lengths(128) == [128]
    assert default_lengths(1024) == [256, 512, 1024]


def test_the_command_prints_cells_and_draws_a_picture(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "needle.svg"
    words = ["needle", "--run", str(run.root), "--lengths", "96", "128", "--trials", "2"]
    assert main([*words, "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(cell["num_tokens"], cell["depth"]) for cell in found["cells"]] == [
        (length, depth) for length in (96, 128) for depth in DEPTHS
    ]
    assert found["weights"].endswith("step_000005/model.safetensors")
    texts = [node.text for node in ElementTree.fromstring(picture.read_text()).iter() if node.text]
    assert {"96", "128", "0 %", "25 %", "50 %", "75 %", "100 %"} <= set(texts)
    assert main([*words, "--cut"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["depth", "96", "128"]
    assert len(table) == 2 + len(DEPTHS)


@pytest.fixture
def distinct() -> NeedleTable:
    """A table whose every cell has its own accuracy, and stars above the diagonal."""
    return NeedleTable(
        tuple(
            NeedleCell(length, depth, (10 * row + column) / 100, 5.0, 5.0 + row, 8, row < column)
            for column, length in enumerate((100, 2000))
            for row, depth in enumerate(DEPTHS)
        )
    )


def wanted_label(row, column) -> str:
    return f"{10 * row + column} %{' *' if row < column else ''}"


def test_each_cell_of_the_picture_is_in_the_row_and_column_of_its_labels(
    distinct: NeedleTable,
) -> None:
    """Labels are found by their place alone, as a reader finds them."""
    nodes = ElementTree.fromstring(picture(distinct, is_cut=False)).iter()
    at = {(float(n.get("x")), float(n.get("y"))): n.text for n in nodes if n.tag.endswith("text")}
    depth_y = {text: y for (x, y), text in at.items() if x == LEFT - 10 and text != "depth"}
    length_x = {text: x for (x, y), text in at.items() if y == TOP - 8 and text != "depth"}
    assert list(depth_y) == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert list(length_x) == ["100", "2,000"]
    for row, y in enumerate(depth_y.values()):
        for column, x in enumerate(length_x.values()):
            near = [t for (a, b), t in at.items() if abs(a - x) <= 1 and abs(b - y) <= 1]
            assert near == [wanted_label(row, column)]


def test_each_cell_of_the_table_is_in_the_row_and_column_of_its_labels(
    distinct: NeedleTable,
) -> None:
    heads, *rows, _ = as_text(distinct).splitlines()
    assert heads.split() == ["depth", "100", "2000"]
    for row, (depth, line) in enumerate(zip(DEPTHS, rows, strict=True)):
        first, *cells = re.findall(r"\d+ %(?:\s+[+]\d\.\d\d)?(?: \*)?", line)
        assert first == f"{100 * depth:.0f} %"
        for column, cell in enumerate(cells):
            star = " *" if row < column else ""
            assert cell.split() == f"{10 * row + column} % +{row}.00{star}".split()
        assert len(cells) == 2


def test_cut_measures_a_model_without_the_selected_branch_and_says_so(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "needle.svg"
    words = ["needle", "--run", str(run.root), "--lengths", "96", "--trials", "2", "--json"]

    def measured(*more):
        assert main([*words, "--device", "cpu", "--picture", str(picture), *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["is_cut"], found["cells"], "selected branch cut" in picture.read_text()

    config = read_manifest(run).config
    model = LanguageModel(config.model, seed=5).eval()
    with cut_branches(model, "selected"):
        wanted = measure_needles(model, BYTES, "fp32", lengths=[96], num_trials=2).as_json()
    whole = measured()
    assert measured("--cut") == (True, wanted, True)
    assert (whole[0], whole[2]) == (False, False)
    assert whole[1] != wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--trials", "0"), "--trials must be at least 1, got 0"),
        (("--lengths", "10"), "--lengths must be at least 96, or a needle may not fit, got 10"),
        (
            ("--lengths", "0", "-5"),
            "--lengths must be at least 96, or a needle may not fit, got -5",
        ),
        (("--lengths", "128", "95"), "or a needle may not fit, got 95"),
        (("--lengths", "128", "1048577"), "--lengths must be at most 1,048,576, got 1048577"),
    ],
)
def test_sizes_that_mean_nothing_are_one_line_before_the_weights_are_loaded(
    run: RunDir, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    code = main(["needle", "--run", str(run.root), *words])
    output = capsys.readouterr()
    assert code == TrainerExit.CONFIGURATION
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert output.err.startswith("error: ")
    assert output.err.endswith(f"{says}\n")


def test_the_title_of_a_narrow_heat_map_is_not_cut_off() -> None:
    title = "Needle: right answers, selected branch cut (* beyond all layers' windows)"
    svg = draw(HeatMap(title, "r", "c", ["a"], ["x"], [[0.0]], [["0 %"]]))
    assert int(ElementTree.fromstring(svg).get("width")) >= 8 * len(title)


def test_dark_squares_mean_more_and_say_their_number() -> None:
    svg = draw(HeatMap("t & u", "r", "c", ["a"], ["x", "y"], [[0.0, 1.0]], [["0 %", "100 %"]]))
    squares = [
        node.get("fill")
        for node in ElementTree.fromstring(svg).iter()
        if node.tag.endswith("rect") and node.get("x")
    ]
    assert squares == ["#eff3fa", "#184e8c"]
    assert "t &amp; u" in svg
