"""Damage: reports of a good run made wrong in some way, by a seed. No gate may pass any of them.

Each damage takes the reports of a run as text and gives them back with something lost, changed or added that a verdict
rests on.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from pytest_torchcompile.report.provenance import add_seal, fingerprint, head_fingerprint

Texts = list[str]
Damage = Callable[[random.Random, Texts], Texts]
BLOCK = "compile_matrix"
OTHER_TYPES: list[Any] = [None, True, 7, -1, 0.5, "other", [], {}, ["x"], {"x": 1}, 1e308, 10**30]
LATER = {"began": "2026-11-22T10:00:00+00:00", "command": "pytest --compile-matrix --compile-shard=9/8"}


def damages(reports: Texts, journals: Texts, count: int, seed: int = 20261121) -> Iterator[tuple[str, Texts]]:
    """``count`` times a name and the damaged texts, every kind in turn."""
    draw = random.Random(seed)
    kinds = [*((damage, reports) for damage in OF_REPORTS), *((damage, journals) for damage in OF_JOURNALS)]
    for number in range(count):
        damage, texts = kinds[number % len(kinds)]
        yield f"{number}: {damage.__name__}", damage(draw, list(texts))


def _one(draw: random.Random, texts: Texts, change: Callable[[str], str]) -> Texts:
    which = draw.randrange(len(texts))
    texts[which] = change(texts[which])
    return texts


def _edited(draw: random.Random, texts: Texts, edit: Callable[[dict[str, Any]], Any]) -> Texts:
    """One of the reports with an edit made to its block."""
    def change(text: str) -> str:
        content = json.loads(text)
        edit(content[BLOCK])
        return json.dumps(content)

    return _one(draw, texts, change)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a block."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from _places(child, (*path, key))


def _at(block: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        block = block[key]
    return block


# what happens to files


def truncated(draw: random.Random, texts: Texts) -> Texts:
    """Cut before each kind of character: in a text, a number, between things, one before the end."""
    kind = draw.choice(['"', "{", "}", "[", "]", ":", ",", "1", "e", "\\"])
    def cut(text: str) -> str:
        places = [k for k, char in enumerate(text.rstrip()) if char == kind] or [len(text) // 2]
        return text[:draw.choice(places)]
    return _one(draw, texts, cut)


def cut_anywhere(draw: random.Random, texts: Texts) -> Texts:
    """A disk that was full."""
    return _one(draw, texts, lambda text: text[:draw.randrange(len(text.rstrip()))])


def emptied(draw: random.Random, texts: Texts) -> Texts:
    """A file with nothing in it, or nothing of ours."""
    return _one(draw, texts, lambda _: draw.choice(["", " \n", "null", "[]", "{}", "0", '""', "\x00", "[" * 2000,
                                                     '{"tests": []}', f'{{"{BLOCK}": null}}', f'{{"{BLOCK}": {{}}}}']))


def overwritten(draw: random.Random, texts: Texts) -> Texts:
    """A run of bytes of the cells replaced by others."""
    def change(text: str) -> str:
        start = draw.randrange(text.index('"cells":['), text.index('"environment":{"torch"') - 20)
        junk = "".join(draw.choice("{}[]\",:x0 ") for _ in range(draw.randrange(1, 9)))
        changed = text[:start] + junk + text[start + len(junk):]
        return changed if changed != text else text[:start]
    return _one(draw, texts, change)


def not_json(draw: random.Random, texts: Texts) -> Texts:
    """What Python's reader takes and JSON does not have."""
    def change(text: str) -> str:
        key = draw.choice(['"seconds":', '"finished":', '"line":', '"runs":', '"share":'])
        place = text.index(key) + len(key)
        return draw.choice([
            text[:place] + draw.choice(["NaN,", "Infinity,", "-Infinity,"]) + '"x":' + text[place:],
            text[:place] + "1," + key + text[place:],  # a key given twice
        ])
    return _one(draw, [json.dumps(json.loads(text), separators=(",", ":")) for text in texts], change)


# what happens to values


def field_dropped(draw: random.Random, texts: Texts) -> Texts:
    """A key of an object is gone."""
    def edit(block: Any) -> None:
        path = draw.choice([p for p in _places(block) if isinstance(_at(block, p[:-1]), dict)])
        del _at(block, path[:-1])[path[-1]]
    return _edited(draw, texts, edit)


def entry_dropped(draw: random.Random, texts: Texts) -> Texts:
    """An entry of a list is gone."""
    def edit(block: Any) -> None:
        path = draw.choice([p for p in _places(block) if isinstance(_at(block, p[:-1]), list)])
        del _at(block, path[:-1])[path[-1]]
    return _edited(draw, texts, edit)


def type_changed(draw: random.Random, texts: Texts) -> Texts:
    """A value is of another type."""
    def edit(block: Any) -> None:
        path = draw.choice(list(_places(block)))
        old = _at(block, path)
        _at(block, path[:-1])[path[-1]] = draw.choice([v for v in OTHER_TYPES if type(v) is not type(old)])
    return _edited(draw, texts, edit)


def top_changed(draw: random.Random, texts: Texts) -> Texts:
    """The same at the top of the block, where there is little of it."""
    def edit(block: Any) -> None:
        path = draw.choice([p for p in _places(block) if len(p) < 3])
        old = _at(block, path)
        _at(block, path[:-1])[path[-1]] = draw.choice([v for v in OTHER_TYPES if type(v) is not type(old)])
    return _edited(draw, texts, edit)


def evidence_changed(draw: random.Random, texts: Texts) -> Texts:
    """A number or a text of an observation is another one."""
    def edit(block: Any) -> None:
        cell = draw.choice([c for c in block["cells"] if c["observation"]])
        seen = cell["observation"]
        path = draw.choice([p for p in _places(seen) if isinstance(_at(seen, p), (int, float, str))])
        old = _at(seen, path)
        _at(seen, path[:-1])[path[-1]] = not old if isinstance(old, bool) else old + "x" if isinstance(old, str) \
            else old + 1
    return _edited(draw, texts, edit)


# what happens to cells


def cell_removed(draw: random.Random, texts: Texts) -> Texts:
    """One or more cells are gone."""
    def edit(block: Any) -> None:
        for _ in range(draw.randint(1, len(block["cells"]))):
            block["cells"].pop(draw.randrange(len(block["cells"])))
    return _edited(draw, texts, edit)


def cell_duplicated(draw: random.Random, texts: Texts) -> Texts:
    """A cell is there twice, in one report or in two."""
    contents = [json.loads(text) for text in texts]
    cell = copy.deepcopy(draw.choice(draw.choice(contents)[BLOCK]["cells"]))
    draw.choice(contents)[BLOCK]["cells"].append(cell)
    return [json.dumps(content) for content in contents]


def cell_renamed(draw: random.Random, texts: Texts) -> Texts:
    """A cell has another's name, or none that was planned."""
    def edit(block: Any) -> None:
        cell = draw.choice(block["cells"])
        cell["id"] = draw.choice([*(set(block["matrix"]["cells_planned"]) - {cell["id"]}), "nobody", ""])
    return _edited(draw, texts, edit)


def evidence_swapped(draw: random.Random, texts: Texts) -> Texts:
    """A cell has the observation of another one."""
    def edit(block: Any) -> None:
        one, other = draw.sample(block["cells"], 2)
        for key in draw.choice([("observation",), ("observation", "evidence_sha256"), ("axes",)]):
            one[key], other[key] = other[key], one[key]
    return _edited(draw, texts, edit)


def outcome_flipped(draw: random.Random, texts: Texts) -> Texts:
    """Verdicts say skip, or something else than what was found."""
    def edit(block: Any) -> None:
        cell = draw.choice(block["cells"])
        verdict = draw.choice(["skip", "xfail", "not_run", "fail", "crash", "error", "xpass", "timeout", "PASS", ""])
        names = list(cell["checks"])
        for name in draw.choice([names, names[:1], []]):
            cell["checks"][name]["verdict"] = verdict
            cell["checks"][name] |= draw.choice([{}, {"note": "no GPU"}])
        if draw.random() < 0.7 or all(check["verdict"] == "pass" for check in cell["checks"].values()):
            cell["status"] = verdict
        if draw.random() < 0.3:
            cell["observation"]["failure"] = {"kind": "skip", "message": "no GPU", "phase": "", "evidence": ""}
    return _edited(draw, texts, edit)


def not_selected(draw: random.Random, texts: Texts) -> Texts:
    """A cell says that it was not to be judged."""
    def edit(block: Any) -> None:
        cell = draw.choice(block["cells"])
        cell["selected"] = False
        if draw.random() < 0.5:
            cell |= {"checks": {}, "status": "not_run", "observation": None}
    return _edited(draw, texts, edit)


# what happens to runs


def other_environment(draw: random.Random, texts: Texts) -> Texts:
    """One of the shards ran with another torch, Python or device."""
    def edit(block: Any) -> None:
        key = draw.choice(["torch", "torch_git", "triton", "python", "compiler", "cuda", "driver", "devices"])
        value = block["environment"][key]
        block["environment"][key] = [*value, "other"] if isinstance(value, list) else f"{value}.1"
    return _edited(draw, texts, edit)


def other_matrix(draw: random.Random, texts: Texts) -> Texts:
    """One of the shards is of another matrix, another commit or another version of ours."""
    def edit(block: Any) -> None:
        matrix = block["matrix"]
        draw.choice([
            lambda: matrix.update(sha256="0" * 64), lambda: matrix.update(path="other.yaml"),
            lambda: matrix["cells_planned"].append("one-more"), lambda: matrix["cells_planned"].reverse(),
            lambda: matrix["checks"].append("more"), lambda: matrix["checks"].pop(),
            lambda: block["run"].update(plugin="9.9"),
            lambda: block["run"].update(git={"commit": "a" * 40, "changed": False, "prefix": ""}),
        ])()
    return _edited(draw, texts, edit)


def other_version(draw: random.Random, texts: Texts) -> Texts:
    """A schema that is newer, older than it is, or none."""
    version = draw.choice(["2.0", "0.9", "1", "1.x", "", "1.0", "1.1", "1.2", "99.1", "1.1.1", " 1.1", "१.१"])
    return _edited(draw, texts, lambda block: block.update(schema_version=version))


def other_shard(draw: random.Random, texts: Texts) -> Texts:
    """A shard says that it is another one, or is missing, or is there twice."""
    draw.shuffle(texts)
    index, of = draw.choice([(1, 1), (2, 1), (0, 2), (3, 2), (1, 3), (2, 3), (3, 3), (1, 10**9)])
    return draw.choice([
        lambda: texts[:1], lambda: [*texts, texts[0]], lambda: [texts[0], texts[0]],
        lambda: _edited(draw, texts, lambda block: block.update(shard={"index": index, "of": of})),
    ])()


def interrupted(draw: random.Random, texts: Texts) -> Texts:
    """The run did not end by itself, or ended with an error that no cell explains."""
    def edit(block: Any) -> None:
        draw.choice([
            lambda: block.update(finished=False), lambda: block["run"].update(exit_status=None),
            lambda: block["run"].update(exit_status=draw.choice([1, 2, 3, 4, 5, 137, -9])),
            lambda: block["run"].update(finished=None), lambda: block.update(environment={}),
            lambda: block.update(gates={"smoketest": {"verdict": "fail", "problems": []}}),
        ])()
    return _edited(draw, texts, edit)


def seal_wrong(draw: random.Random, texts: Texts) -> Texts:
    """A sealed report of which one character is another one, or whose text another program has formatted."""
    def change(text: str) -> str:
        whole = add_seal(text)
        if draw.random() < 0.2:
            return json.dumps(json.loads(whole), indent=1)
        place = draw.randrange(whole.rindex(', "compile_matrix_seal"'))
        other = draw.choice([c for c in '0123456789abcdefghijklmnopqrstuvwxyz"{}[],: ' if c != whole[place]])
        return whole[:place] + other + whole[place + 1:]
    return _one(draw, texts, change)


def other_run(draw: random.Random, texts: Texts) -> Texts:
    """Every shard says that it is of another torch, commit, matrix or time: what a careless edit does."""
    edit = draw.choice([
        lambda block: block["environment"].update(torch="2.99.0"),
        lambda block: block["environment"].update(devices=["NVIDIA H100"]),
        lambda block: block["run"].update(git={"commit": "b" * 40, "changed": False, "prefix": ""}),
        lambda block: block["run"].update(started="2026-11-22T09:00:00+00:00"),
        lambda block: block["run"].update(finished="2026-11-22T09:00:00+00:00"),
        lambda block: block["run"].update(ci={"GITHUB_RUN_ID": "7"}),
        lambda block: block["matrix"].update(sha256="1" * 64),
        lambda block: block["matrix"].update(excluded={"another reason": 7}),
    ])
    contents = [json.loads(text) for text in texts]
    for content in contents:
        edit(content[BLOCK])
    return [json.dumps(content) for content in contents]


def of_earlier_run(draw: random.Random, texts: Texts) -> Texts:
    """A run began after this one and left no report: a kill, a usage error. The mark may hold anything."""
    mark = draw.choice([LATER, LATER, {}, None, "x", [], 0, False])
    whole = draw.random() < 0.5

    def change(text: str) -> str:
        marked = f'{text.rstrip()[:-1]}, "compile_matrix_later_run": {json.dumps(mark)}}}'
        return add_seal(marked) if whole else marked
    return _one(draw, texts, change)


def kept_of_other_sources(draw: random.Random, texts: Texts) -> Texts:
    """Verdicts that a run of a part left as an earlier run, of another commit or of none, had found them."""
    def edit(block: Any) -> None:
        git = draw.choice([None, {"commit": "c" * 40, "changed": False, "prefix": ""}])
        for cell in draw.sample(block["cells"], draw.randint(1, len(block["cells"]))):
            names = draw.sample(list(cell["checks"]), draw.randint(1, len(cell["checks"])))
            cell["kept"] = [{"checks": names, "started": block["run"]["started"],
                             "finished": block["run"]["finished"], "git": git}]
        block["head_sha256"] = head_fingerprint(block)
    return _edited(draw, texts, edit)


# what happens to journals


def journal_of_earlier_run(draw: random.Random, texts: Texts) -> Texts:
    """A run began after this one and left no journal."""
    def change(text: str) -> str:
        content = {"kind": "later_run", **LATER}
        return text + json.dumps({**content, "sha256": fingerprint(content)}) + "\n"
    return _one(draw, texts, change)


def journal_of_no_verdict(draw: random.Random, texts: Texts) -> Texts:
    """A run that was killed before its first verdict: its plan is all there is, beside the report of another shard."""
    return _one(draw, texts, lambda text: text.splitlines(keepends=True)[0])


def journal_cut(draw: random.Random, texts: Texts) -> Texts:
    """A run that was killed: the journal ends somewhere."""
    return _one(draw, texts, lambda text: text[:draw.randrange(len(text) - 1)])


def journal_line_lost(draw: random.Random, texts: Texts) -> Texts:
    """A line is gone, there twice, or in another place."""
    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        which = draw.randrange(len(lines))
        line = lines.pop(which)
        what = draw.choice(["lost", "twice", "moved"])
        if what == "twice":
            lines[which:which] = [line, line]
        elif what == "moved":
            lines.insert(0 if which else len(lines), line)
        return "".join(lines)
    return _one(draw, texts, change)


def journal_damaged(draw: random.Random, texts: Texts) -> Texts:
    """A value in a line is another one."""
    def change(text: str) -> str:
        lines = [json.loads(line) for line in text.splitlines()]
        line = draw.choice(lines)
        path = draw.choice(list(_places(line)))
        old = _at(line, path)
        _at(line, path[:-1])[path[-1]] = draw.choice([v for v in OTHER_TYPES if v != old])
        return "".join(json.dumps(line) + "\n" for line in lines)
    return _one(draw, texts, change)


OF_REPORTS: list[Damage] = [
    truncated, cut_anywhere, emptied, overwritten, not_json, field_dropped, entry_dropped, type_changed, top_changed,
    evidence_changed, cell_removed, cell_duplicated, cell_renamed, evidence_swapped, outcome_flipped, not_selected,
    other_environment, other_matrix, other_version, other_shard, interrupted, seal_wrong, other_run, of_earlier_run,
    kept_of_other_sources,
]
OF_JOURNALS: list[Damage] = [journal_cut, journal_line_lost, journal_damaged, journal_of_earlier_run,
                             journal_of_no_verdict]
