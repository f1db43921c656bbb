"""The playbook: every sentence has its evidence in the report, and what the report does not say is not said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from runs import Run
from sample_report import SMALL, cell, check, compiled, problem, recompiled, report, sample_report, written

from pytest_torchcompile.cli import main
from pytest_torchcompile.gate.markdown import evidence, prose
from pytest_torchcompile.playbook.chapters import KNOBS

REAL = {"model": ["scorer"], "backend": ["inductor"], "mode": ["default", "max-autotune"],
        "dynamic": ["auto", "static"]}  # fmt: skip


@pytest.fixture
def told(tmp_path, capsys):
    """The playbook of a report, by its headings."""
    def tell(content: dict[str, Any]) -> dict[str, str]:
        assert main(["playbook", str(written(content, tmp_path / "r.json")), "-o", "-"]) == 0
        parts = re.split(r"^## (.*)$", capsys.readouterr().out, flags=re.MULTILINE)
        return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))

    return tell


def changed(axes: dict[str, list[Any]], **by_id: Any) -> dict[str, Any]:
    """A sample report in which functions have changed the cells of some ids (``_`` for ``-``)."""
    content = sample_report(axes)
    for each in content["compile_matrix"]["cells"]:
        change = by_id.get(each["id"].replace("-", "_"))
        if change:
            change(each)
    return content


def fails(name: str, found: dict[str, Any], verdict: str = "fail"):
    """Make a check of a cell fail."""
    def change(each: dict[str, Any]) -> None:
        each["checks"][name] = check(verdict, found)
        each["status"] = verdict

    return change


def measures(**numbers: Any):
    """Give a cell a section with numbers."""
    def change(each: dict[str, Any]) -> None:
        each["observation"]["sections"]["worth"] = numbers

    return change


def test_what_limits_allow_is_a_gotcha(told):
    """After `accept` every check holds, and its graph breaks are still what a reader has to know."""
    run = Run(model=["net"], backend=["inductor"])
    (name,) = run.ids
    run.plan(name, "run", limits={"coverage": 1.0, "graph_breaks": 1})
    run.breaks(name)
    text = told({"compile_matrix": run.blocks()[0]})["Gotchas"]
    assert "### 1. `models.py:12`: graph break (1 place(s), 0 allowed): Tensor.item()" in text
    assert f"In 1 cell (`{name}`) (allowed: limits of the matrix let it pass)." in text
    assert "allow it by the rule" not in text
    assert "None: every check holds" not in text


def test_the_playbook_for_programs(tmp_path, capsys):
    """What to use and what to know, as data; nothing is written."""
    run = Run(model=["net", "gpt"], backend=["inductor"])
    net, gpt = run.ids
    run.plan(net, "run", limits={"coverage": 1.0, "graph_breaks": 1})
    run.breaks(net)
    run.recompiles(gpt)
    (path,) = run.write(tmp_path)
    assert main(["playbook", path, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    use, none = record["models"]
    assert (use["model"], use["advice"], use["cells"], use["graph_breaks"]) == ("net", "use", [net], 1)
    assert use["setting"] == {"backend": "inductor", "mode": "default", "dynamic": "auto", "wrapper": "none"}
    assert (none["model"], none["advice"], none["setting"]) == ("gpt", "none holds", None)
    assert [(each["checks"], each["known"], each["cells"]) for each in record["gotchas"]] == [
        (["recompiles"], "", [gpt]), (["graph_breaks"], "allowed", [net])]
    assert not list(tmp_path.glob("docs"))


# what to use


def test_what_holds_and_recompiles_least(told):
    """Without speed, the setting is chosen that recompiles least, then the nearest to the defaults; it says so."""
    wrong = fails("equivalence", problem("output: wrong"))
    text = told(changed(REAL, scorer_inductor_default_auto=wrong))["What to use"]
    assert "| `scorer` | `backend=inductor, mode=max-autotune` | every check holds in 1 cell; no graph break; " \
           "no recompile; compiles in" in text
    assert "(`scorer-inductor-max-autotune-auto`)" in text
    assert "| `backend=inductor` |" in text
    assert "2 other settings hold too" in text
    assert "Speed was not measured" in text


def test_the_fastest_where_speed_was_measured(told):
    """A measured speedup decides among settings that hold, and only among these."""
    text = told(changed(REAL, scorer_inductor_default_static=measures(speedup=1.9),
                        scorer_inductor_max_autotune_static=measures(speedup=2.5),
                        scorer_inductor_max_autotune_auto=lambda each: (
                            measures(speedup=9)(each), fails("gradients", problem("w: wrong"))(each))))["What to use"]
    assert "| `scorer` | `backend=inductor, mode=max-autotune, dynamic=static` |" in text
    assert "2.50 times as fast as eager" in text
    assert "Speed was not measured" not in text


def times(speedup: float, low: float, high: float):
    """Give a cell what the check `worth` found, which fails where the model is slower."""
    def change(each: dict[str, Any]) -> None:
        measures(speedup=speedup, interval=[low, high], verdict="slower" if high < 1 else "faster")(each)
        if high < 1:
            fails("worth", problem("slower: compiled"))(each)

    return change


ONE = {"model": ["scorer"], "backend": ["inductor"], "mode": ["default", "max-autotune"]}


def test_what_is_slower_is_not_to_be_compiled(told):
    """It was recommended at 0.64 times eager's speed once."""
    text = told(changed(ONE, scorer_inductor_default=times(0.64, 0.6, 0.7),
                        scorer_inductor_max_autotune=times(0.5, 0.4, 0.6)))["What to use"]
    assert "| `scorer` | do not compile this | eager is faster: `backend=inductor` is 0.64 times as fast (99 % " \
           "interval 0.60 to 0.70) (`scorer-inductor-default`) |" in text


def test_what_a_limit_allows_to_be_slower_is_not_recommended_either(told):
    def allowed(each: dict[str, Any]) -> None:
        measures(speedup=0.64, interval=[0.6, 0.7], verdict="slower")(each)

    text = told(changed(ONE, scorer_inductor_default=allowed, scorer_inductor_max_autotune=allowed))["What to use"]
    assert "do not compile this" in text


@pytest.mark.parametrize("other", [times(1.2, 1.1, 1.3), times(0.99, 0.97, 1.02), times(0.9, 0.6, 1.3)])
def test_a_setting_that_is_not_surely_slower_comes_first(told, other):
    text = told(changed(ONE, scorer_inductor_default=times(0.64, 0.6, 0.7),
                        scorer_inductor_max_autotune=other))["What to use"]
    assert "| `scorer` | `backend=inductor, mode=max-autotune` |" in text


def test_what_was_not_timed_is_no_way_out(told):
    """The main job times one cell of a model: where that is slower, a mode that nobody timed is not recommended."""
    text = told(changed(ONE, scorer_inductor_default=times(0.64, 0.6, 0.7)))["What to use"]
    assert "| `scorer` | do not compile this | eager is faster: `backend=inductor` is 0.64 times as fast" in text
    assert "; 1 setting holds that nobody timed |" in text


def test_a_timed_setting_comes_before_one_that_was_not(told):
    text = told(changed(ONE, scorer_inductor_max_autotune=times(1.2, 1.1, 1.3)))["What to use"]
    assert "| `scorer` | `backend=inductor, mode=max-autotune` |" in text


def test_a_busy_machine_tells_no_speed(told):
    def busy(each: dict[str, Any]) -> None:
        measures(speedup=0.9, interval=[0.6, 1.3], verdict="could not be told")(each)

    text = told(changed(ONE, scorer_inductor_default=busy))["What to use"]
    assert "whether it is faster could not be told, for the machine was busy" in text
    assert "0.90 times as fast" not in text


def test_wrong_and_slow_is_wrong(told):
    """The advice is to mend it, not to leave it."""
    def both(each: dict[str, Any]) -> None:
        fails("equivalence", problem("output: wrong"))(each)
        times(0.64, 0.6, 0.7)(each)

    text = told(changed(ONE, scorer_inductor_default=both, scorer_inductor_max_autotune=both))["What to use"]
    assert "no compiling yet" in text


def test_seconds_of_a_cache_stand_beside_no_others(told):
    """A compile that a cache served is told as such, without its seconds."""
    def served(each: dict[str, Any]) -> None:
        for compile_record in each["observation"]["sections"]["compiles"]["compiles"]:
            compile_record["caches"] = ["fx hit"]

    parts = told(changed(ONE, scorer_inductor_default=served, scorer_inductor_max_autotune=served))
    assert "compiled with the help of a cache" in parts["What to use"]
    assert "compiles in" not in parts["What to use"]
    assert "not told: a cache served some of it" in parts["Warm-up"]


def test_one_failing_cell_spoils_a_setting(told):
    """A setting has to hold for every dtype, phase and axis of the user's own."""
    axes = {"model": ["scorer"], "backend": ["inductor"], "phase": ["training", "inference"]}
    content = changed(axes, scorer_inductor_inference=fails("equivalence", problem("output: wrong")))
    assert "| `scorer` | no compiling yet | none of 1 setting holds" in told(content)["What to use"]


def test_stages_of_the_compiler_are_no_setting(told):
    """That aot_eager holds is told, but nobody is advised to use it."""
    text = told(sample_report({"model": ["scorer"], "backend": ["aot_eager", "eager"]}))["What to use"]
    assert "| `scorer` | not told | only stages of the compiler were tried; `aot_eager`, `eager` hold" in text


def test_where_only_stages_ran_nothing_is_said_of_a_choice(told):
    """No rule of choosing, nothing of speed, no warm-up: there is no setting that any of it is about."""
    parts = told(sample_report({"model": ["scorer"], "backend": ["aot_eager"]}))
    assert "only stages of the compiler were tried; `aot_eager` holds (" in parts["What to use"]
    assert "Of the settings in which" not in parts["What to use"]
    assert "Speed was not measured" not in parts["What to use"]
    assert parts["Warm-up"].strip().startswith("Only stages of the compiler were tried")


def test_the_fake_lane_is_no_setting(told):
    """Of rank 0 of 8 pretended ranks no number was judged: nobody is advised to use what holds there alone."""
    axes = {"model": ["scorer"], "backend": ["inductor"], "wrapper": ["tp*fake8"]}
    assert "| `scorer` | not told | only the fake lane was tried, in which no number is judged (`scorer-inductor-tp" \
           in told(sample_report(axes))["What to use"]
    text = told(sample_report(axes | {"wrapper": ["tp*fake8", "tp"]}))["What to use"]
    assert "| `scorer` | `backend=inductor, wrapper=tp` | every check holds in 1 cell" in text
    assert "fake" not in text


# gotchas


def test_gotcha(told):
    """A cause with the user's line, the cells, what to try, and the command that shows it."""
    text = told(sample_report(SMALL))["Gotchas"]
    assert "### 1. `models.py:41`: graph break (1 place(s), 0 allowed): Unsupported Tensor.item() call" in text
    assert "In 6 cells (`moe_lite-inductor-auto`, `moe_lite-inductor-static` and 4 more)." in text
    assert "- Try: Set `torch._dynamo.config.capture_scalar_outputs = True`" in text
    assert "  TORCH_LOGS=graph_breaks pytest --compile-inprocess -s --compile-matrix=matrix/default.yaml " \
           "'matrix/default.yaml::moe_lite-inductor-auto'" in text
    assert "so look at" not in text  # a graph break is Dynamo's, whatever the backend


def test_several_ranks_are_seen_in_a_file(told):
    """--compile-inprocess skips cells of several ranks; torch's log of all ranks goes to a file."""
    axes = {"model": ["scorer"], "backend": ["inductor"], "wrapper": ["ddp"]}
    text = told(changed(axes, scorer_inductor_ddp=fails("rank_divergence", problem("rank 1: other"))))["Gotchas"]
    assert "  TORCH_LOGS=graph_breaks,recompiles TORCH_LOGS_OUT=torch.log pytest " \
           "--compile-matrix=matrix/default.yaml 'matrix/default.yaml::scorer-inductor-ddp'" in text
    assert "--compile-inprocess" not in text


def test_the_stage_that_differs(told):
    """Where a cell that differs in its backend alone holds, the stage in between is named, with both cells."""
    axes = {"model": ["scorer"], "backend": ["inductor", "aot_eager_decomp_partition", "aot_eager"]}
    wrong = fails("equivalence", problem("output: error is 9 times the noise"))
    text = told(changed(axes, scorer_inductor=wrong))["Gotchas"]
    assert "With backend `aot_eager_decomp_partition` the same cell holds (`scorer-aot_eager_decomp_partition`), so " \
           "look at Inductor's lowering, fusion or generated code." in text
    text = told(changed(axes, scorer_inductor=wrong, scorer_aot_eager_decomp_partition=wrong))["Gotchas"]
    assert "With backend `aot_eager` the same cell holds (`scorer-aot_eager`), so look at what `inductor` does after " \
           "that." in text
    every = dict.fromkeys(("scorer_inductor", "scorer_aot_eager_decomp_partition", "scorer_aot_eager"), wrong)
    assert "so look at" not in told(changed(axes, **every))["Gotchas"]


def test_expected_failures_are_told_as_known(told):
    """What a rule of the matrix expects is a gotcha of the repository all the same."""
    content = changed(REAL, scorer_inductor_default_auto=fails("recompiles", problem("again", hint="mend it"), "xfail"))
    text = told(content)["Gotchas"]
    assert "In 1 cell (`scorer-inductor-default-auto`) (known: a rule of the matrix expects it)." in text
    assert "- Try: mend it" in text


def test_nothing_wrong(told):
    """Where every check holds, there is no gotcha."""
    assert told(sample_report(REAL))["Gotchas"].strip() == "None: every check holds in every cell that ran."


def test_the_channels_are_torchs():
    """Every channel is one that the installed torch knows."""
    torch_logging = pytest.importorskip("torch._logging._internal")
    pytest.importorskip("torch._logging._registrations")
    known = torch_logging.log_registry.artifact_names | set(torch_logging.log_registry.log_alias_to_log_qnames)
    assert {name.lstrip("+") for channels in KNOBS.values() for name in channels.split(",")} <= known


# practice


def of(*compiles: dict[str, Any]) -> dict[str, Any]:
    """A report of one cell with these compiles."""
    each = cell({"model": "scorer", "backend": "inductor", "dynamic": "auto"})
    seen = each["observation"]["sections"]["compiles"]
    seen["compiles"] = list(compiles)
    return report([each])


def test_warm_up(told):
    """The calls that compiled, in order, forward and backward, and that it ends."""
    text = told(of(compiled("0/0", seconds=1.5), compiled("0/0", kind="backward", seconds=1.0),
                   recompiled(1, seconds=0.5)))["Warm-up"]
    assert "| `scorer` | call 1 (B=4), call 2 (B=6), forward and backward | nothing compiles any more | 3.0 s | " \
           "(`scorer-inductor-auto`) |" in text


def test_a_warm_up_that_never_ends(told):
    """What compiles when the same calls come again cannot be warmed up."""
    text = told(of(compiled("0/0"), recompiled(1, during="call 1 (B=4, S=3), second time")))["Warm-up"]
    assert "the same calls still compile 1 time: no warm-up ends this" in text


def test_nothing_to_warm_up(told):
    """No setting holds, so none is warmed up."""
    content = changed(SMALL | {"model": ["moe_lite"]})
    assert "no setting that holds" in told(content)["Warm-up"]


def test_caches(told):
    """What the caches answered; a kept folder is advised only where something missed."""
    text = told(of(compiled("0/0", caches=["fx miss", "aot miss"], seconds=3.0),
                   compiled("1/0", caches=["fx hit"], seconds=0.2), compiled("2/0", caches=["aot bypass"])))["Caches"]
    assert "Asked 4 times: 1 `fx miss`, 1 `aot miss`, 1 `fx hit`, 1 `aot bypass`." in text
    assert "1 compile with a miss took 3.0 s each (`scorer-inductor-auto`)" in text
    assert "1 compile served from a cache took 200 ms each" in text
    assert "TORCHINDUCTOR_CACHE_DIR" in text
    assert "never cached (`bypass`)" in text
    text = told(of(compiled("0/0", caches=["fx hit"])))["Caches"]
    assert "TORCHINDUCTOR_CACHE_DIR" not in text
    assert "No compile of this report asked a cache" in told(of(compiled("0/0", caches=[])))["Caches"]


def test_sizes(told):
    """What `dynamic` does to a model, and the advice that its own numbers bear."""
    def recompiles(count):
        def change(each):
            each["observation"]["sections"]["compiles"]["compiles"] = [
                compiled("0/0"), *(recompiled(i + 1) for i in range(count))]
        return change

    axes = {"model": ["scorer"], "backend": ["inductor"], "dynamic": ["auto", "static"]}
    def counter(each):
        each["observation"]["sections"]["compiles"]["compiles"] = [
            compiled("0/0"), recompiled(1, cause="value", what="self.calls")]

    two = recompiles(2)
    text = told(changed(axes, scorer_inductor_auto=recompiles(1), scorer_inductor_static=two))["Sizes and buckets"]
    assert "| `scorer` | `auto` | 3 | 1 |" in text
    assert "| `scorer` | `static` | 3 | 2 |" in text
    assert "`static` compiles again for each size. Pad to a few lengths (`ShapeStabilizer`)" in text
    assert "because of" not in text
    text = told(changed(axes, **dict.fromkeys(("scorer_inductor_auto", "scorer_inductor_static"), counter)))
    assert "- `scorer`: recompiles because of self.calls (`models.py:9`), whatever `dynamic` says: see the gotchas " \
           "(`scorer-inductor-auto`, `scorer-inductor-static`)." in text["Sizes and buckets"]
    text = told(changed(axes, scorer_inductor_auto=counter, scorer_inductor_static=two))["Sizes and buckets"]
    assert "because of" not in text  # only with one value of dynamic
    text = told(changed(axes | {"dynamic": ["auto"]}))["Sizes and buckets"]
    assert "no model with more than one value of `dynamic`" in text


def test_buckets(told):
    """Whether padded lengths are served by what is compiled, as the check shape_stability saw it."""
    def padded(each):
        each["observation"]["sections"]["shape_stability"] = {"between": [
            {"dim": "S", "length": 17, "bucket": 32, "graphs": 1, "compiles": [], "error": None},
            {"dim": "S", "length": 31, "bucket": 32, "graphs": 1, "compiles": [compiled("0/1")], "error": None}, 7],
            "covered": [{"dim": "S", "least": 2, "most": 32, "largest": 32, "graphs": 2}, 7]}
        each["checks"]["shape_stability"] = {"verdict": verdict, "problems": []}

    verdict = "pass"
    axes = {"model": ["scorer"], "backend": ["inductor"]}
    text = told(changed(axes, scorer_inductor=padded))["Sizes and buckets"]
    assert "lengths padded to their bucket (S=17 to 32) run what is compiled already (`scorer-inductor`)." in text
    assert "lengths padded to their bucket (S=31 to 32) do not: see the gotchas (`scorer-inductor`)." in text
    said = "- `scorer`: 2 graph(s) do for every S from 2 to 32, padded to its bucket (`scorer-inductor`)."
    assert said in text
    verdict = "fail"
    assert said not in told(changed(axes, scorer_inductor=padded))["Sizes and buckets"]


# what it does not tell, and the command


def test_what_is_not_told(told):
    """Skipped cells with reasons, what was left out, what only one value was tried of."""
    axes = {"model": ["conv_net"], "backend": ["inductor"], "wrapper": ["none", "autocast"], "device": ["cpu"]}
    text = told(sample_report(axes, kernels=False))["What this report does not tell"]
    assert "- 1 cell skipped: no autocast for this device (`conv_net-inductor-autocast-cpu`)" in text
    assert "- 7 combinations left out by the matrix: a mode changes only what Inductor does" in text
    assert "- device: only `cpu` was tried" in text
    assert "- generated kernels: not recorded" in text


def test_a_partial_run_says_so(told):
    """A playbook of a part is marked as one."""
    content = sample_report(REAL)
    content["compile_matrix"]["run"]["exit_status"] = None
    assert "> This is not the whole run: " in told(content)[""]


def test_every_cell_named_is_in_the_report(told):
    """Evidence points to cells that exist."""
    content = sample_report()
    names = {each["id"] for each in content["compile_matrix"]["cells"]}
    found = {name for text in told(content).values() for group in re.findall(r"\((`[^()]*`)[^()]*\)", text)
             for name in re.findall(r"`([^`]*)`", group) if "-" in name}
    assert len(found) > 20
    assert found <= names


@pytest.mark.parametrize(("text", "shown"), [
    ("set `a_b` to *1*", r"set `a_b` to \*1\*"),
    ("one ` alone and <b>", r"one \` alone and \<b\>"),
    ("``two`` of them", r"\`\`two\`\` of them"),
    ("a | b", r"a \| b"),
    ("__init__.py and a_b", r"\__init_\_.py and a_b"),
    ("[link](javascript:x)", r"\[link\](javascript:x)"),
    ("two\n\n# lines", r"two \# lines"),
])
def test_prose(text, shown):
    """A report's text is one line without markup of its own but code."""
    assert prose(text) == shown


def test_evidence():
    """The first cells, each once, and how many more."""
    assert evidence(["a", "a", "b", "c"]) == "(`a`, `b` and 1 more)"


def test_command(tmp_path, capsys, monkeypatch):
    """It is written where the user's documentation is; of a run in which nothing ran there is none to write."""
    monkeypatch.chdir(tmp_path)
    path = written(sample_report(SMALL), tmp_path / "r.json")
    assert main(["playbook", str(path)]) == 0
    text = (tmp_path / "docs" / "torch_compile.md").read_text()
    assert text.startswith("# Compiling these models with torch.compile\n")
    assert capsys.readouterr().out == "docs/torch_compile.md written\n"
    nothing = sample_report({"model": ["conv_net"], "wrapper": ["autocast"]})
    assert main(["playbook", str(written(nothing, tmp_path / "n.json"))]) == 3
    assert "no cell ran, so there is nothing to write a playbook of" in capsys.readouterr().err


def test_without_torch(tmp_path):
    """The command works where torch is not installed."""
    path = written(sample_report(SMALL), tmp_path / "r.json")
    code = ("import sys; sys.modules['torch'] = None\nfrom pytest_torchcompile.cli import main\n"
            f"sys.exit(main(['playbook', {str(path)!r}, '-o', '-']))")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "## Gotchas" in done.stdout
