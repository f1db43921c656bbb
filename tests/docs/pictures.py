"""The pictures in README: what the terminal shows, and the page, of real runs of the models that README shows.

``python tests/docs/pictures.py`` makes them again, in some minutes. It needs torch, a C++ compiler and Chromium.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# As a script it has its own folder on the path, not that of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from chromium import chromium
from docs.pages import DOCS, README, files_of

PICTURES = DOCS / "pictures"
BRANCH = re.compile(r"        if h.mean.*?\n.*?\n")
"""What of README's model breaks the graph."""
BACKENDS = "[aot_eager, inductor]"
MATRIX = f"""version: 1
models:
  scorer: {{factory: models:Scorer, inputs: models:batch, dims: {{B: {{choices: [4, 6, 12]}}}}}}
  mlp: {{factory: mlp:Mlp, inputs: mlp:batch, dims: {{B: {{choices: [4, 6, 12]}}}}}}
axes:
  backend: {BACKENDS}
  dynamic: [auto, dynamic]
checks: [graph_breaks, compiles, equivalence, gradients, training_steps, recompiles]
"""
MORE = """rules:
  - exclude: {model: scorer, backend: "passes:approximate"}
    reason: it has no gelu
"""
COMMAND = ("pytest", "--compile-matrix", "-n", "2")
WIDTH = 112
"""Characters of a line; longer ones are cut."""
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff"}
SHOWN = ("torch.compile: ", "compile matrix: ")
"""Lines of the head that are kept."""
LEFT_OUT = ("[gw", "time of ")
"""Beginnings of lines that tell of the machine at hand."""
STYLE = re.compile(r"\x1b\[([\d;]*)m")
LINE_HEIGHT, CHARACTER = 19, 8.1


def commits_of_project() -> Iterator[tuple[str, dict[str, str]]]:
    """What was committed and the files that it changed: all holds, then a branch, then a pass that approximates."""
    model = files_of(README)["models.py"]
    # The model with its pass is that of the tutorial for compiler engineers.
    other = files_of(DOCS / "tutorials/compiler-engineer.md")
    yield "Two models", {
        "models.py": BRANCH.sub("", model),
        "mlp.py": other["models.py"],
        "matrix/default.yaml": MATRIX,
        "pytest.ini": "[pytest]\n",
        ".gitignore": "runs/\n*.html\n__pycache__/\n",
    }
    yield "A branch on a value", {"models.py": model}
    wider = MATRIX.replace(BACKENDS, '[aot_eager, inductor, "passes:approximate"]')
    yield "A cheaper gelu", {"passes.py": other["passes.py"], "matrix/default.yaml": wider + MORE}


def commit(folder: Path, message: str, files: dict[str, str]) -> None:
    """Write the files and commit them, as the page tells of which commit a run is."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    who = ("-c", "user.name=we", "-c", "user.email=we@example.org")
    for command in (("init", "--quiet"), ("add", "."), (*who, "commit", "--quiet", "--message", message)):
        subprocess.run(["git", *command], cwd=folder, check=True)


def run(folder: Path, *command: str) -> str:
    """What a command prints, colours too; cells may fail."""
    settings = {**os.environ, "COLUMNS": str(WIDTH)}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=settings, text=True,
                          capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def chosen_lines(output: str) -> Iterator[str]:
    """The head, the first failure of each kind, and the summary: what one looks at."""
    yield f"$ {' '.join(COMMAND)}"
    lines = output.splitlines()
    plain = [STYLE.sub("", line) for line in lines]
    yield from (line for line, words in zip(lines, plain, strict=True) if words.startswith(SHOWN))
    yield ""
    title = re.compile(r"_+ \S+::(graph_breaks|equivalence) _+$")
    starts = [number for number, words in enumerate(plain) if title.match(words)]
    kinds = {plain[number].partition("::")[2].strip(" _"): number for number in reversed(starts)}
    for start in sorted(kinds.values()):
        end = next(number for number in range(start + 1, len(plain)) if re.match("[_=-]{3}", plain[number]))
        yield from told(lines[start:end])
    begin = next(number for number, words in enumerate(plain) if re.match("-+ torch.compile matrix -+$", words))
    yield ""
    yield from told(lines[begin:])


def told(lines: list[str]) -> Iterator[str]:
    """The lines that tell of the models."""
    yield from (line for line in lines if not STYLE.sub("", line).startswith(LEFT_OUT))


def terminal_svg(lines: list[str]) -> str:
    """Lines with colours as a picture of a terminal."""
    width, height = int(WIDTH * CHARACTER) + 40, len(lines) * LINE_HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>pytest --compile-matrix in a terminal</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" '
        'font-size="13.5" fill="#e6edf3">',
    ]
    for number, line in enumerate(lines):
        y = 30 + number * LINE_HEIGHT
        parts.append(f'<text x="20" y="{y}">{"".join(coloured(line))}</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def coloured(line: str) -> Iterator[str]:
    """The pieces of a line, each in its colour; no more than the width of the terminal."""
    left = WIDTH
    style = ""
    for number, piece in enumerate(STYLE.split(line)):
        if number % 2:
            style = piece
            continue
        words = piece if len(piece) <= left else piece[: left - 1] + "…"
        left -= len(words)
        if not words:
            continue
        codes = style.split(";")
        colour = next((COLOURS[code] for code in codes if code in COLOURS), "")
        marks = f' fill="{colour}"' if colour else ""
        marks += ' font-weight="bold"' if "1" in codes else ""
        # Several blanks would be shown as one.
        fixed = html.escape(words).replace(" ", "\N{NO-BREAK SPACE}")
        yield f"<tspan{marks}>{fixed}</tspan>"
        if left <= 0:
            return


def main() -> None:
    """Run the example at each of its commits, and write both pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        for number, (message, files) in enumerate(commits_of_project()):
            commit(folder, message, files)
            output = run(folder, *COMMAND, "--color=yes")
            shutil.copy(folder / ".compile-matrix/report.json", folder / f"runs/{number}.json")
        (PICTURES / "terminal.svg").write_text(terminal_svg(list(chosen_lines(output))), encoding="utf-8")
        run(folder, "pytest_torchcompile", "html", "runs")
        with chromium() as browser:
            browser.open((folder / "compile-matrix.html").as_uri(), width=1280, height=860)
            browser.screenshot(PICTURES / "page.png")


if __name__ == "__main__":
    main()
