"""A recording of a terminal for README and docs: a real run of moeopt on a recording, as SVG.

python -m benchmarks.terminal [--out docs/assets/terminal.svg]
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from moeopt.files import write_file

ROOT = Path(__file__).parents[1]
WIDTH = 124
COMMANDS = (
    "moeopt tune --gpu recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz --export sglang:moe-configs",
    "moeopt doctor --config-dir moe-configs --experts 256 --top-k 8 --hidden 3072 --intermediate 256 --dtype bf16 \\\n"
    '    --gpu "NVIDIA H200" --triton 3.6.0',
)


def main() -> None:
    """Runs the commands one after the other in an empty directory and writes what they print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets" / "terminal.svg")
    out = parser.parse_args().out
    text = Text()
    with tempfile.TemporaryDirectory() as directory:
        for command in COMMANDS:
            text.append(f"$ {command}\n", style="bold")
            text.append_text(Text.from_ansi(_run(command, directory)))
            text.append("\n\n")
    text.rstrip()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text)
    # Without the fonts that it would fetch from elsewhere: the reader's own monospace does.
    usual = inspect.signature(Console.export_svg).parameters["code_format"].default
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", usual, flags=re.DOTALL)
    plain = plain.replace("Fira Code", "ui-monospace")
    write_file(out, console.export_svg(title="moeopt", theme=MONOKAI, code_format=plain, unique_id="moeopt"))
    print("wrote", out)


def _run(command: str, directory: str) -> str:
    # Rich fits the table to the terminal, and colours only what goes to one.
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)}
    line = command.replace("moeopt", f"{sys.executable} -m moeopt.cli", 1)
    done = subprocess.run(
        ["bash", "-c", line], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


if __name__ == "__main__":
    main()
