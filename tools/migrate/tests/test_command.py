"""gradkit-migrate: what it prints and writes, which files it takes, how it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from gradkit_migrate import migrate
from gradkit_migrate.command import main

LOOP = '''"""A loop."""
import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.ones(2)]:
    optimizer.zero_grad()
    loss = model( x ).sum()   # spaced as they like
    loss.backward()
    optimizer.step()
'''
MOVED = '''"""A loop."""
import torch
from torch import nn
import gradkit

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.ones(2)]:
    loss = model( x ).sum()   # spaced as they like
    gradkit.minimize_(optimizer, loss)
'''
LEFT = LOOP.replace("backward()", "backward(create_graph=True)")


def test_a_diff_is_shown_and_nothing_is_written(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(LOOP, encoding="utf-8")
    assert main([str(file)]) == 0
    out, err = capsys.readouterr()
    assert file.read_text(encoding="utf-8") == LOOP
    assert "-    optimizer.zero_grad()\n" in out
    assert "+    gradkit.minimize_(optimizer, loss)\n" in out
    assert "1 file: 1 training step to move, 0 left\n" in err
    (tmp_path / "change.diff").write_text(out, encoding="utf-8")
    depth = len(tmp_path.parts)
    patch = ["git", "apply", "--unsafe-paths", f"-p{depth}", "change.diff"]
    subprocess.run(patch, cwd=tmp_path, check=True)
    assert file.read_text(encoding="utf-8") == MOVED


def test_it_writes_where_it_is_told_to(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py")]
    for file, text in zip(files, (LOOP, LEFT, "print('no loop')\n"), strict=True):
        file.write_text(text, encoding="utf-8")
    assert main(["--write", str(files[0]), str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert [file.read_text(encoding="utf-8") for file in files] == [
        MOVED,
        LEFT,
        "print('no loop')\n",
    ]
    assert out == f"wrote {files[0]}\n"
    assert f"{files[1]}:10: left: loss.backward(create_graph=True) has options\n" in err
    assert "by hand: gradkit.value_and_grads(loss, model, create_graph=True)" in err
    assert "3 files: 1 training step moved, 1 left\n" in err
    assert main(["--write", str(files[0])]) == 0
    assert files[0].read_text(encoding="utf-8") == MOVED


def test_a_file_that_does_not_parse_is_named_and_the_others_are_read(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    (tmp_path / "b.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "c.py").write_text(LOOP, encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'a.py'}:2: does not parse" in err
    assert f"{tmp_path / 'b.py'}:1: does not parse" in err
    assert "gradkit.minimize_" in out
    assert "3 files: 1 training step to move, 0 left, 2 files not read\n" in err


def test_folders_of_others_are_skipped(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("inner", ".hidden", "__pycache__", "environment", "venv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(LEFT, encoding="utf-8")
    (tmp_path / "environment" / "pyvenv.cfg").touch()
    (tmp_path / "inner" / "notes.txt").write_text(LEFT, encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    _, err = capsys.readouterr()
    assert "1 file: 0 training steps to move, 1 left\n" in err
    assert str(Path("inner", "train.py")) in err


@pytest.mark.parametrize("arguments", [[], ["no/such/file.py"], ["--frobnicate", "."]])
def test_misuse_has_its_own_status(device: torch.device, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments])
    assert stopped.value.code == 2


def test_line_ends_encoding_and_mark_stay(device: torch.device) -> None:
    text = LOOP.replace("A loop", "Eine Schleife für äöü").replace("(2, 1)", "(2, 1)  # größer")
    text = text.replace("    loss.", "    'ß'; loss.")
    new = MOVED.replace("A loop", "Eine Schleife für äöü").replace("(2, 1)", "(2, 1)  # größer")
    new = new.replace("    gradkit.mini", "    'ß'\n    gradkit.mini")
    assert migrate(text.encode()).source == new.encode()
    dos = text.replace("\n", "\r\n").encode()
    assert migrate(dos).source == new.replace("\n", "\r\n").encode()
    latin = ("# coding: latin-1\n" + text).encode("latin-1")
    assert migrate(latin).source == ("# coding: latin-1\n" + new).encode("latin-1")
    assert migrate(b"\xef\xbb\xbf" + text.encode()).source == b"\xef\xbb\xbf" + new.encode()
    assert migrate(text.encode().rstrip()).source == new.encode().rstrip()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "import gradkit\n\n"),
        ("# A comment.\n", "# A comment.\nimport gradkit\n\n"),
        ('"""Text."""\n', '"""Text."""\nimport gradkit\n\n'),
        (
            '"""Text."""\nfrom __future__ import annotations\n\nimport os\n\nX = 1\nimport re\n',
            '"""Text."""\nfrom __future__ import annotations\n\nimport os\nimport gradkit\n\n'
            "X = 1\nimport re\n",
        ),
        ("import gradkit\n", "import gradkit\n"),
        ("import os; import re\n", "import gradkit\n\nimport os; import re\n"),
        ("from gradkit import step_\n", "from gradkit import step_\nimport gradkit\n\n"),
    ],
)
def test_gradkit_is_imported_once_after_the_imports(
    device: torch.device, before: str, after: str
) -> None:
    loop = "def f(x, opt):\n    opt.zero_grad()\n    x.sum().backward()\n    opt.step()\n"
    moved = "    gradkit.minimize_(opt, x.sum())\n"
    source = migrate((before + loop).encode()).source.decode()
    assert source == f"{after}def f(x, opt):\n{moved}"


def test_the_name_that_gradkit_has_is_used(device: torch.device) -> None:
    source = LOOP.replace("import torch\n", "import torch\nimport gradkit as gk\n", 1)
    new = migrate(source.encode()).source.decode()
    assert "gk.minimize_(optimizer, loss)" in new
    assert "import gradkit\n" not in new


def test_names_in_use_stay(device: torch.device) -> None:
    source = LOOP.replace("backward()", "backward()\n    print(loss)")
    source += "print(_('done'), grads, step_grads)\n"
    new = migrate(source.encode()).source.decode()
    assert "loss_value, step_grads_2 = gradkit.value_and_grads(loss, model)" in new


def test_comments_about_clearing_go_and_others_stay(device: torch.device) -> None:
    source = LOOP.replace(
        "    optimizer.zero_grad()\n",
        "    # one step\n\n    # reset the gradients\n    optimizer.zero_grad()  # to None\n\n",
    ).replace("loss.backward()", "loss.backward()  # type: ignore[no-untyped-call]")
    new = migrate(source.encode()).source.decode()
    expected = "    # one step\n    # to None\n\n    loss = model( x ).sum()"
    assert expected in new
    assert "reset" not in new
    assert "type: ignore" not in new


def test_a_loss_on_several_lines_keeps_them(device: torch.device) -> None:
    source = LOOP.replace("    loss.backward()", "    (loss\n     + 1).backward()  # one more")
    new = migrate(source.encode()).source.decode()
    assert "    # one more\n    gradkit.minimize_(optimizer, (loss\n     + 1))\n" in new


def test_what_is_taken_for_granted_is_said_once(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(LOOP, encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("note: optimizers that come from elsewhere") == 1
    (tmp_path / "a.py").write_text(LEFT, encoding="utf-8")
    assert main([str(tmp_path / "a.py")]) == 1
    assert "note: " not in capsys.readouterr().err
