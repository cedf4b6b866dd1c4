"""Every dsv41 command line of the CI page is one that the program takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

import reports
from harness.cli import app

PAGE = (Path(reports.__file__).parent / "CI.md").read_text(encoding="utf-8")
LINES = sorted(
    {
        m.group(0).strip(" `")
        for m in re.finditer(r"dsv41 (gate|bench|report)[^\n`|&]*", PAGE)
        if "--" in m.group(0)
    }
)


@pytest.mark.parametrize("line", LINES)
def test_command_line(line):
    group = typer.main.get_command(app)
    name, *arguments = shlex.split(line)[1:]
    command = group.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    used = [argument for argument in arguments if argument.startswith("-")]
    assert used and set(used) <= known, set(used) - known


def test_parts_of_the_page_are_those_of_the_gate():
    from reports.gate_parts import PARTS

    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(PARTS)
